"""Which memory the block-scaled FP8 GEMM of SM120 touches, on the CPU, at sizes that fill no tile.

csrc/gemm/blackwell_gemm.cuh tells CUTLASS that N and K are whole blocks and then launches with the
real ones. `multiply` takes the steps of the launched kernel, tile by tile, on the buffers that our
Python code allocates: an access outside of one is an IndexError, and each is counted. What is not
loaded is NaN, as shared memory may be. Constants are read from the source;
tests/cmake/test_sm120_layouts.py asks CuTe for the same layouts, and CUTLASS which sizes it takes.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.kernels.backends import cutlass
from vllm.ops.fp8 import block_scaled_mm
from vllm.ops.fp8_quant import ScaleLayout, per_token_group_fp8_quant
from vllm.utils.fp8 import per_block_cast_to_fp8
from vllm.utils.math_utils import cdiv, round_up

GEMM = Path(__file__).parents[2] / "csrc" / "gemm"
# M, N, K; the backend takes N and K in steps of 16.
SIZES = [(1, 16, 16), (3, 48, 144), (5, 144, 128), (127, 112, 272), (129, 272, 400), (130, 128, 16)]


def constants() -> SimpleNamespace:
    """Tile sizes and scale blocks of the kernel, and to what multiples its host side rounds."""
    header, source = (GEMM / name for name in ("blackwell_gemm.cuh", "sm120_fp8_block.cu"))
    text = header.read_text()
    (rows_per_scale, n_block, k_block, a_major, b_major) = re.search(
        r"Sm1xxBlockwiseScaleConfig<(\d+), (\d+), (\d+), cute::UMMA::Major::(\w+),\s*"
        r"cute::UMMA::Major::(\w+)>",
        text,
    ).groups()
    assert (rows_per_scale, a_major, b_major) == ("1", "MN", "K")
    tile = re.search(r"cute::Shape<cute::Int<(\d+)>, cute::Int<(\d+)>, cute::Int<(\d+)>>",
                     source.read_text())  # fmt: skip
    whole = re.search(r"\*size = \(\*size \+ (\d+)\) / (\d+) \* (\d+);", text)
    filled = re.search(r"make_shape\(\(m \+ (\d+)\) / (\d+) \* (\d+), n, k, 1\)", text)
    for added, divisor, factor in (whole.groups(), filled.groups()):
        assert int(added) + 1 == int(divisor) == int(factor)
    return SimpleNamespace(
        tile=tuple(map(int, tile.groups())), n_block=int(n_block), k_block=int(k_block),
        whole=int(whole[2]), filled_rows=int(filled[2]),
    )  # fmt: skip


C = constants()


class Buffer:
    """The whole allocation of a tensor, flat. counts: accesses of each element."""

    def __init__(self, tensor: torch.Tensor):
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.start, self.strides = tensor.storage_offset(), tensor.stride()
        self.values = tensor.as_strided((size,), (1,), 0).float().numpy().astype(np.float64)
        self.counts = np.zeros(size, int)

    def at(self, *index: np.ndarray) -> np.ndarray:
        """Flat places of a tensor's elements."""
        place = self.start + sum(i * stride for i, stride in zip(index, self.strides))
        if place.size and (place.min() < 0 or place.max() >= self.counts.size):
            raise IndexError(f"element {place.max()} of an allocation of {self.counts.size}")
        return place

    def read(self, *index: np.ndarray) -> np.ndarray:
        place = self.at(*index)
        np.add.at(self.counts, place.ravel(), 1)
        return self.values[place]

    def write(self, value: np.ndarray, *index: np.ndarray) -> None:
        place = self.at(*index)
        np.add.at(self.counts, place.ravel(), 1)
        self.values[place] = value


def box(buffer: Buffer, first: tuple[int, int], size: tuple[int, int], limits: tuple[int, int]):
    """A TMA load: zeros in place of what is outside of the tensor's limits, which is not read."""
    found = np.zeros(size)
    rows, columns = (np.arange(a, min(a + s, end)) for a, s, end in zip(first, size, limits))
    found[: len(rows), : len(columns)] = buffer.read(rows[:, None], columns)
    return found


def multiply(x: Buffer, x_scales: Buffer, w: Buffer, w_scales: Buffer, out: Buffer, m, n, k):
    """The grid of the launched kernel. Scales of w are [N blocks, K blocks], contiguous."""
    tile_m, tile_n, tile_k = C.tile
    assert tile_n == C.n_block and tile_k == C.k_block  # a scale of w for each tile
    num_rows, num_columns = round_up(m, C.filled_rows), cdiv(n, C.n_block)  # shapes of the scales
    for i, j in np.ndindex(cdiv(m, tile_m), cdiv(n, tile_n)):
        total = np.zeros((tile_m, tile_n))
        for b in range(cdiv(k, tile_k)):
            left = box(x, (i * tile_m, b * tile_k), (tile_m, tile_k), (m, k))
            right = box(w, (j * tile_n, b * tile_k), (tile_n, tile_k), (n, k))
            rows = np.arange(i * tile_m, min(num_rows, (i + 1) * tile_m))
            row_scales = np.full(tile_m, np.nan)
            row_scales[: len(rows)] = x_scales.read(rows, np.array(b))
            # 32 threads offer to load the tile's scale; the predicate leaves one.
            loading = j + np.arange(32)
            loading = loading[loading < min(num_columns, j + 1)]
            (scale,) = w_scales.read(loading, np.array(b))
            total += left @ right.T * row_scales[:, None] * scale
        rows, columns = (
            np.arange(i * tile_m, (i + 1) * tile_m),
            np.arange(j * tile_n, (j + 1) * tile_n),
        )
        rows, columns = rows[rows < m], columns[columns < n]  # a TMA store
        out.write(total[: len(rows), : len(columns)], rows[:, None], columns)


def operands(m: int, n: int, k: int, layout: ScaleLayout):
    torch.manual_seed(m + n + k)
    x, x_scales = per_token_group_fp8_quant(torch.randn(m, k), layout=layout)
    w, w_scales = per_block_cast_to_fp8(torch.randn(n, k))
    return x, x_scales, w.clone(), w_scales  # of its own size, as a checkpoint has it


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("spare", [0, 24])
def test_every_element_is_written_once_and_nothing_outside_is_touched(m, n, k, spare):
    """spare: columns of a wider tensor that out is a part of, on both sides."""
    tensors = operands(m, n, k, ScaleLayout.TMA_ALIGNED)
    out = torch.zeros(m, n + 2 * spare)[:, spare : spare + n]
    buffers = [Buffer(tensor) for tensor in (*tensors, out)]
    multiply(*buffers, m, n, k)
    x, x_scales, w, w_scales, written = buffers
    counts = torch.from_numpy(written.counts).view(m, n + 2 * spare)
    assert (counts[:, spare : spare + n] == 1).all() and counts.sum() == m * n
    assert (x.counts == cdiv(n, C.tile[1])).all()
    assert (w.counts == cdiv(m, C.tile[0])).all()
    assert (w_scales.counts == cdiv(m, C.tile[0])).all()
    assert (x_scales.counts == cdiv(n, C.tile[1])).all()  # the rows that fill it up too
    found = torch.from_numpy(written.values).view_as(counts)[:, spare : spare + n]
    torch.testing.assert_close(found.float(), block_scaled_mm(*tensors_of(tensors)))


def tensors_of(tensors):
    x, x_scales, w, w_scales = tensors
    return x, w, x_scales, w_scales, (C.n_block, C.k_block)


def test_scales_that_are_not_padded_would_be_read_past_their_end():
    """Why the binding refuses them: columns of 3 rows end one row early."""
    m, n, k = 3, 128, 128
    tensors = operands(m, n, k, ScaleLayout.COLUMN_MAJOR)
    with pytest.raises(IndexError):
        multiply(*map(Buffer, (*tensors, torch.zeros(m, n))), m, n, k)


@pytest.mark.parametrize(("m", "k"), [(m, k) for m, _, k in SIZES])
def test_scales_have_the_strides_that_the_binding_wants(m, k):
    """As it sees them, through DLPack: of a single row or group too."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    _, scales = per_token_group_fp8_quant(torch.randn(m, k), layout=ScaleLayout.TMA_ALIGNED)
    seen = tvm_ffi.from_dlpack(scales)
    assert tuple(seen.shape) == (m, cdiv(k, C.k_block))
    assert tuple(seen.strides) == (1, round_up(m, C.filled_rows))


def test_sizes_that_the_backend_takes_are_those_that_tma_loads_and_stores():
    """Rows of E4M3 and of 16-bit results are whole 16-byte units."""
    for spec in cutlass.SPECS:
        if spec.family == "linear" and "sm120_fp8_block_gemm" in spec.native:
            assert spec.k_align % 16 == 0 and spec.n_align * 2 % 16 == 0
            return
    raise AssertionError("the backend has no block-scaled GEMM for SM120")
