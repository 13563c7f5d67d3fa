"""Linear layers of NVFP4 checkpoints: E2M1, an E4M3 scale per 16 columns, a scale per tensor."""

import torch
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.formats.nvfp4 import GROUP
from vllm.formats.readers.base import QuantizationConfig, StoredLayer
from vllm.kernels.interface import LinearTensors
from vllm.model_executor.layers.linear import LinearMethod, StoredWeight
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.weights import Slot, copy_into, empty_parameter

_E4M3 = torch.float8_e4m3fn


class Nvfp4LinearMethod(LinearMethod):
    """Shards keep their own global scales when merged. Activation scales are there where
    activations may be quantised; they are kept as factors, the largest of the shards."""

    def __init__(self, config: QuantizationConfig, layer: StoredLayer):
        super().__init__(layer.format, layer.act)
        self.names = layer.names
        self.has_input_scale = layer.has_input_scale

    def create_weights(self, layer: StoredWeight) -> None:
        rows, columns = sum(layer.shard_rows), layer.input_size
        if columns % GROUP:
            raise CheckpointError(
                f"{layer.prefix}: {columns} columns{layer.per_rank} are not whole groups of "
                f"{GROUP}, which NVFP4 weights are made of; list the layer as not quantised"
            )
        num_shards = len(layer.shard_rows)
        layer.weight = empty_parameter(rows, columns // 2, dtype=torch.uint8)
        layer.weight_scale = empty_parameter(rows, columns // GROUP, dtype=_E4M3)
        layer.global_scale = empty_parameter(num_shards, dtype=torch.float32)
        if self.has_input_scale:
            layer.input_scale = empty_parameter(num_shards, dtype=torch.float32)

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        weight, scale = layer.weight.data[rows], layer.weight_scale.data[rows]
        place = layer.places[index]
        slots = {
            self.names.weight: place.slot((1, 2), (torch.uint8,), copy_into(weight)),
            self.names.scale: place.slot((1, GROUP), (_E4M3,), write_scales(scale)),
            self.names.global_scale: self._factor(layer.global_scale.data[index]),
        }
        if self.has_input_scale:
            slots[self.names.input_scale] = self._factor(layer.input_scale.data[index])
        return slots

    def _factor(self, place: Tensor) -> Slot:
        write = write_scales(place, is_divisor=self.names.is_divisor, may_be_zero=False)
        return Slot((), (torch.float32,), write)

    def tensors(self, layer: StoredWeight) -> LinearTensors:
        return LinearTensors(
            self.format,
            layer.weight.data,
            layer.shard_rows,
            layer.weight_scale.data,
            input_scale=layer.input_scale.data.max() if self.has_input_scale else None,
            global_scales=layer.global_scale.data,
        )
