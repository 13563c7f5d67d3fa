"""FP8 (E4M3) checkpoints: 128x128 blocks as DeepSeek and Qwen store them, or one scale a tensor."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from vllm.errors import CheckpointError
from vllm.formats import fp8_block, fp8_tensor
from vllm.formats.act_scheme import ActScheme
from vllm.formats.readers.base import QuantizationConfig, StoredLayer, TensorNames, of_weights
from vllm.formats.readers.layer_names import LayerNames, layers_listed, tell_experts_apart
from vllm.formats.weight_format import WeightFormat

_ACT_SCHEMES = ("dynamic", "static")


class Fp8Config(QuantizationConfig):
    """is_checkpoint_fp8_serialized: the checkpoint holds FP8; otherwise it is quantised at load.

    activation_scheme: "dynamic", or "static" (a scale per layer in the checkpoint, per-tensor
    weights only). weight_block_size: (rows, columns) that share a scale; None: one per tensor.
    ignored_layers: names of layers that are not quantised, or of their parents, or last parts.
    use_deep_gemm: whether DeepGEMM may serve block-quantised layers; None is automatic.
    """

    name = "fp8"

    def __init__(
        self,
        is_checkpoint_fp8_serialized: bool = False,
        activation_scheme: str = "dynamic",
        ignored_layers: Sequence[str] | None = None,
        weight_block_size: Sequence[int] | None = None,
        use_deep_gemm: bool | None = None,
    ):
        if activation_scheme not in _ACT_SCHEMES:
            raise CheckpointError(
                f"FP8 activation_scheme {activation_scheme!r} is not supported: it takes "
                f"{', '.join(_ACT_SCHEMES)}"
            )
        self.is_checkpoint_fp8_serialized = is_checkpoint_fp8_serialized
        self.is_checkpoint_quantized = is_checkpoint_fp8_serialized
        self.activation_scheme = activation_scheme
        self.use_deep_gemm = use_deep_gemm
        self.ignored_layers = tuple(ignored_layers or ())
        self._ignored = LayerNames(self.ignored_layers)
        self.tells_experts_apart = tell_experts_apart(self.ignored_layers)
        self.weight_block_size = fp8_block.as_block(weight_block_size)
        if weight_block_size is not None and self.weight_block_size is None:
            raise CheckpointError(
                f"weight_block_size {weight_block_size!r} is not two positive sizes"
            )
        self.can_use_deep_gemm = self.weight_block_size is not None
        if use_deep_gemm not in (None, True, False):
            raise CheckpointError(f"use_deep_gemm {use_deep_gemm!r}: it takes true, false or null")
        if self.weight_block_size and activation_scheme == "static":
            raise CheckpointError(
                "FP8 with weight_block_size takes activation_scheme dynamic, not static"
            )

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "Fp8Config":
        fmt = config.get("fmt", "e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise CheckpointError(f"FP8 format {fmt!r} is not supported: it takes e4m3")
        found = cls(
            is_checkpoint_fp8_serialized=True,
            activation_scheme=config.get("activation_scheme", "dynamic"),
            ignored_layers=layers_listed(config, "modules_to_not_convert", "ignored_layers"),
            weight_block_size=config.get("weight_block_size"),
            use_deep_gemm=config.get("use_deep_gemm"),
        )
        if config.get("scale_fmt") == "ue8m0":
            found.exact_scales = "scale_fmt of config.json is ue8m0"
        return found

    @classmethod
    def at_load(cls) -> "Fp8Config":
        return cls(weight_block_size=fp8_block.BLOCK, ignored_layers=fp8_block.FORMAT.kept_at_load)

    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        # The output projection never counts as a layer to quantise, as in transformers.
        if any(name.endswith("lm_head") for name in names) or self._ignored.covers(names):
            return None
        return of_weights(self._stored, len(names))

    @cached_property
    def _stored(self) -> StoredLayer:
        stored = fp8_block.FORMAT if self.weight_block_size else fp8_tensor.FORMAT
        is_static = self.activation_scheme == "static"
        return StoredLayer(
            WeightFormat.of(stored.kind, self.weight_block_size or (0, 0)),
            (ActScheme.STATIC_TENSOR, ActScheme.NONE) if is_static else stored.act,
            TensorNames(scale="weight_scale_inv" if self.weight_block_size else "weight_scale"),
            is_quantized=self.is_checkpoint_fp8_serialized,
        )

    def slot_name(self, name: str) -> str | None:
        """transformers' names for the scales of per-tensor checkpoints become ours."""
        if self.weight_block_size is None:
            name = name.replace(".weight_scale_inv", ".weight_scale")
            name = name.replace(".activation_scale", ".input_scale")
        return super().slot_name(name)
