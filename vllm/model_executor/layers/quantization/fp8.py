"""Linear layers and experts of FP8 (E4M3) checkpoints."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.formats.readers.base import QuantizationConfig, StoredLayer
from vllm.formats.readers.fp8 import Fp8Config
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.interface import LinearTensors
from vllm.model_executor.layers.linear import LinearMethod, StoredWeight
from vllm.model_executor.layers.quantization.experts import StackedMoEMethod
from vllm.model_executor.layers.quantization.kv_cache import Fp8KVCacheMethod
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.layers.sharding import Place
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter
from vllm.utils.fp8 import per_block_cast_to_fp8

__all__ = ["Fp8Config", "Fp8KVCacheMethod", "Fp8LinearMethod", "Fp8MoEMethod"]

FP8 = torch.float8_e4m3fn


class Fp8LinearMethod(LinearMethod):
    """An FP8 weight with float32 scales per tensor, row or block: w = q * scale.

    config: of the checkpoint. Its `use_deep_gemm` is what the selector decides by.
    """

    def __init__(self, config: QuantizationConfig, layer: StoredLayer):
        super().__init__(layer.format, layer.act)
        self.config = config
        self.layer = layer

    def create_weights(self, layer: StoredWeight) -> None:
        rows, columns = sum(layer.shard_rows), layer.input_size
        layer.weight = empty_parameter(rows, columns, dtype=FP8)
        shape = scale_grid(self.format, layer.places)
        layer.weight_scale = empty_parameter(*shape, dtype=torch.float32)
        if self.layer.has_input_scale:
            layer.input_scale = empty_parameter(len(layer.shard_rows), dtype=torch.float32)

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        place, weight, stored = layer.places[index], layer.weight.data[rows], self.layer.weight
        scale = layer.weight_scale.data[scale_rows(self.format, layer.places, index)]
        if not self.layer.is_quantized:
            return {"weight": _quantising_slot(place, weight, scale, stored.block)}
        names, write = self.layer.names, write_scales(scale)
        slots = {names.weight: place.slot((1, 1), (FP8,), copy_into(weight))}
        if stored.scale == "tensor":
            # One scalar, spread over the shard's rows where shards are merged (exact).
            slots[names.scale] = Slot((), FLOATS, write)
        else:
            per_scale = stored.rows_per_scale(1), stored.columns_per_scale(place.num_columns)
            slots[names.scale] = place.slot(per_scale, FLOATS, write)
        if self.layer.has_input_scale:
            write_input = write_scales(layer.input_scale.data[index])
            slots[names.input_scale] = Slot((), FLOATS, write_input)
        return slots

    def tensors(self, layer: StoredWeight) -> LinearTensors:
        row_offsets, column_offset = offsets_in_blocks(self.format, layer.places)
        return LinearTensors(
            self.format,
            layer.weight.data,
            layer.shard_rows,
            layer.weight_scale.data,
            input_scale=layer.input_scale.data.max() if self.layer.has_input_scale else None,
            row_offsets=row_offsets,
            column_offset=column_offset,
        )


class Fp8MoEMethod(StackedMoEMethod):
    """The same for every expert."""

    def __init__(self, config: QuantizationConfig, layer: StoredLayer):
        super().__init__(Fp8LinearMethod(config, layer))


def _quantising_slot(place: Place, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Slot:
    """Quantises whole blocks, so that a rank's part is that of the whole weight quantised."""
    first_row, first_column = place.offsets(block)
    num_rows, num_columns = place.shape

    def quantise(tensor: Tensor) -> None:
        codes, scales = per_block_cast_to_fp8(tensor.to(weight.device), block)
        own = codes[first_row : first_row + num_rows]
        weight.copy_(own[:, first_column : first_column + num_columns])
        scale.copy_(scales)

    return place.whole_blocks(block).slot((1, 1), FLOATS, quantise)


def scale_grid(weight_format: WeightFormat, places: Sequence[Place]) -> tuple[int, int]:
    """Shape of the scales of the shards at `places`: those of every block that they touch."""
    if weight_format.scale == "block":
        counts = [place.num_blocks(weight_format.block) for place in places]
        return sum(rows for rows, _ in counts), counts[0][1]
    return weight_format.scale_shape(tuple(place.shape[0] for place in places), 1)


def scale_rows(weight_format: WeightFormat, places: Sequence[Place], index: int) -> slice:
    """Which of these rows of scales belong to shard `index`."""
    start = scale_grid(weight_format, places[:index])[0] if index else 0
    return slice(start, start + scale_grid(weight_format, places[index : index + 1])[0])


def offsets_in_blocks(
    weight_format: WeightFormat, places: Sequence[Place]
) -> tuple[tuple[int, ...], int]:
    """As LinearTensors.row_offsets and column_offset."""
    if weight_format.scale != "block":
        return (), 0
    offsets = [place.offsets(weight_format.block) for place in places]
    rows = tuple(row for row, _ in offsets)
    return rows if any(rows) else (), offsets[0][1]
