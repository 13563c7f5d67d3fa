"""Linear layers of NVFP4 checkpoints: E2M1, an E4M3 scale per 16 columns, a scale per tensor."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.formats.weight_format import ActScheme, WeightFormat
from vllm.kernels.interface import NVFP4_GROUP, LinearTensors
from vllm.model_executor.layers.linear import LinearMethod, StoredWeight
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.weights import Slot, copy_into, empty_parameter

_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Nvfp4Names:
    """What a tool calls the tensors of a layer. is_divisor: its float32 scales divide."""

    weight: str
    global_scale: str
    input_scale: str
    is_divisor: bool


MODELOPT = Nvfp4Names("weight", "weight_scale_2", "input_scale", is_divisor=False)
COMPRESSED_TENSORS = Nvfp4Names(
    "weight_packed", "weight_global_scale", "input_global_scale", is_divisor=True
)


class Nvfp4LinearMethod(LinearMethod):
    """Shards keep their own global scales when merged. Activation scales are there where
    activations may be quantised; they are kept as factors, the largest of the shards."""

    def __init__(self, names: Nvfp4Names, act_schemes: tuple[ActScheme, ...]):
        super().__init__(WeightFormat("nvfp4"), act_schemes)
        self.names = names
        self.has_input_scale = act_schemes != (ActScheme.NONE,)

    def create_weights(self, layer: StoredWeight) -> None:
        rows, columns = sum(layer.shard_rows), layer.input_size
        if columns % NVFP4_GROUP:
            raise CheckpointError(
                f"{layer.prefix}: {columns} columns{layer.per_rank} are not whole groups of "
                f"{NVFP4_GROUP}, which NVFP4 weights are made of; list the layer as not quantised"
            )
        num_shards = len(layer.shard_rows)
        layer.weight = empty_parameter(rows, columns // 2, dtype=torch.uint8)
        layer.weight_scale = empty_parameter(rows, columns // NVFP4_GROUP, dtype=_E4M3)
        layer.global_scale = empty_parameter(num_shards, dtype=torch.float32)
        if self.has_input_scale:
            layer.input_scale = empty_parameter(num_shards, dtype=torch.float32)

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        weight, scale = layer.weight.data[rows], layer.weight_scale.data[rows]
        place = layer.places[index]
        slots = {
            self.names.weight: place.slot((1, 2), (torch.uint8,), copy_into(weight)),
            "weight_scale": place.slot((1, NVFP4_GROUP), (_E4M3,), write_scales(scale)),
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
