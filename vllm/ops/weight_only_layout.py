"""Weights as the weight-only GEMM reads them (csrc/gemm/weight_only.cuh), packed once at load.

A tile is 16 rows x 64 columns, filled with zeros at the edges. Its lane (group, quad), group * 4 +
quad of 32, holds rows group and group + 8 and, for each half, eight columns that lie together: of
NVFP4 quad * 16 + half * 8 and on, so that a lane's columns are one group of 16; of others half * 32
+ quad * 8 and on, so that halves are groups of 32. A 16-byte load holds 32 codes of 4 bits, or the
16 codes of 8 bits of one half, in the order in which products of 16 columns take them.

Eight NVFP4 codes share 32 bits, four in each half. Three of four have their signs and magnitudes
where bf16 has them, moved by 0, 4 and -6 bits: one rotation and one mask make both of a pair
numbers. The fourth is in the bits that are left.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm.formats.weight_format import WeightFormat
from vllm.kernels.interface import LinearTensors
from vllm.ops.nvfp4 import GROUP, e2m1_decode, e2m1_encode, pack_e2m1, unpack_e2m1
from vllm.utils.math_utils import cdiv, round_up

TILE_ROWS, TILE_COLUMNS = 16, 64
LEAST_GROUP = 32
"""Columns that share a float32 scale, at least; a power of two."""
SYMMETRIC_ZERO = 8
_E4M3_NAN = 0x7F
_E5M3_BIAS = 22
_SPLIT_GROUP = 128  # columns, at most, that share a scale in int8 as int4
_MXFP4_LEAST, _MXFP4_MOST = -16, 8  # exponents of scales in the layout of NVFP4
# Axes of codes [N, K] within tiles: row halves (8 rows apart) and groups; eight columns as two
# products, two pairs in each, two elements in each.
_AXES = {"r": 2, "g": 8, "h": 2, "q": 4, "i": 2, "p": 2, "e": 2}
_COLUMNS = {"nvfp4": "qhipe", "int4": "hqipe", "w4a8": "hqipe", "fp8": "hqipe"}
# Order in memory. Of 4 bits: bytes of two rows, the first in the low nibble; then pairs, so that
# the codes of a pair are 16 bits apart, or for products of bytes as columns are. Of 8 bits: rows 8
# to 15 in the lower bytes.
_PACKED = {"nvfp4": "gqhiepr", "int4": "gqhiepr", "w4a8": "gqhiper", "fp8": "hgqiper"}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """[num_rows, num_columns], or with experts before every other dimension.

    format: fp8 (also of MXFP8), nvfp4 (also of MXFP4), int4, or w4a8 for int4 that E4M3 activations
    are multiplied by. codes: uint8 [tiles of rows, tiles of columns, loads, 32, 16]. scales: of
    nvfp4, uint8 [tiles of rows, tiles of columns, 32, 2] in the form of `e5m3_encode`; of others,
    float32 [tiles of rows, groups of columns_per_scale columns, 16], with 1 for 16 where the rows
    of every tile have the same, and None for 1 everywhere; of int4 and w4a8, the last four bits are
    the zero point, and no part of the scale. row_factors: float32 [num_rows] or None for 1.
    w = element * scale * row factor. is_split: of int8, whose columns are there twice
    (`int8_as_int4`): x is multiplied twice side by side.
    """

    format: str
    num_rows: int
    num_columns: int
    codes: Tensor
    scales: Tensor | None
    row_factors: Tensor | None
    columns_per_scale: int = 0
    is_split: bool = False

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.codes, self.scales, self.row_factors

    @property
    def form(self) -> tuple[str, int]:
        """Of the parts, as the kernels take it."""
        return self.format, self.columns_per_scale


def pack_weight(tensors: LinearTensors, by_fp8: bool = False) -> PackedWeight:
    """by_fp8: int4, to be multiplied by activations in E4M3. ValueError for values and groups that
    the kernel cannot take."""
    return _narrowed(_pack(tensors, by_fp8))


def pack_experts(
    experts: Iterable[LinearTensors], num_experts: int, by_fp8: bool = False
) -> PackedWeight:
    """The same for weights of equal sizes, stacked. Only one is held unpacked at a time."""
    stacked: list[Any] = []
    for index, expert in enumerate(experts):
        try:
            packed = _pack(expert, by_fp8)
        except ValueError as error:
            raise ValueError(f"expert {index}: {error}") from error
        stacked = stacked or [
            None if part is None else part.new_empty(num_experts, *part.shape)
            for part in packed.parts
        ]
        for whole, part in zip(stacked, packed.parts):
            if whole is not None:
                whole[index] = part
    codes, scales, row_factors = stacked
    return _narrowed(replace(packed, codes=codes, scales=scales, row_factors=row_factors))


def _pack(tensors: LinearTensors, by_fp8: bool) -> PackedWeight:
    name = {"mxfp8": "fp8"}.get(tensors.format.element, tensors.format.element)
    assert name == "int4" or not by_fp8
    num_rows, num_columns = tensors.weight.shape[0], tensors.weight.shape[1]
    if name == "fp8":
        codes = tensors.weight.view(torch.uint8)
        if bool(((codes & _E4M3_NAN) == _E4M3_NAN).any()):
            raise ValueError("the weight holds NaN; the checkpoint is corrupt, fetch it again")
        scales = tensors.row_scales()
        assert scales is not None
        packed = PackedWeight(name, num_rows, num_columns, pack_codes(codes, name), None, None)
        if scales.shape[1] == 1:
            return replace(packed, row_factors=scales[:, 0].float().contiguous())
        return _with_group_scales(packed, scales.float(), tensors.block_k)
    if name == "int8":
        return replace(_pack(int8_as_int4(tensors), by_fp8=False), is_split=True)
    num_columns *= 2
    codes = unpack_e2m1(tensors.weight)
    assert tensors.scales is not None
    if name == "int4":
        name = "w4a8" if by_fp8 else name
        packed = PackedWeight(name, num_rows, num_columns, pack_codes(codes, name), None, None)
        marked = _with_zero_points(tensors.scales.float(), tensors.zero_points)
        return _with_group_scales(packed, marked, tensors.block_k)
    if name == "mxfp4":
        return _pack_mxfp4(codes, tensors.scales)
    assert tensors.global_scales is not None
    is_zero = (tensors.scales.float() == 0).repeat_interleave(GROUP, 1)
    codes = codes.masked_fill(is_zero, 0)
    shards = torch.tensor(tensors.shard_rows, device=codes.device)
    factors = tensors.global_scales.float().repeat_interleave(shards)
    scales = _tiles_of_nvfp4_scales(e5m3_encode(tensors.scales))
    return PackedWeight(
        name, num_rows, num_columns, pack_codes(codes, name), scales, factors.contiguous()
    )


def int8_as_int4(tensors: LinearTensors) -> LinearTensors:
    """int8 [N, K], K % 32 == 0, as int4 [N, 2 K] of the same bytes, of which the columns that come
    first hold the upper four bits of each code, with 16 times its scale, and the others the lower
    four. Zero points are split alike: code - zero = 16 (upper - upper) + (lower - lower), exact."""
    num_columns = tensors.weight.shape[1]
    columns = min(tensors.block_k, num_columns & -num_columns, _SPLIT_GROUP)
    scales = tensors.row_scales()
    if columns < LEAST_GROUP or scales is None or tensors.block_k % columns:
        raise ValueError(
            f"{num_columns} columns of int8 with scales of {tensors.block_k}; the kernel takes "
            f"multiples of {LEAST_GROUP}"
        )
    repeats, num_groups = tensors.block_k // columns, num_columns // columns

    def split(values: Tensor) -> Tensor:  # the last group may be partial
        return values.repeat_interleave(repeats, 1)[:, :num_groups]

    scales = split(scales.float())
    zeros = torch.zeros_like(scales, dtype=torch.int8)
    if tensors.zero_points is not None:
        zeros = split(tensors.zero_points)
    return LinearTensors(
        WeightFormat("int4", "group", (1, columns)),
        pack_e2m1(_halves(tensors.weight)),
        tensors.shard_rows,
        torch.cat((16 * scales, scales), 1),
        zero_points=_halves(zeros),
    )


def _halves(codes: Tensor) -> Tensor:
    """int8 [N, K] -> uint8 [N, 2 K]: c = 16 (first - 8) + second."""
    return torch.cat(((codes >> 4) + 8, codes & 15), 1).view(torch.uint8)


def _pack_mxfp4(codes: Tensor, exponents: Tensor) -> PackedWeight:
    """In the layout of NVFP4: every group as two, with scales of whole powers of two, and a row
    factor that brings the largest of a row to 2^8. codes: uint8 [N, K], one each. exponents: uint8
    [N, K / 32].

    Scales go down to 2^-16, with which products in fp16 are exact. Groups whose scale is smaller,
    2^24 times below that of another group of the row, are rounded to it: float32 sums have no more
    digits.
    """
    num_rows, num_columns = codes.shape
    groups = cdiv(num_columns, GROUP)
    values = pad(codes, (0, groups * GROUP - num_columns)).unflatten(1, (groups, GROUP))
    scales = exponents.int().repeat_interleave(2, 1)[:, :groups] - 127
    scales = torch.where(((values & 7) == 0).all(-1), -127, scales)
    # The least normal float32 is 2^-126.
    factors = (scales.amax(1, keepdim=True) - _MXFP4_MOST).clamp(min=-126)
    missing = (_MXFP4_LEAST - (scales - factors)).clamp(min=0)
    if bool(missing.any()):
        smaller = torch.ldexp(e2m1_decode(values), -missing.unsqueeze(-1))
        values = torch.where(missing.unsqueeze(-1) > 0, e2m1_encode(smaller), values)
    coded = (scales - factors + missing + _E5M3_BIAS) << 3
    packed = pack_codes(values.flatten(1)[:, :num_columns], "nvfp4")
    row_factors = torch.ldexp(torch.ones_like(factors[:, 0], dtype=torch.float32), factors[:, 0])
    return PackedWeight(
        "nvfp4",
        num_rows,
        num_columns,
        packed,
        _tiles_of_nvfp4_scales(coded.to(torch.uint8)),
        row_factors.contiguous(),
    )


# ---------------------------------------------------------------- codes


def pack_codes(codes: Tensor, format: str) -> Tensor:
    """uint8 [N, K], one code each, -> uint8 [tiles of rows, tiles of columns, loads, 32, 16]."""
    num_rows, num_columns = codes.shape
    rows, columns = round_up(num_rows, TILE_ROWS), round_up(num_columns, TILE_COLUMNS)
    padded = pad(codes, (0, columns - num_columns, 0, rows - num_rows))
    axes = [_AXES[axis] for axis in _COLUMNS[format]]
    sizes = (rows // TILE_ROWS, 2, 8, columns // TILE_COLUMNS, *axes)
    tiles = padded.view(*sizes).permute(*_places(_PACKED[format], _COLUMNS[format]))
    if format == "fp8":
        return tiles.flip(-1).reshape(sizes[0], sizes[3], 2, 32, 16)
    packed = pack_e2m1(tiles.flatten(2)).view(sizes[0], sizes[3], 1, 32, 16)
    if format != "nvfp4":
        return packed
    return _swapped(_exchanged(packed, _spread_codes(codes.device)))


def unpack_codes(packed: Tensor, format: str) -> Tensor:
    """The inverse, with the rows and columns of whole tiles."""
    num_tiles, column_tiles = packed.shape[:2]
    if format == "nvfp4":
        packed = _exchanged(_swapped(packed), _spread_codes(packed.device).argsort())
    codes = packed.flatten(2) if format == "fp8" else unpack_e2m1(packed.flatten(2))
    tiles = codes.view(num_tiles, column_tiles, *map(_AXES.__getitem__, _PACKED[format]))
    if format == "fp8":
        tiles = tiles.flip(-1)
    places = _places(_PACKED[format], _COLUMNS[format])
    back = sorted(range(len(places)), key=places.__getitem__)
    return tiles.permute(*back).reshape(num_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)


# Of the codes in 16 bits, from the lowest on: where the four bits of each go, sign last.
_SPREAD_BITS = ((6, 7, 8, 15), (10, 11, 12, 3), (0, 1, 2, 9), (4, 5, 14, 13))
_SWAPPED = 1 << 3  # this sign is 4 bits past the top of its half: in the other half of 32 bits


@cache
def _spread_codes(device: torch.device) -> Tensor:
    """For four codes in 16 bits, one after another: the same with their bits where _SPREAD_BITS
    says. int32 [65536], each number once."""
    numbers = torch.arange(1 << 16, dtype=torch.int32, device=device)
    spread = torch.zeros_like(numbers)
    for code, places in enumerate(_SPREAD_BITS):
        for bit, place in enumerate(places):
            spread |= (numbers >> (4 * code + bit) & 1) << place
    return spread


def _exchanged(packed: Tensor, table: Tensor) -> Tensor:
    """uint8 [..., 16] with `table` [65536] applied to every 16 bits."""
    numbers = packed.contiguous().view(torch.int16).int() & 0xFFFF
    found = table.to(torch.int16).index_select(0, numbers.flatten())
    return found.view(torch.uint8).view(packed.shape)


def _swapped(packed: Tensor) -> Tensor:
    """uint8 [..., 16] whose halves of 32 bits exchange their bits _SWAPPED."""
    words = packed.view(torch.int32)
    changes = (words ^ words >> 16) & _SWAPPED
    return (words ^ changes ^ changes << 16).view(torch.uint8)


def _places(packed: str, columns: str) -> tuple[int, ...]:
    """Of each axis in memory: its place in [tiles, r, g, tiles of columns, columns]."""
    return 0, 3, *((" rg " + columns).index(axis) for axis in packed)


# ---------------------------------------------------------------- scales


def e5m3_encode(scales: Tensor) -> Tensor:
    """E4M3 scales, none negative, -> uint8 (e << 3 | m) for (1 + m / 8) * 2^(e - 22); 0 for 0."""
    bits = scales.float().contiguous().view(torch.int32)
    codes = (bits >> 20) - ((127 - _E5M3_BIAS) << 3)
    return codes.masked_fill(bits == 0, 0).to(torch.uint8)


def e5m3_decode(codes: Tensor) -> Tensor:
    """float32; 2^-22 for 0, whose codes are 0."""
    return (((codes.int() + ((127 - _E5M3_BIAS) << 3)) << 20).view(torch.float32)).clone()


def _tiles_of_nvfp4_scales(codes: Tensor) -> Tensor:
    """uint8 [N, K / 16] -> [tiles of rows, tiles of columns, 32, 2]."""
    num_rows, groups = codes.shape
    rows, columns = round_up(num_rows, TILE_ROWS), round_up(groups, 4)
    tiles = pad(codes, (0, columns - groups, 0, rows - num_rows)).view(-1, 2, 8, columns // 4, 4)
    # Of a single tile of columns, reshape alone would give a view with other strides.
    return tiles.permute(0, 3, 2, 4, 1).contiguous().view(rows // TILE_ROWS, columns // 4, 32, 2)


def _with_zero_points(scales: Tensor, zero_points: Tensor | None) -> Tensor:
    """float32 [N, groups] with their last four bits replaced."""
    marked = scales.contiguous().view(torch.int32) & ~15
    zeros = SYMMETRIC_ZERO if zero_points is None else zero_points.int()
    return (marked | zeros).view(torch.float32)


def _with_group_scales(packed: PackedWeight, scales: Tensor, columns: int) -> PackedWeight:
    """scales: float32 [N, groups of `columns`]."""
    num_rows, groups = scales.shape
    if groups > 1 and (columns < LEAST_GROUP or columns & (columns - 1)):
        raise ValueError(
            f"scales of {columns} columns; the kernel takes a power of two from {LEAST_GROUP} on"
        )
    wanted = 1 if groups == 1 else cdiv(packed.codes.shape[1] * TILE_COLUMNS, columns)
    rows = packed.codes.shape[0] * TILE_ROWS
    # Rows past the end repeat the last: they must not make their tile's rows differ.
    filled = torch.cat([scales, scales[-1:].expand(rows - num_rows, -1)])
    tiles = pad(filled, (0, wanted - groups)).view(-1, TILE_ROWS, wanted).transpose(1, 2)
    return replace(packed, scales=tiles.contiguous(), columns_per_scale=columns)


def _narrowed(packed: PackedWeight) -> PackedWeight:
    """With one scale for the rows of a tile, where all tiles allow that."""
    scales = packed.scales
    if scales is None or packed.format == "nvfp4" or bool((scales != scales[..., :1]).any()):
        return packed
    return replace(packed, scales=scales[..., :1].contiguous())


# ---------------------------------------------------------------- the reference


def widen_weight(packed: PackedWeight) -> Tensor:
    """float32 [num_rows, num_columns] of a weight without experts: what the kernel multiplies."""
    codes = unpack_codes(packed.codes, packed.format)
    if packed.format == "nvfp4":
        assert packed.scales is not None
        tiles, column_tiles = packed.codes.shape[:2]
        scales = packed.scales.view(tiles, column_tiles, 8, 4, 2).permute(0, 4, 2, 1, 3)
        wide = e5m3_decode(scales).reshape(tiles * TILE_ROWS, -1).repeat_interleave(GROUP, 1)
        values = e2m1_decode(codes) * wide
    else:
        scales = _rows_of_group_scales(packed)
        values = codes.view(torch.float8_e4m3fn).float() if packed.format == "fp8" else codes
        if packed.format in ("int4", "w4a8"):
            bits = scales.view(torch.int32)
            values, scales = codes - (bits & 15), (bits & ~15).view(torch.float32)
        values = values * scales
    values = values[: packed.num_rows, : packed.num_columns]
    return values if packed.row_factors is None else values * packed.row_factors[:, None]


def _rows_of_group_scales(packed: PackedWeight) -> Tensor:
    """float32 for every element of whole tiles."""
    tiles, column_tiles = packed.codes.shape[:2]
    shape = (tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)
    if packed.scales is None:
        return packed.codes.new_ones(shape, dtype=torch.float32)
    rows = packed.scales.expand(-1, -1, TILE_ROWS).transpose(1, 2).flatten(0, 1)
    columns = shape[1] if rows.shape[1] == 1 else packed.columns_per_scale
    return rows.repeat_interleave(columns, 1)[:, : shape[1]].contiguous()
