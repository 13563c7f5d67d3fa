"""FP8 linear layers of compressed-tensors: one scale per tensor, per row, or per block."""

from vllm.formats.weight_format import WeightFormat
from vllm.model_executor.layers.linear import StoredWeight
from vllm.model_executor.layers.quantization import LayerFormat
from vllm.model_executor.layers.quantization.fp8 import (
    Fp8Config,
    Fp8LinearMethod,
    scale_rows,
)
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.weights import FLOATS, Slot


def fp8_linear_method(
    stored: WeightFormat, is_static: bool, layer_format: LayerFormat
) -> Fp8LinearMethod:
    """stored: the format of each weight; layer_format: of the layer they are merged into."""
    config = Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="static" if is_static else "dynamic",
        weight_block_size=stored.block if stored.scale == "block" else None,
    )
    method = Fp8LinearMethod if stored.scale == "tensor" else _ScaledFp8LinearMethod
    return method(config, *layer_format)


class _ScaledFp8LinearMethod(Fp8LinearMethod):
    """`weight_scale` is [N, 1] or of blocks; both are as LinearTensors has them."""

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        slots = super().shard_slots(layer, index, rows)
        slots.pop("weight_scale_inv", None)
        place = layer.places[index]
        per_scale = self.format.block if self.format.scale == "block" else (1, place.num_columns)
        scale = layer.weight_scale.data[scale_rows(self.format, layer.places, index)]
        slots["weight_scale"] = place.slot(per_scale, FLOATS, write_scales(scale))
        return slots
