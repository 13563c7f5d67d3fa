"""Linear layers of NVFP4 checkpoints: E2M1, an E4M3 scale per 16 columns, a scale per tensor."""

import torch
from torch import Tensor

from vllm.formats.nvfp4 import GROUP
from vllm.model_executor.layers.linear import StoredWeight
from vllm.model_executor.layers.quantization.method import QuantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.weights import Slot, copy_into


class Nvfp4LinearMethod(QuantizedLinearMethod):
    """Shards keep their own global scales when merged. Activation scales are there where
    activations may be quantised; they are kept as factors, the largest of the shards."""

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        weight, scale = layer.weight.data[rows], layer.scales.data[rows]
        place, names = layer.places[index], self.stored.names
        slots = {
            names.weight: place.slot((1, 2), (weight.dtype,), copy_into(weight)),
            names.scale: place.slot((1, GROUP), (scale.dtype,), write_scales(scale)),
            names.global_scale: self._factor(layer.global_scales.data[index]),
        }
        if self.stored.has_input_scale:
            slots[names.input_scale] = self._factor(layer.input_scale.data[index])
        return slots

    def _factor(self, place: Tensor) -> Slot:
        is_divisor = self.stored.names.is_divisor
        write = write_scales(place, is_divisor=is_divisor, may_be_zero=False)
        return Slot((), (torch.float32,), write)
