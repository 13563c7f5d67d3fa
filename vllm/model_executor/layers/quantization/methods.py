"""From what a reader says of a layer to the method that loads it, by weight format.

A format of another package has a method too: an entry point of the group
`vllm.quantization_methods` named after the format's kind, called as those below.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.errors import CheckpointError
from vllm.formats import fp8_block, fp8_channel, fp8_tensor, int4, nvfp4
from vllm.formats.readers.base import QuantizationConfig, StoredLayer
from vllm.model_executor.layers.fused_moe.layer import FusedMoE, MoEMethod
from vllm.model_executor.layers.linear import LinearMethod
from vllm.model_executor.layers.quantization.experts import StackedMoEMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.int4 import int4_linear_method
from vllm.model_executor.layers.quantization.nvfp4 import Nvfp4LinearMethod
from vllm.utils.entry_points import extensions

ENTRY_POINTS = "vllm.quantization_methods"
MakeMethod = Callable[[QuantizationConfig, StoredLayer], LinearMethod]
_FP8 = [known.FORMAT.kind for known in (fp8_block, fp8_channel, fp8_tensor)]
_LINEAR: dict[str, MakeMethod] = {
    **dict.fromkeys(_FP8, Fp8LinearMethod),
    nvfp4.FORMAT.kind: Nvfp4LinearMethod,
    int4.FORMAT.kind: int4_linear_method,
}


@dataclass(frozen=True, slots=True)
class QuantizationMethods:
    """Methods of the layers of one checkpoint; None for layers that are not quantised."""

    config: QuantizationConfig | None

    def linear_method(self, names: Sequence[str]) -> LinearMethod | None:
        """Of a layer made of the checkpoint weights `names`."""
        layer = self.config and self.config.stored_layer(names)
        return layer and self._linear(layer)

    def moe_method(self, layer: FusedMoE) -> MoEMethod | None:
        # One format serves all experts of a layer, so the first one speaks for them.
        stored = self.config and self.config.stored_layer(layer.expert_names(0))
        if stored is None:
            return None
        if stored.format.kind in _FP8:
            return Fp8MoEMethod(self.config, stored)
        return StackedMoEMethod(self._linear(stored))

    def _linear(self, layer: StoredLayer) -> LinearMethod:
        assert self.config is not None
        methods, kind = _LINEAR | extensions(ENTRY_POINTS), layer.format.kind
        if kind not in methods:
            raise CheckpointError(
                f"weights in {kind} are not served by this engine: it takes {', '.join(methods)}; "
                f"take the model in one of these formats"
            )
        return methods[kind](self.config, layer)
