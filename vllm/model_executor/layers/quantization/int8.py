"""Linear layers of int8 checkpoints: a scale for each row, or for groups of its columns."""

from vllm.model_executor.layers.linear import StoredWeight
from vllm.model_executor.layers.quantization.method import QuantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.weights import FLOATS, Slot, copy_into


class Int8LinearMethod(QuantizedLinearMethod):
    """`weight` int8 [N, K], `weight_scale` [N, K / group], [N, 1] without groups, and, for static
    activations, `input_scale`, as compressed-tensors stores them."""

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        place, names = layer.places[index], self.stored.names
        weight, scale = layer.weight.data[rows], layer.scales.data[rows]
        group = self.format.columns_per_scale(place.num_columns)
        slots = {
            names.weight: place.slot((1, 1), (weight.dtype,), copy_into(weight)),
            names.scale: place.slot((1, group), FLOATS, write_scales(scale)),
        }
        if self.stored.has_input_scale:
            write_input = write_scales(layer.input_scale.data[index], may_be_zero=False)
            slots[names.input_scale] = Slot((), FLOATS, write_input)
        return slots
