"""Quantisation methods of checkpoints, by the `quant_method` of their config.json.

No torch here: which format a layer has, and with it every kernel choice, resolves without it.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.errors import CheckpointError, ConfigError, did_you_mean
from vllm.formats.weight_format import ActScheme, WeightFormat
from vllm.logger import get_logger

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE, MoEMethod
    from vllm.model_executor.layers.linear import LinearMethod

logger = get_logger(__name__)

LayerFormat = tuple[WeightFormat, tuple[ActScheme, ...]]
"""How a layer's weight is stored, and the activation schemes allowed with it, best liked first."""


class QuantizationConfig(ABC):
    """How a checkpoint's weights are quantised, and which layers are not.

    use_deep_gemm: None is automatic, True and False are decided; model_rule: the reason, where the
    model rule decided (VllmConfig). can_use_deep_gemm: its weights are of DeepGEMM's format.
    has_cache_scales: calibrated scales of the KV cache, where there are any, are for an FP8 one.
    """

    name: str
    is_checkpoint_quantized: bool
    can_use_deep_gemm: bool = False
    use_deep_gemm: bool | None = None
    model_rule: str = ""
    has_cache_scales: bool = True

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "QuantizationConfig":
        """From `quantization_config` of config.json; CheckpointError for what is not supported."""

    @classmethod
    def at_load(cls) -> "QuantizationConfig":
        """For a checkpoint that is not quantised: quantise while loading."""
        raise ConfigError(f"--quantization {cls.name} needs a checkpoint that is quantised so")

    @abstractmethod
    def layer_format(self, names: Sequence[str]) -> LayerFormat | None:
        """Of one layer made of the checkpoint weights `names`; None for one not quantised.

        CheckpointError where only a part of a merged layer is quantised.
        """

    @abstractmethod
    def linear_method(self, names: Sequence[str]) -> "LinearMethod | None":
        """The method of a layer made of the checkpoint weights `names`; None for one that is not
        quantised."""

    def moe_method(self, layer: "FusedMoE") -> "MoEMethod | None":
        """The method of one layer of experts; None for one that is not quantised."""
        from vllm.model_executor.layers.quantization.experts import StackedMoEMethod

        # One format serves all experts of a layer, so the first one speaks for them.
        method = self.linear_method(layer.expert_names(0))
        return method and StackedMoEMethod(method)

    def slot_name(self, name: str) -> str | None:
        """Our name for a checkpoint tensor that other tools name differently; None for one that
        is not needed."""
        found = _cache_scale_name(name)
        return None if found != name and not self.has_cache_scales else found


class LayerNames:
    """Names of layers, or of parents or last parts of them, as configs list them; or globs, which
    match whole names; or `re:` and a regular expression, which matches from the start of a name.

    Multimodal checkpoints list `model.language_model.layers.0.mlp` (or `language_model.model...`)
    for what the text model calls `model.layers.0.mlp`.
    """

    def __init__(self, entries: Sequence[str]):
        if not all(isinstance(entry, str) for entry in entries):
            raise CheckpointError(
                f"layers that are not quantised are listed by name, not as {list(entries)!r}"
            )
        self._patterns = [_compiled(e[3:]) for e in entries if e.startswith("re:")]
        names = [_text_model_name(entry) for entry in entries if not entry.startswith("re:")]
        self._parts = {tuple(name.split(".")) for name in names if "*" not in name}
        self._globs = [name for name in names if "*" in name]

    def __contains__(self, layer: str) -> bool:
        parts = tuple(layer.split("."))
        spans = range(len(parts))
        if any(parts[i : j + 1] in self._parts for i in spans for j in spans[i:]):
            return True
        if any(pattern.match(layer) for pattern in self._patterns):
            return True
        return any(fnmatchcase(layer, glob) for glob in self._globs)

    def covers(self, layers: Sequence[str]) -> bool:
        """Whether all of `layers` are named; CheckpointError where some are and some are not."""
        named = {layer for layer in layers if layer in self}
        if named and len(named) < len(set(layers)):
            raise CheckpointError(
                f"{', '.join(sorted(set(layers)))} are computed as one layer, but only "
                f"{', '.join(sorted(named))} is listed as not quantised"
            )
        return bool(named)


def _text_model_name(entry: str) -> str:
    return ".".join(part for part in entry.split(".") if part != "language_model") or "model"


def _compiled(pattern: str) -> "re.Pattern[str]":
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"layers are listed by re:{pattern}: {error}") from error


def layers_listed(config: Mapping[str, Any], *fields: str) -> list[str]:
    """The first of `fields` that lists layers; [] for none. CheckpointError for what is no list."""
    for field in fields:
        listed = config.get(field) or []
        if not isinstance(listed, list | tuple):
            raise CheckpointError(
                f"quantization_config: {field} = {listed!r}: it takes a list of layers"
            )
        if listed:
            return list(listed)
    return []


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


def _cache_scale_name(name: str) -> str | None:
    """Our name for a calibrated scale of the KV cache: `self_attn.k_scale` (compressed-tensors) and
    `self_attn.k_proj.k_scale` (ModelOpt) are `self_attn.attn.k_scale`. None for a scale of queries,
    which are not quantised here. Any other name as it is."""
    parent, _, last = name.rpartition(".")
    if last == "q_scale":
        return None
    if last not in _CACHE_SCALES:
        return name
    return f"{parent.removesuffix('.attn').removesuffix(f'.{last[0]}_proj')}.attn.{last}"


def quantization_methods() -> dict[str, type[QuantizationConfig]]:
    """By `quant_method`."""
    from vllm.model_executor.layers.quantization.awq import AwqConfig
    from vllm.model_executor.layers.quantization.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.fp8_config import Fp8Config
    from vllm.model_executor.layers.quantization.modelopt import ModelOptConfig, ModelOptNvFp4Config

    configs = (Fp8Config, ModelOptConfig, ModelOptNvFp4Config, CompressedTensorsConfig, AwqConfig)
    return {config.name: config for config in configs}


def quantization_config_of(model_config: "ModelConfig") -> QuantizationConfig | None:
    """What the checkpoint says, or what `--quantization` asks for; None for neither."""
    stored = None
    for config in (model_config.hf_config, model_config.hf_text_config):
        found = getattr(config, "quantization_config", None)
        if found is not None:
            stored = dict(found if isinstance(found, dict) else found.to_dict())
            break
    if stored is None:
        stored = modelopt_file(model_config.path)
    return resolve_quantization(stored, model_config.quantization, model_config.model)


def modelopt_file(folder: Path) -> dict[str, Any] | None:
    """What older ModelOpt checkpoints say beside a config.json that says nothing."""
    file = folder / "hf_quant_config.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        return {**content, "quant_method": "modelopt"}
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"{file} is not a JSON object: {error}") from error


def resolve_quantization(
    stored: dict[str, Any] | None, asked: str | None, model: str
) -> QuantizationConfig | None:
    """`stored`: quantization_config of config.json. ConfigError, CheckpointError."""
    methods = quantization_methods()
    if asked is not None and asked not in methods:
        raise ConfigError(
            f"--quantization {asked!r} is unknown: it takes {', '.join(methods)}"
            f"{did_you_mean(asked, methods)}"
        )
    if stored is None:
        return methods[asked].at_load() if asked else None
    name = stored.get("quant_method")
    if not isinstance(name, str) or name not in methods:
        raise CheckpointError(
            f"{model}: quant_method {name!r} is not supported; it takes {', '.join(methods)}, or a "
            f"checkpoint that is not quantised"
        )
    if asked is not None and not issubclass(methods[asked], methods[name]):
        raise ConfigError(
            f"--quantization {asked} contradicts the checkpoint, which is quantised as {name}; "
            f"leave the flag out"
        )
    return methods[asked or name].from_checkpoint(stored)
