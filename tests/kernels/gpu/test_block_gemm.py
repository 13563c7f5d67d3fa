"""FP8 block GEMMs on Hopper: exact on numbers that every step represents exactly, and refusals.

Needs a 9.0 GPU and the native library (or another, in VLLM_TEST_LIBRARY); besides torch, tvm_ffi
and pytest alone.
"""

import os
from itertools import pairwise

import pytest
import torch
import tvm_ffi

from vllm.platforms import native

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
NAN = float("nan")
NUM_TOKENS = [0, 1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 127, 128, 300, 1024]
MANY_TOKENS = [1025, 4096, 8191, 8192]
# Beside tiles, the last of which begins earlier where there are rows enough.
EDGES = [1, 2, 63, 65, 127, 129, 191, 192, 193, 255, 257, 300]
SIZES = [(128, 128), (576, 576), (1000, 1040), (192, 2064), (2056, 16), (8, 4096),
         (1001, 1552), (77, 272), (1, 144), (4128, 528)]  # fmt: skip
# (tile_m, tile_n, cluster, is_split) of sm90_fp8_block.cu
SPLIT = [(64, 32, 1, True), (64, 32, 4, True), (128, 64, 2, True), (128, 64, 8, True)]
STAYING = [(64, 32, 1, False), (64, 32, 2, False), (64, 64, 1, False), (128, 32, 1, False),
           (128, 64, 2, False), (128, 128, 1, False), (128, 128, 2, False)]  # fmt: skip
TALL = [(256, 128, 1, False), (256, 128, 2, False)]  # n % 32 == 0
TILINGS = SPLIT + STAYING + TALL


@pytest.fixture(scope="module")
def library():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of capability 9.0")
    torch.manual_seed(0)
    path = os.environ.get("VLLM_TEST_LIBRARY")
    loaded = tvm_ffi.load_module(path) if path else native.load()
    with tvm_ffi.use_torch_stream():
        yield loaded


def integers(*shape):
    """E4M3 integers up to 4: sums of 128 products fit into the 14 bits that wgmma adds with."""
    return torch.randint(-4, 5, shape, device="cuda").to(FP8)


def powers_of_two(*shape):
    return torch.exp2(torch.randint(-1, 2, shape, device="cuda").float())


def blocks(size):
    return -(-size // 128)


def dequantised(q, scales, rows):
    spread = scales.double().repeat_interleave(rows, -2)[..., : q.shape[-2], :]
    return q.double() * spread.repeat_interleave(128, -1)[..., : q.shape[-1]]


def among_nan(matrix, columns=16):
    """The same numbers, with NaN beside every row and below the last."""
    rows, width = matrix.shape
    place = torch.full((rows + 8, width + columns), NAN, device="cuda").to(matrix.dtype)
    return place[:rows, :width].copy_(matrix)


def set_nan(matrix, rows, columns=slice(None)):
    """Not by assigning, which float8 lacks."""
    place = matrix.view(torch.uint8) if matrix.dtype is FP8 else matrix
    place[rows, columns] = 0x7F if matrix.dtype is FP8 else NAN


class Case:
    """Random operands, and the product in float64."""

    def __init__(self, m, n, k, bias=False):
        self.a, self.b = integers(m, k), integers(n, k)
        self.a_scales = powers_of_two(blocks(k), m).t()
        self.b_scales = powers_of_two(blocks(n), blocks(k))
        self.bias = torch.randint(-8, 9, (n,), device="cuda").float() if bias else None
        self.product = (
            dequantised(self.a, self.a_scales, 1) @ dequantised(self.b, self.b_scales, 128).t()
        )
        if bias:
            self.product += self.bias.double()

    def out(self, dtype=torch.bfloat16):
        return torch.full(self.product.shape, float("nan"), device="cuda", dtype=dtype)

    @property
    def operands(self):
        return self.a, self.a_scales, self.b, self.b_scales, self.bias


# ---------------------------------------------------------------- dense


@pytest.mark.parametrize("n, k", SIZES)
@pytest.mark.parametrize("m", NUM_TOKENS)
def test_products_are_exact(library, m, n, k):
    case = Case(m, n, k, bias=m % 2 == 1)
    out = case.out()
    library.cutlass_fp8_block_gemm(*case.operands, out)
    assert torch.equal(out, case.product.to(out.dtype))


@pytest.mark.parametrize("n, k", [(1001, 1552), (1000, 272), (2080, 1040)])
@pytest.mark.parametrize("m", MANY_TOKENS)
def test_products_of_many_tokens_are_exact(library, m, n, k):
    case = Case(m, n, k, bias=m % 2 == 1)
    out = case.out()
    library.cutlass_fp8_block_gemm(*case.operands, out)
    assert torch.equal(out, case.product.to(out.dtype))


@pytest.mark.parametrize("m", [1500, 3500])
def test_a_product_in_two_launches_is_that_of_one(library, m):
    """On 132 multiprocessors these are (tests/native/test_sm90_gemm_emulated.py)."""
    case = Case(m, 6144, 4096, bias=True)
    together, apart = case.out(), case.out()
    library.cutlass_fp8_block_gemm(*case.operands, apart)
    library.sm90_fp8_block_gemm(*case.operands, together, 128, 128, 1, False)
    assert torch.equal(apart, together) and torch.equal(apart, case.product.to(apart.dtype))


@pytest.mark.parametrize("m", [*EDGES, 17, 100, 1025, 8192])
@pytest.mark.parametrize("n, k", [(576, 1040), (1001, 272), (544, 144)])
def test_nothing_beside_the_operands_is_read(library, m, n, k):
    case = Case(m, n, k)
    out = case.out()
    library.cutlass_fp8_block_gemm(
        among_nan(case.a), among_nan(case.a_scales), among_nan(case.b), case.b_scales, None, out
    )
    assert torch.equal(out, case.product.to(out.dtype))


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_the_last_tile_reads_and_writes_rows_that_exist(library, tiling):
    n, k = (544, 272) if tiling in TALL else (1001, 272)
    for m in EDGES:
        case = Case(m, n, k)
        whole = torch.full((m + 1, n), NAN, device="cuda", dtype=torch.bfloat16)
        operands = (among_nan(case.a), among_nan(case.a_scales), among_nan(case.b))
        library.sm90_fp8_block_gemm(*operands, case.b_scales, None, whole[:m], *tiling)
        assert torch.equal(whole[:m], case.product.bfloat16()), m
        assert whole[m].isnan().all(), m


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("m", [60, 193, 300])
def test_nan_stays_in_its_row(library, tiling, m):
    case = Case(m, 544, 1040)
    rows = [0, 40, m - 20, m - 1]
    set_nan(case.a, rows[0], 700)
    set_nan(case.a, rows[1])
    set_nan(case.a_scales, rows[2], 8)
    set_nan(case.a_scales, rows[3], 0)
    case.product[rows] = NAN
    out = case.out()
    library.sm90_fp8_block_gemm(*case.operands, out, *tiling)
    assert torch.equal(out.isnan(), case.product.isnan())
    assert torch.equal(out.nan_to_num(), case.product.bfloat16().nan_to_num())


def sizes_of(tiling):
    return [size for size in SIZES if tiling not in TALL or size[0] % 32 == 0]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("m", [1, 64, 65, 300, 700, 2100])
def test_every_tiling_is_exact(library, tiling, m):
    for n, k in sizes_of(tiling):
        case = Case(m, n, k, bias=n in (1000, 576))
        out = case.out(torch.float16)
        library.sm90_fp8_block_gemm(*case.operands, out, *tiling)
        assert torch.equal(out, case.product.to(out.dtype)), (n, k)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_rounding_error_is_that_of_the_output_type(library, tiling):
    m, n, k = 200, 1536, 4096
    a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    a_scales, b_scales = torch.rand(m, 32, device="cuda"), torch.rand(12, 32, device="cuda")
    a, b = a.to(FP8), b.to(FP8)
    expected = dequantised(a, a_scales, 1) @ dequantised(b, b_scales, 128).t()
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)
    library.sm90_fp8_block_gemm(a, a_scales, b, b_scales, None, out, *tiling)
    assert (out.double() - expected).norm() / expected.norm() < 5e-4


@pytest.mark.parametrize("tiling", [SPLIT[-1], STAYING[-1], TALL[-1]], ids=str)
def test_results_do_not_depend_on_timing(library, tiling):
    a, b = torch.randn(130, 8192, device="cuda"), torch.randn(1024, 8192, device="cuda")
    operands = (a.to(FP8), torch.rand(130, 64, device="cuda"), b.to(FP8),
                torch.rand(8, 64, device="cuda"), None)  # fmt: skip
    outs = [torch.empty(130, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(20)]
    for out in outs:
        library.sm90_fp8_block_gemm(*operands, out, *tiling)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("m", [17, 300])
@pytest.mark.parametrize("layout", ["rows", "columns", "aligned columns"])
def test_activation_scales_may_lie_in_any_order(library, m, layout):
    case = Case(m, 576, 1040)
    scales = case.a_scales.contiguous()
    if layout != "rows":
        padded = m + (-m % 4 if layout == "aligned columns" else 0)
        place = torch.zeros(scales.shape[1], padded, device="cuda").t()[:m]
        scales = place.copy_(scales)
    out = case.out()
    library.cutlass_fp8_block_gemm(case.a, scales, case.b, case.b_scales, None, out)
    assert torch.equal(out, case.product.to(out.dtype))


@pytest.mark.parametrize("m", [3, 40, 300, 1030])
@pytest.mark.parametrize("padding", [16, 3])
def test_rows_may_be_apart_and_nothing_beside_them_is_written(library, m, padding):
    case = Case(m, 576, 1040)
    a, b = among_nan(case.a, 32), among_nan(case.b)
    whole = torch.full((m, 576 + padding), float("nan"), device="cuda", dtype=torch.bfloat16)
    library.cutlass_fp8_block_gemm(a, case.a_scales, b, case.b_scales, None, whole[:, :576])
    assert torch.equal(whole[:, :576], case.product.bfloat16())
    assert whole[:, 576:].isnan().all()


@pytest.mark.parametrize("m", [3, 40, 300, 1030])
def test_rows_of_the_output_may_start_anywhere(library, m):
    case = Case(m, 576, 1040)
    whole = torch.full((m, 579), float("nan"), device="cuda", dtype=torch.bfloat16)
    library.cutlass_fp8_block_gemm(*case.operands, whole[:, 1:577])
    assert torch.equal(whole[:, 1:577], case.product.bfloat16())
    assert whole[:, [0, 577, 578]].isnan().all()


@pytest.mark.parametrize("m", [4, 64, 1024])
def test_a_captured_graph_replays_the_same_numbers(library, m):
    case = Case(m, 1024, 2048)
    out = case.out()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), tvm_ffi.use_torch_stream():
        for _ in range(3):  # kernels that begin before their predecessor ends
            library.cutlass_fp8_block_gemm(*case.operands, out)
    other = Case(m, 1024, 2048)
    for mine, theirs in zip(case.operands[:4], other.operands[:4]):
        mine.copy_(theirs)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, other.product.bfloat16())


# ---------------------------------------------------------------- grouped


@pytest.mark.parametrize(
    "counts",
    [
        (5,),
        (0, 300, 1, 0, 64, 65, 0),
        (3,) * 70,
        (0,) * 40 + (129, 0, 1000),
        (0, 0),
        (127, 63, 129, 1),
        (191, 193, 257, 2),
        (1480,),
    ],
    ids=["one", "mixed", "many", "late", "none", "edges of 64", "edges of 128", "all to one"],
)
@pytest.mark.parametrize("n, k", [(576, 1040), (1000, 256), (6144, 4096)])
def test_every_expert_gets_its_rows(library, counts, n, k):
    m, num_experts = sum(counts) + 20, len(counts)
    offsets = [10 + sum(counts[:i]) for i in range(num_experts + 1)]
    a, b = integers(m, k), integers(num_experts, n, k)
    a_scales = powers_of_two(blocks(k), m).t()
    b_scales = powers_of_two(num_experts, blocks(n), blocks(k))
    for matrix in (a, a_scales):  # nobody's rows
        set_nan(matrix, slice(0, 10))
        set_nan(matrix, slice(offsets[-1], m))
    out = torch.full((m, n), NAN, device="cuda", dtype=torch.bfloat16)
    on_gpu = torch.tensor(offsets, device="cuda", dtype=torch.int32)
    library.cutlass_fp8_block_gemm_grouped(a, a_scales, b, b_scales, on_gpu, out)
    rows, weights = dequantised(a, a_scales, 1), dequantised(b, b_scales, 128)
    for (begin, end), weight in zip(pairwise(offsets), weights):
        assert torch.equal(out[begin:end], (rows[begin:end] @ weight.t()).bfloat16())
    assert out[:10].isnan().all() and out[offsets[-1] :].isnan().all()


# ---------------------------------------------------------------- skinny


@pytest.mark.parametrize("n, k", SIZES)
@pytest.mark.parametrize("m", [m for m in NUM_TOKENS if m <= 16])
def test_skinny_products_of_quantised_tokens_are_exact(library, m, n, k):
    case = Case(m, n, k, bias=m % 2 == 1)
    out = case.out()
    library.skinny_fp8_block_gemm(*case.operands, out, 0, 0)
    assert torch.equal(out, case.product.to(out.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 8, 9, 16])
def test_skinny_quantises_tokens_that_are_exact_in_e4m3_exactly(library, m, dtype):
    for n, k in SIZES:
        case = Case(m, n, k)
        x = integers(m, k).to(dtype)
        x[:, ::128] = 448  # the scale of every group is 1 then
        product = x.double() @ dequantised(case.b, case.b_scales, 128).t()
        if dtype is torch.float16:
            product /= 64
            case.b_scales /= 64
        out = case.out(dtype)
        library.skinny_fp8_block_gemm(x, None, case.b, case.b_scales, None, out, 0, 0)
        assert torch.equal(out, product.to(dtype)), (n, k)


# ---------------------------------------------------------------- refusals


def assert_refused(function, refused, out):
    """Every call fails with its message, which names the argument, and writes nothing."""
    for message, arguments in refused.items():
        with pytest.raises(ValueError) as error:
            function(*arguments)
        assert str(error.value).startswith(message)
    assert out.isnan().all()


def unaligned(rows, columns):
    return torch.zeros(rows, columns + 16, device="cuda").to(FP8)[:, 1 : columns + 1]


def rows_apart(rows, columns, num_bytes):
    return torch.zeros(rows, num_bytes, device="cuda").to(FP8)[:, :columns]


def columns_first(matrix):
    return matrix.t().contiguous().t()


def test_what_cannot_be_read_is_refused_by_name(library):
    case = Case(20, 256, 512)
    a, a_scales, b, b_scales, _ = case.operands
    out = case.out()
    narrow = torch.zeros(20, 520, device="cuda").to(FP8)
    bias = b_scales.new_zeros(256)
    refused = {
        "a: given data at an address": (unaligned(20, 512), a_scales, b, b_scales, None, out),
        "a: given rows 520 bytes apart": (
            rows_apart(20, 512, 520), a_scales, b, b_scales, None, out),
        "a: given a last dimension": (columns_first(a), a_scales, b, b_scales, None, out),
        "a: given 520 columns": (narrow, a_scales, b, b_scales, None, out),
        "a: given bfloat16": (a.bfloat16(), a_scales, b, b_scales, None, out),
        "a_scales: given shape": (a, a_scales[:, :3], b, b_scales, None, out),
        "a_scales: given bfloat16": (a, a_scales.bfloat16(), b, b_scales, None, out),
        "b: given data at an address": (a, a_scales, unaligned(256, 512), b_scales, None, out),
        "b: given rows 520 bytes apart": (
            a, a_scales, rows_apart(256, 512, 520), b_scales, None, out),
        "b: given a last dimension": (a, a_scales, columns_first(b), b_scales, None, out),
        "b: given shape [256, 496]": (
            a, a_scales, rows_apart(256, 496, 512), b_scales, None, out),
        "b: given uint8": (a, a_scales, b.view(torch.uint8), b_scales, None, out),
        "b: given a tensor of DLPack": (a, a_scales, b.cpu(), b_scales, None, out),
        "b_scales: given shape": (a, a_scales, b, b_scales[:1], None, out),
        "b_scales: given a strided tensor": (
            a, a_scales, b, columns_first(b_scales), None, out),
        "bias: given bfloat16": (a, a_scales, b, b_scales, bias.bfloat16(), out),
        "bias: given shape": (a, a_scales, b, b_scales, bias[:255], out),
        "out: given float32": (a, a_scales, b, b_scales, None, out.float()),
        "out: given shape": (a, a_scales, b, b_scales, None, out[:19]),
        "out: given a last dimension": (a, a_scales, b, b_scales, None, columns_first(out)),
        "out: given a tensor of DLPack": (a, a_scales, b, b_scales, None, out.cpu()),
    }  # fmt: skip
    assert_refused(library.cutlass_fp8_block_gemm, refused, out)


def test_what_experts_cannot_read_is_refused_by_name(library):
    a, b = integers(20, 512), integers(3, 256, 512)
    a_scales, b_scales = powers_of_two(4, 20).t(), powers_of_two(3, 2, 4)
    offsets = torch.tensor([0, 5, 5, 20], device="cuda", dtype=torch.int32)
    out = torch.full((20, 256), float("nan"), device="cuda", dtype=torch.bfloat16)
    apart = torch.zeros(3, 256, 528, device="cuda").to(FP8)[..., :512]
    refused = {
        "a: given data at an address": (unaligned(20, 512), a_scales, b, b_scales, offsets, out),
        "b: given shape": (a, a_scales, b[0], b_scales, offsets, out),
        "b: given a strided tensor": (a, a_scales, apart, b_scales, offsets, out),
        "b: given bfloat16": (a, a_scales, b.bfloat16(), b_scales, offsets, out),
        "b_scales: given shape": (a, a_scales, b, b_scales[:2], offsets, out),
        "offsets: given int64": (a, a_scales, b, b_scales, offsets.long(), out),
        "offsets: given shape": (a, a_scales, b, b_scales, offsets[:3], out),
        "offsets: given a strided tensor": (
            a, a_scales, b, b_scales, offsets.repeat_interleave(2)[::2], out),
        "offsets: given a tensor of DLPack": (a, a_scales, b, b_scales, offsets.cpu(), out),
        "out: given shape": (a, a_scales, b, b_scales, offsets, out[:19]),
        "out: given a last dimension": (a, a_scales, b, b_scales, offsets, columns_first(out)),
    }  # fmt: skip
    assert_refused(library.cutlass_fp8_block_gemm_grouped, refused, out)


def test_what_skinny_cannot_read_is_refused_by_name(library):
    case = Case(16, 256, 512)
    x, x_scales, weight, scales, _ = case.operands
    out = case.out()
    wide, more = x.bfloat16(), integers(17, 512).bfloat16()
    bias = scales.new_zeros(256)
    refused = {
        "x: given 17 rows": (more, None, weight, scales, None, out, 0, 0),
        "x: given 504 columns": (wide[:, :504], None, weight, scales, None, out, 0, 0),
        "x: given float16": (wide.half(), None, weight, scales, None, out, 0, 0),
        "x: given float8_e4m3fn": (x, None, weight, scales, None, out, 0, 0),
        "x: given bfloat16": (wide, x_scales, weight, scales, None, out, 0, 0),
        "x: given data at an address": (
            unaligned(16, 512), x_scales, weight, scales, None, out, 0, 0),
        "x: given rows 520 bytes apart": (
            rows_apart(16, 512, 520), x_scales, weight, scales, None, out, 0, 0),
        "x: given a last dimension": (
            columns_first(wide), None, weight, scales, None, out, 0, 0),
        "x: given a tensor of DLPack": (wide.cpu(), None, weight, scales, None, out, 0, 0),
        "x_scales: given shape": (x, x_scales[:, :3], weight, scales, None, out, 0, 0),
        "x_scales: given float16": (x, x_scales.half(), weight, scales, None, out, 0, 0),
        "weight: given bfloat16": (wide, None, weight.bfloat16(), scales, None, out, 0, 0),
        "weight: given data at an address": (
            wide, None, unaligned(256, 512), scales, None, out, 0, 0),
        "weight: given rows 520 bytes apart": (
            wide, None, rows_apart(256, 512, 520), scales, None, out, 0, 0),
        "weight: given shape": (wide, None, weight[:, :496], scales, None, out, 0, 0),
        "scales: given shape": (wide, None, weight, scales[:1], None, out, 0, 0),
        "scales: given a last dimension": (
            wide, None, weight, columns_first(scales), None, out, 0, 0),
        "bias: given float16": (wide, None, weight, scales, bias.half(), out, 0, 0),
        "out: given float32": (wide, None, weight, scales, None, out.float(), 0, 0),
        "out: given shape": (wide, None, weight, scales, None, out[:15], 0, 0),
        "out: given a last dimension": (
            wide, None, weight, scales, None, columns_first(out), 0, 0),
    }  # fmt: skip
    assert_refused(library.skinny_fp8_block_gemm, refused, out)


def within(memory, dtype, *shape):
    """A tensor of `shape` in memory that another has."""
    count = torch.Size(shape).numel()
    return memory.view(-1).view(dtype)[:count].view(shape)


def test_an_output_in_memory_of_an_operand_is_refused(library):
    case = Case(16, 256, 512)
    a, a_scales, b, b_scales, _ = case.operands
    out = case.out()
    lies_in_b = within(b, torch.bfloat16, 16, 256)
    inner = {"a": within(out, FP8, 16, 512), "a_scales": within(out, torch.float32, 16, 4),
             "b_scales": within(out, torch.float32, 2, 4), "bias": within(out, torch.float32, 256),
             "offsets": within(out, torch.int32, 2)}  # fmt: skip
    refused = {
        "out: given memory that a lies": (inner["a"], a_scales, b, b_scales, None, out),
        "out: given memory that a_scales": (a, inner["a_scales"], b, b_scales, None, out),
        "out: given memory that b lies": (a, a_scales, b, b_scales, None, lies_in_b),
        "out: given memory that b_scales": (a, a_scales, b, inner["b_scales"], None, out),
        "out: given memory that bias": (a, a_scales, b, b_scales, inner["bias"], out),
        "out: given rows 0 elements apart": (
            a, a_scales, b, b_scales, None, out[:1].expand(16, 256)),
    }  # fmt: skip
    assert_refused(library.cutlass_fp8_block_gemm, refused, out)
    theirs = {"a ": "x ", "a_scales": "x_scales", "b ": "weight ", "b_scales": "scales"}
    skinny = {}
    for message, arguments in refused.items():
        for name, other in theirs.items():
            message = message.replace(f"that {name}", f"that {other}")
        skinny[message] = (*arguments, 0, 0)
    assert_refused(library.skinny_fp8_block_gemm, skinny, out)
    grouped = {
        "out: given memory that a lies": (inner["a"], a_scales, b[None], b_scales[None],
                                          torch.zeros(2, device="cuda", dtype=torch.int32), out),
        "out: given memory that offsets": (a, a_scales, b[None], b_scales[None],
                                           inner["offsets"], out),
    }  # fmt: skip
    assert_refused(library.cutlass_fp8_block_gemm_grouped, grouped, out)


@pytest.mark.parametrize("tiling", [(96, 128, 1, False), (128, 128, 3, False), (64, 32, 9, True)])
def test_a_tiling_that_was_not_compiled_is_an_error(library, tiling):
    case = Case(20, 256, 512)
    with pytest.raises(RuntimeError, match="sm90_fp8_block_gemm: invalid argument"):
        library.sm90_fp8_block_gemm(*case.operands, case.out(), *tiling)


def test_tall_tiles_refuse_what_they_cannot_write(library):
    narrow, whole = Case(20, 264, 512), Case(20, 256, 512)
    beside = torch.empty(20, 260, device="cuda", dtype=torch.bfloat16)[:, 1:257]
    for case, out in ((narrow, narrow.out()), (whole, beside)):
        with pytest.raises(RuntimeError, match="sm90_fp8_block_gemm: invalid argument"):
            library.sm90_fp8_block_gemm(*case.operands, out, *TALL[0])
