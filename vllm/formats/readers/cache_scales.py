"""Calibrated scales of the KV cache that checkpoints store."""

from collections.abc import Mapping

from vllm.logger import get_logger

logger = get_logger(__name__)


def has_fp8_cache_scales(scheme: object) -> bool:
    """Whether calibrated scales of the KV cache are ones that an FP8 cache of ours can take.

    scheme: what the checkpoint says of its cache, if anything: a name, or how numbers are stored.
    """
    if isinstance(scheme, Mapping):
        wanted = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        is_fp8 = all(scheme.get(field, value) == value for field, value in wanted.items())
        is_fp8 = is_fp8 and scheme.get("symmetric", True) is True
    else:
        is_fp8 = not scheme or str(scheme).upper() == "FP8"
    if not is_fp8:
        logger.warning(
            "The checkpoint's scales for its KV cache (%s) are not used: an FP8 cache here has one "
            "static scale per layer for K and one for V",
            scheme,
        )
    return is_fp8


_CACHE_SCALES = ("k_scale", "v_scale")


def cache_scale_name(name: str) -> str | None:
    """Our name for a calibrated scale of the KV cache: `self_attn.k_scale` (compressed-tensors) and
    `self_attn.k_proj.k_scale` (ModelOpt) are `self_attn.attn.k_scale`. None for a scale of queries,
    which are not quantised here. Any other name as it is."""
    parent, _, last = name.rpartition(".")
    if last == "q_scale":
        return None
    if last not in _CACHE_SCALES:
        return name
    return f"{parent.removesuffix('.attn').removesuffix(f'.{last[0]}_proj')}.attn.{last}"
