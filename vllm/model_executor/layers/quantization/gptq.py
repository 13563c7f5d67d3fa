"""Linear layers of GPTQ checkpoints: int4 and int8 codes packed along columns."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vllm.kernels.interface import LinearTensors
from vllm.model_executor.layers.linear import StoredWeight
from vllm.model_executor.layers.quantization.method import QuantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.weights import FLOATS, Slot, empty_parameter
from vllm.ops.nvfp4 import pack_e2m1, unpack_e2m1
from vllm.ops.packed_weights import unpack_int32

_INT32 = (torch.int32,)


class GptqLinearMethod(QuantizedLinearMethod):
    """`qweight` [K / 8, N] and `qzeros` [groups, N / 8] in int32 (of 8 bits, four codes in each),
    `scales` [groups, N], `g_idx` int32 [K], the group of each column; and a `bias` of zeros where
    the layer has none, which some tools write.

    Codes and zero points of 8 bits become signed: less 128. A weight in activation order is sorted
    by groups; those that are merged must have one order.
    """

    @property
    def _bits(self) -> int:
        return 4 if self.format.is_packed else 8

    def create_weights(self, layer: StoredWeight) -> None:
        super().create_weights(layer)
        if self.stored.is_reordered:
            made = empty_parameter(len(layer.shard_rows), layer.input_size, dtype=torch.int32)
            layer.register_parameter("group_index", made)

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        place, names = layer.places[index], self.stored.names
        group, per_int32 = self.format.columns_per_scale(place.num_columns), 32 // self._bits
        weight = layer.weight.data[rows]
        write_transposed = write_scales(layer.scales.data[rows])

        def write_codes(packed: Tensor) -> None:
            # From the lowest bits on, along a row: our bytes.
            stored = packed.T.contiguous().view(torch.uint8)
            weight.copy_(stored if self._bits == 4 else _signed(stored))

        scales = place.slot((1, group), FLOATS, lambda t: write_transposed(t.T), is_transposed=True)
        slots = {
            names.weight: place.slot((1, per_int32), _INT32, write_codes, is_transposed=True),
            names.scale: scales,
            names.zero_point: self._zero_slot(layer, index, rows),
            "g_idx": self._order_slot(layer, index),
        }
        if layer.bias is None:
            slots["bias"] = Slot((place.num_rows,), FLOATS, _check_no_bias, is_redundant=True)
        return slots

    def _zero_slot(self, layer: StoredWeight, index: int, rows: slice) -> Slot:
        """[groups, N / codes in an int32]. Of symmetric weights it is only checked: zero points
        are in the middle of the codes, however they are stored."""
        place, bits = layer.places[index], self._bits
        per_int32, middle = 32 // bits, 1 << (bits - 1)
        first = place.offsets((per_int32, 1))[0]
        own = slice(first, first + place.shape[0])
        block = per_int32, self.format.columns_per_scale(place.num_columns)

        def unpacked(packed: Tensor) -> Tensor:
            """uint8 [N, groups]"""
            return (unpack_int32(packed) if bits == 4 else _bytes(packed)).T[own]

        def check(packed: Tensor) -> None:
            values = unpacked(packed)
            wrong = values[(values != middle) & (values != middle - 1)]
            if wrong.numel():
                raise ValueError(
                    f"zero points of symmetric weights (sym true) are {middle}, stored so or as "
                    f"{middle - 1}; it holds {int(wrong[0])}: set sym to false in "
                    f"quantization_config if zero points count"
                )

        if not self.stored.has_zero_points:
            slot = place.slot(block, _INT32, check, is_transposed=True)
            code = (middle - 1) * _ONES[bits]
            return replace(slot, example=lambda: torch.full(slot.shape, code, dtype=torch.int32))
        zeros = layer.zero_points.data[rows]
        # Stored less 1, in whole words: a zero point of 0 borrows from the next.
        added = _ONES[bits] if self.stored.names.packing == "gptq" else 0

        def write(packed: Tensor) -> None:
            values = unpacked(packed + added)
            zeros.copy_(values if bits == 4 else _signed(values))

        return place.slot(block, _INT32, write, is_transposed=True)

    def _order_slot(self, layer: StoredWeight, index: int) -> Slot:
        num_columns = layer.places[index].num_columns
        group = self.format.columns_per_scale(num_columns)

        def in_order() -> Tensor:
            return torch.arange(num_columns, dtype=torch.int32, device="cpu") // group

        if self.stored.is_reordered:
            own = layer.group_index.data[index]
            write = _writes_groups(own, num_columns // group, group)
            return Slot((num_columns,), _INT32, write, example=lambda: in_order().flip(0))

        def check(given: Tensor) -> None:
            # Some tools leave zeros there.
            wrong = given.cpu() != in_order()
            if bool(given.any()) and bool(wrong.any()):
                column = int(wrong.nonzero()[0])
                raise ValueError(
                    f"column {column} is in group {int(given[column])}, but desc_act of "
                    f"quantization_config is false (or static_groups true): columns are in order"
                )

        return Slot((num_columns,), _INT32, check, is_redundant=True)

    def tensors(self, layer: StoredWeight) -> LinearTensors:
        if not self.stored.is_reordered:
            return super().tensors(layer)
        of_shards = layer.group_index.data
        del layer.group_index
        tensors = super().tensors(layer)
        other = next((i for i, own in enumerate(of_shards) if not own.equal(of_shards[0])), None)
        if other is not None:
            raise ValueError(
                f"{layer.shard_names[0]} and {layer.shard_names[other]} are computed as one layer, "
                f"but their g_idx differ; take a checkpoint that was quantised with them "
                f"together, or with desc_act false"
            )
        order = of_shards[0].argsort(stable=True)
        if bool((of_shards[0].diff() >= 0).all()):
            return tensors
        codes = unpack_e2m1(tensors.weight) if self._bits == 4 else tensors.weight
        codes = codes.index_select(1, order)
        weight = pack_e2m1(codes) if self._bits == 4 else codes
        return replace(tensors, weight=weight, columns=order)


_ONES = {4: 0x11111111, 8: 0x01010101}
"""1 in every code of an int32."""


def _bytes(packed: Tensor) -> Tensor:
    """int32 [..., N / 4] -> uint8 [..., N], the first of four in the lowest bits."""
    return packed.contiguous().view(torch.uint8)


def _signed(codes: Tensor) -> Tensor:
    """uint8 -> int8, less 128."""
    return (codes ^ 0x80).view(torch.int8)


def _writes_groups(target: Tensor, num_groups: int, size: int) -> Callable[[Tensor], None]:
    def write(given: Tensor) -> None:
        outside = (given < 0) | (given >= num_groups)
        if bool(outside.any()):
            column = int(outside.nonzero()[0])
            raise ValueError(
                f"column {column} is in group {int(given[column])}; it takes 0 to {num_groups - 1}"
            )
        counts = given.bincount(minlength=num_groups)
        if bool((counts != size).any()):
            group = int((counts != size).nonzero()[0])
            raise ValueError(
                f"group {group} has {int(counts[group])} columns; every group has {size}"
            )
        target.copy_(given)

    return write


def _check_no_bias(given: Tensor) -> None:
    if bool(given.any()):
        raise ValueError(
            "a bias that is not 0, and the model has none here: its files and its config.json do "
            "not belong together"
        )
