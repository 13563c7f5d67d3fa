"""From what a reader says of a layer to the method that loads it, by weight format.

A format of another package has a method too: an entry point of the group
`vllm.quantization_methods` named after the format's kind, called as those below.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.errors import CheckpointError
from vllm.formats import fp8_block, fp8_channel, fp8_tensor, int4, int8, mxfp4, mxfp8, nvfp4
from vllm.formats.readers.base import QuantizationConfig, StoredLayer
from vllm.formats.weight_format import WeightFormat
from vllm.model_executor.layers.linear import LinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.gptq import GptqLinearMethod
from vllm.model_executor.layers.quantization.int4 import AwqLinearMethod, Int4LinearMethod
from vllm.model_executor.layers.quantization.int8 import Int8LinearMethod
from vllm.model_executor.layers.quantization.mx import MxLinearMethod
from vllm.model_executor.layers.quantization.nvfp4 import Nvfp4LinearMethod
from vllm.utils.entry_points import extensions

ENTRY_POINTS = "vllm.quantization_methods"
MakeMethod = Callable[[QuantizationConfig, StoredLayer], LinearMethod]
_FP8 = [known.FORMAT.kind for known in (fp8_block, fp8_channel, fp8_tensor)]
_INTEGERS = [known.kind for known in (int4.FORMAT, int4.CHANNEL, int8.GROUP, int8.CHANNEL)]
# By the layout in which codes are packed.
_OF_INTEGERS: dict[str, MakeMethod] = {
    "": Int8LinearMethod,
    "int32": Int4LinearMethod,
    "awq": AwqLinearMethod,
    "gptq": GptqLinearMethod,
    "gptq_v2": GptqLinearMethod,
}


def _integer_method(config: QuantizationConfig, layer: StoredLayer) -> LinearMethod:
    return _OF_INTEGERS[layer.names.packing](config, layer)


_LINEAR: dict[str, MakeMethod] = {
    **dict.fromkeys(_FP8, Fp8LinearMethod),
    nvfp4.FORMAT.kind: Nvfp4LinearMethod,
    mxfp8.FORMAT.kind: MxLinearMethod,
    mxfp4.FORMAT.kind: MxLinearMethod,
    **dict.fromkeys(_INTEGERS, _integer_method),
}
_EXPERTS: dict[str, MakeMethod] = dict.fromkeys(_FP8, Fp8MoEMethod)


@dataclass(frozen=True, slots=True)
class QuantizationMethods:
    """Methods of the layers of one checkpoint; None for layers that are not quantised."""

    config: QuantizationConfig | None

    def linear_method(self, names: Sequence[str]) -> LinearMethod | None:
        """Of a layer made of the checkpoint weights `names`."""
        return self._method(names, _LINEAR)

    def moe_method(self, names: Sequence[str]) -> LinearMethod | None:
        """Of each expert of a layer; names: the weights of one of them."""
        return self._method(names, _LINEAR | _EXPERTS)

    def requant_error(self, weight: WeightFormat) -> float | None:
        """As of `QuantizationConfig`."""
        return self.config.requant_error(weight) if self.config else None

    def _method(self, names: Sequence[str], known: dict[str, MakeMethod]) -> LinearMethod | None:
        stored = self.config and self.config.stored_layer(names)
        if self.config is None or stored is None:
            return None
        methods = known | extensions(ENTRY_POINTS)
        if (make := methods.get(stored.format.kind)) is None:
            raise CheckpointError(
                f"{names[0]}: weights in {stored.format} are not served by this engine: it takes "
                f"{', '.join(methods)}, or a package with an entry point of {ENTRY_POINTS}"
            )
        return make(self.config, stored)
