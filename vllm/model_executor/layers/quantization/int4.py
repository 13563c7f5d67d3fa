"""Linear layers of int4 checkpoints: groups of columns with a scale, and a zero point or 8."""

import torch
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.formats.readers.base import QuantizationConfig, StoredLayer
from vllm.kernels.interface import LinearTensors
from vllm.model_executor.layers.linear import LinearMethod, StoredWeight
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.weights import FLOATS, Slot, empty_parameter
from vllm.ops.nvfp4 import pack_e2m1
from vllm.ops.packed_weights import (
    PER_INT32,
    unpack_awq,
    unpack_rows_int32,
)

_INT32 = (torch.int32,)


class Int4LinearMethod(LinearMethod):
    """`weight_packed` [N, K / 8], `weight_scale` [N, K / group] and, where it is not symmetric,
    `weight_zero_point` [ceil(N / 8), K / group] as compressed-tensors packs them."""

    def __init__(self, config: QuantizationConfig, layer: StoredLayer):
        super().__init__(layer.format, layer.act)
        self.group = layer.format.block[1]
        self.names = layer.names
        self.has_zero_points = layer.has_zero_points

    def create_weights(self, layer: StoredWeight) -> None:
        rows, columns = sum(layer.shard_rows), layer.input_size
        if columns % self.group:
            raise CheckpointError(
                f"{layer.prefix}: {columns} columns{layer.per_rank} are not whole groups of "
                f"{self.group}, the group_size of config.json; list the layer as not quantised"
            )
        num_groups = columns // self.group
        layer.weight = empty_parameter(rows, columns // 2, dtype=torch.uint8)
        layer.weight_scale = empty_parameter(rows, num_groups, dtype=torch.float32)
        if self.has_zero_points:
            layer.zero_points = empty_parameter(rows, num_groups, dtype=torch.uint8)

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        place, num_rows = layer.places[index], layer.shard_rows[index]
        weight, scale = layer.weight.data[rows], layer.weight_scale.data[rows]

        def write_codes(packed: Tensor) -> None:
            # Eight codes from the lowest bits on are four bytes of two, in our order.
            weight.copy_(packed.contiguous().view(torch.uint8))

        slots = {
            self.names.weight: place.slot((1, PER_INT32), _INT32, write_codes),
            self.names.scale: place.slot((1, self.group), FLOATS, write_scales(scale)),
        }
        if self.has_zero_points:
            zeros = layer.zero_points.data[rows]
            first = place.offsets((PER_INT32, 1))[0]

            def write_zeros(packed: Tensor) -> None:
                zeros.copy_(unpack_rows_int32(packed, first + num_rows)[first:])

            block = (PER_INT32, self.group)
            slots[self.names.zero_point] = place.slot(block, _INT32, write_zeros)
        return slots

    def tensors(self, layer: StoredWeight) -> LinearTensors:
        return LinearTensors(
            self.format,
            layer.weight.data,
            layer.shard_rows,
            layer.weight_scale.data,
            zero_points=layer.zero_points.data if self.has_zero_points else None,
        )


class AwqLinearMethod(Int4LinearMethod):
    """`qweight` [K, N / 8], `qzeros` [K / group, N / 8], `scales` [K / group, N]: the transposed
    weight, as AWQ's GEMM kernels want it."""

    def create_weights(self, layer: StoredWeight) -> None:
        for name, num_rows in zip(layer.shard_names, layer.shard_rows):
            if num_rows % PER_INT32:
                raise CheckpointError(
                    f"{name}: {num_rows} rows{layer.per_rank} cannot be packed by {PER_INT32} as "
                    f"AWQ's GEMM layout does; list the layer as not quantised"
                )
        super().create_weights(layer)

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        place = layer.places[index]
        weight, zeros = layer.weight.data[rows], layer.zero_points.data[rows]
        write_transposed = write_scales(layer.weight_scale.data[rows])

        def write_codes(packed: Tensor) -> None:
            weight.copy_(pack_e2m1(unpack_awq(packed)))

        def write_zeros(packed: Tensor) -> None:
            zeros.copy_(unpack_awq(packed))

        packed, scaled = (PER_INT32, self.group), (1, self.group)
        return {
            self.names.weight: place.slot((PER_INT32, 1), _INT32, write_codes, is_transposed=True),
            self.names.zero_point: place.slot(packed, _INT32, write_zeros, is_transposed=True),
            self.names.scale: place.slot(
                scaled, FLOATS, lambda t: write_transposed(t.T), is_transposed=True
            ),
        }


def int4_linear_method(config: QuantizationConfig, layer: StoredLayer) -> Int4LinearMethod:
    """By the layout in which codes are packed."""
    methods = {"int32": Int4LinearMethod, "awq": AwqLinearMethod}
    return methods[layer.names.packing](config, layer)
