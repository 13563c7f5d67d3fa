"""FP8 (E4M3) checkpoints: 128x128 blocks as DeepSeek and Qwen store them, or one scale a tensor.

No torch here: the configuration, and with it every kernel choice, resolves without it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.errors import CheckpointError
from vllm.formats.weight_format import ActScheme, WeightFormat
from vllm.model_executor.layers.quantization import (
    LayerFormat,
    LayerNames,
    QuantizationConfig,
    layers_listed,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod

DEFAULT_BLOCK = (128, 128)
_ACT_SCHEMES = ("dynamic", "static")
# The gates of a gated delta-net, one row a head; the vendor's FP8 checkpoints keep them too.
_KEPT_AT_LOAD = ("in_proj_a", "in_proj_b")


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
        self.weight_block_size = _check_block(weight_block_size)
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
        return cls(
            is_checkpoint_fp8_serialized=True,
            activation_scheme=config.get("activation_scheme", "dynamic"),
            ignored_layers=layers_listed(config, "modules_to_not_convert", "ignored_layers"),
            weight_block_size=config.get("weight_block_size"),
            use_deep_gemm=config.get("use_deep_gemm"),
        )

    @classmethod
    def at_load(cls) -> "Fp8Config":
        return cls(weight_block_size=DEFAULT_BLOCK, ignored_layers=_KEPT_AT_LOAD)

    def layer_format(self, names: Sequence[str]) -> LayerFormat | None:
        # The output projection never counts as a layer to quantise, as in transformers.
        if any(name.endswith("lm_head") for name in names) or self._ignored.covers(names):
            return None
        if self.weight_block_size:
            weight = WeightFormat("fp8", "block", self.weight_block_size)
            return weight, (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)
        # Shards keep their own scales when merged: re-scaling to a common one would lose bits.
        weight = WeightFormat("fp8", "tensor" if len(names) == 1 else "channel")
        if self.activation_scheme == "static":
            return weight, (ActScheme.STATIC_TENSOR, ActScheme.NONE)
        return weight, (ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.NONE)

    def linear_method(self, names: Sequence[str]) -> "Fp8LinearMethod | None":
        from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

        layer_format = self.layer_format(names)
        return layer_format and Fp8LinearMethod(self, *layer_format)

    def moe_method(self, layer: "FusedMoE") -> "Fp8MoEMethod | None":
        from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

        layer_format = self.layer_format(layer.expert_names(0))
        return layer_format and Fp8MoEMethod(self, *layer_format)

    def slot_name(self, name: str) -> str | None:
        """transformers' names for the scales of per-tensor checkpoints become ours."""
        if self.weight_block_size is None:
            name = name.replace(".weight_scale_inv", ".weight_scale")
            name = name.replace(".activation_scale", ".input_scale")
        return super().slot_name(name)


def _check_block(block: Sequence[int] | None) -> tuple[int, int] | None:
    if block is None:
        return None
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or not all(isinstance(b, int) and 0 < b <= 1 << 16 for b in block):
        raise CheckpointError(f"weight_block_size {block!r} is not two positive sizes")
    return (block[0], block[1])
