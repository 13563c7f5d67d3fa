"""Linear layers of int4 checkpoints: groups of columns with a scale, and a zero point or 8."""

import torch
from torch import Tensor

from vllm.model_executor.layers.linear import StoredWeight
from vllm.model_executor.layers.quantization.method import QuantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.weights import FLOATS, Slot
from vllm.ops.nvfp4 import pack_e2m1
from vllm.ops.packed_weights import PER_INT32, unpack_awq, unpack_rows_int32

_INT32 = (torch.int32,)


class Int4LinearMethod(QuantizedLinearMethod):
    """`weight_packed` [N, K / 8], `weight_scale` [N, K / group] and, where it is not symmetric,
    `weight_zero_point` [ceil(N / 8), K / group] as compressed-tensors packs them."""

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        place, num_rows = layer.places[index], layer.shard_rows[index]
        names, group = self.stored.names, self.format.block[1]
        weight, scale = layer.weight.data[rows], layer.scales.data[rows]

        def write_codes(packed: Tensor) -> None:
            # Eight codes from the lowest bits on are four bytes of two, in our order.
            weight.copy_(packed.contiguous().view(torch.uint8))

        slots = {
            names.weight: place.slot((1, PER_INT32), _INT32, write_codes),
            names.scale: place.slot((1, group), FLOATS, write_scales(scale)),
        }
        if self.stored.has_zero_points:
            zeros = layer.zero_points.data[rows]
            first = place.offsets((PER_INT32, 1))[0]

            def write_zeros(packed: Tensor) -> None:
                zeros.copy_(unpack_rows_int32(packed, first + num_rows)[first:])

            block = (PER_INT32, group)
            slots[names.zero_point] = place.slot(block, _INT32, write_zeros)
        return slots


class AwqLinearMethod(Int4LinearMethod):
    """`qweight` [K, N / 8], `qzeros` [K / group, N / 8], `scales` [K / group, N]: the transposed
    weight, as AWQ's GEMM kernels want it."""

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        place, names, group = layer.places[index], self.stored.names, self.format.block[1]
        weight, zeros = layer.weight.data[rows], layer.zero_points.data[rows]
        write_transposed = write_scales(layer.scales.data[rows])

        def write_codes(packed: Tensor) -> None:
            weight.copy_(pack_e2m1(unpack_awq(packed)))

        def write_zeros(packed: Tensor) -> None:
            zeros.copy_(unpack_awq(packed))

        packed, scaled = (PER_INT32, group), (1, group)
        return {
            names.weight: place.slot((PER_INT32, 1), _INT32, write_codes, is_transposed=True),
            names.zero_point: place.slot(packed, _INT32, write_zeros, is_transposed=True),
            names.scale: place.slot(
                scaled, FLOATS, lambda t: write_transposed(t.T), is_transposed=True
            ),
        }
