"""Linear layers and experts of FP8 (E4M3) checkpoints."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.formats.weight_format import ActScheme, WeightFormat
from vllm.kernels.interface import LinearTensors, scale_shape
from vllm.model_executor.layers.linear import LinearMethod, StoredWeight
from vllm.model_executor.layers.quantization.experts import StackedMoEMethod
from vllm.model_executor.layers.quantization.fp8_config import Fp8Config
from vllm.model_executor.layers.quantization.kv_cache import Fp8KVCacheMethod
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.layers.sharding import Place
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter
from vllm.utils.fp8 import per_block_cast_to_fp8

__all__ = ["Fp8Config", "Fp8KVCacheMethod", "Fp8LinearMethod", "Fp8MoEMethod"]

FP8 = torch.float8_e4m3fn


class Fp8LinearMethod(LinearMethod):
    """An FP8 weight with `weight_scale_inv` (blocks) or `weight_scale` (tensor): w = q * scale."""

    def __init__(self, config: Fp8Config, weight: WeightFormat, act_schemes: tuple[ActScheme, ...]):
        super().__init__(weight, act_schemes)
        self.config = config

    def create_weights(self, layer: StoredWeight) -> None:
        rows, columns = sum(layer.shard_rows), layer.input_size
        layer.weight = empty_parameter(rows, columns, dtype=FP8)
        shape = scale_grid(self.format, layer.places)
        layer.weight_scale = empty_parameter(*shape, dtype=torch.float32)
        if self.config.activation_scheme == "static":
            layer.input_scale = empty_parameter(len(layer.shard_rows), dtype=torch.float32)

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        is_static = self.config.activation_scheme == "static"
        return _weight_slots(
            self.config,
            layer.places[index],
            layer.weight.data[rows],
            layer.weight_scale.data[scale_rows(self.format, layer.places, index)],
            layer.input_scale.data[index] if is_static else None,
        )

    def tensors(self, layer: StoredWeight) -> LinearTensors:
        is_static = self.config.activation_scheme == "static"
        row_offsets, column_offset = offsets_in_blocks(self.format, layer.places)
        return LinearTensors(
            self.format,
            layer.weight.data,
            layer.shard_rows,
            layer.weight_scale.data,
            input_scale=layer.input_scale.data.max() if is_static else None,
            row_offsets=row_offsets,
            column_offset=column_offset,
        )


class Fp8MoEMethod(StackedMoEMethod):
    """The same for every expert."""

    def __init__(self, config: Fp8Config, weight: WeightFormat, act_schemes: tuple[ActScheme, ...]):
        super().__init__(Fp8LinearMethod(config, weight, act_schemes))


def _weight_slots(
    config: Fp8Config, place: Place, weight: Tensor, scale: Tensor, input_scale: Tensor | None
) -> dict[str, Slot]:
    """Slots of the part of one checkpoint weight [N, K] that a rank holds, with its scales; the
    tensors are places to fill."""
    if not config.is_checkpoint_fp8_serialized:
        assert config.weight_block_size is not None
        return {"weight": _quantising_slot(place, weight, scale, config.weight_block_size)}
    slots = {"weight": place.slot((1, 1), (FP8,), copy_into(weight))}
    if config.weight_block_size:
        write = write_scales(scale)
        slots["weight_scale_inv"] = place.slot(config.weight_block_size, FLOATS, write)
    else:
        # One scalar, spread over the shard's rows where shards are merged (exact).
        slots["weight_scale"] = Slot((), FLOATS, write_scales(scale))
    if input_scale is not None:
        slots["input_scale"] = Slot((), FLOATS, write_scales(input_scale))
    return slots


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
    return scale_shape(weight_format, tuple(place.shape[0] for place in places), 1)


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
