"""FP8 block GEMMs on Hopper: exact on numbers that every step represents exactly, and refusals.

Needs a 9.0 GPU and the native library (or another, in VLLM_TEST_LIBRARY); besides torch, tvm_ffi
and pytest alone.
"""

import os
from itertools import pairwise

import pytest
import torch
import tvm_ffi

from vllm import _native

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
NUM_TOKENS = [0, 1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 127, 128, 300, 1024]
SIZES = [(128, 128), (576, 576), (1000, 1040), (192, 2064), (2056, 16), (8, 4096)]
# (tile_m, tile_n, cluster, is_split) of sm90_fp8_block.cu
SPLIT = [(64, 32, 1, True), (64, 32, 4, True), (128, 64, 2, True), (128, 64, 8, True)]
STAYING = [(64, 32, 1, False), (64, 32, 2, False), (64, 64, 1, False), (128, 32, 1, False),
           (128, 64, 2, False), (128, 128, 1, False), (128, 128, 2, False)]  # fmt: skip
TILINGS = SPLIT + STAYING


@pytest.fixture(scope="module")
def library():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of capability 9.0")
    torch.manual_seed(0)
    path = os.environ.get("VLLM_TEST_LIBRARY")
    loaded = tvm_ffi.load_module(path) if path else _native.load()
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


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("m", [1, 64, 65, 300, 700])
def test_every_tiling_is_exact(library, tiling, m):
    for n, k in SIZES:
        case = Case(m, n, k, bias=n == 1000)
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


@pytest.mark.parametrize("tiling", [SPLIT[-1], STAYING[-1]], ids=str)
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


@pytest.mark.parametrize("m", [3, 40, 300])
@pytest.mark.parametrize("padding", [16, 3])
def test_rows_may_be_apart_and_nothing_beside_them_is_written(library, m, padding):
    case = Case(m, 576, 1040)
    a = torch.empty(m, 1040 + 32, device="cuda", dtype=FP8)[:, :1040].copy_(case.a)
    b = torch.empty(576, 1040 + 16, device="cuda", dtype=FP8)[:, :1040].copy_(case.b)
    whole = torch.full((m, 576 + padding), float("nan"), device="cuda", dtype=torch.bfloat16)
    library.cutlass_fp8_block_gemm(a, case.a_scales, b, case.b_scales, None, whole[:, :576])
    assert torch.equal(whole[:, :576], case.product.bfloat16())
    assert whole[:, 576:].isnan().all()


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
    [(5,), (0, 300, 1, 0, 64, 65, 0), (3,) * 70, (0,) * 40 + (129, 0, 1000), (0, 0)],
    ids=["one", "mixed", "many", "late", "none"],
)
@pytest.mark.parametrize("n, k", [(576, 1040), (1000, 256)])
def test_every_expert_gets_its_rows(library, counts, n, k):
    m, num_experts = sum(counts) + 10, len(counts)
    offsets = [sum(counts[:i]) for i in range(num_experts + 1)]
    a, b = integers(m, k), integers(num_experts, n, k)
    a_scales = powers_of_two(blocks(k), m).t()
    b_scales = powers_of_two(num_experts, blocks(n), blocks(k))
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    on_gpu = torch.tensor(offsets, device="cuda", dtype=torch.int32)
    library.cutlass_fp8_block_gemm_grouped(a, a_scales, b, b_scales, on_gpu, out)
    rows, weights = dequantised(a, a_scales, 1), dequantised(b, b_scales, 128)
    for (begin, end), weight in zip(pairwise(offsets), weights):
        assert torch.equal(out[begin:end], (rows[begin:end] @ weight.t()).bfloat16())
    assert out[offsets[-1] :].isnan().all()


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


def test_what_cannot_be_read_is_refused_by_name(library):
    case = Case(20, 256, 512)
    a, a_scales, b, b_scales, _ = case.operands
    wide = torch.empty(20, 528, device="cuda", dtype=FP8)
    out = case.out()
    refused = {
        "a: given data at an address": (wide[:, 1:513], a_scales, b, b_scales, None, out),
        "a: given rows 520 bytes apart": (
            torch.empty(20, 520, device="cuda", dtype=FP8)[:, :512], a_scales, b, b_scales, None,
            out),
        "a: given 520 columns": (
            torch.empty(20, 520, device="cuda", dtype=FP8), a_scales, b, b_scales, None, out),
        "a: given bfloat16": (a.bfloat16(), a_scales, b, b_scales, None, out),
        "a_scales: given shape": (a, a_scales[:, :3], b, b_scales, None, out),
        "b: given a last dimension": (a, a_scales, b.t().contiguous().t(), b_scales, None, out),
        "b_scales: given shape": (a, a_scales, b, b_scales[:1], None, out),
        "bias: given bfloat16": (a, a_scales, b, b_scales, b_scales.new_zeros(256).bfloat16(), out),
        "out: given float32": (a, a_scales, b, b_scales, None, out.float()),
        "out: given shape": (a, a_scales, b, b_scales, None, out[:19]),
        "b: given a tensor of DLPack": (a, a_scales, b.cpu(), b_scales, None, out),
    }  # fmt: skip
    for message, arguments in refused.items():
        with pytest.raises(ValueError) as error:
            library.cutlass_fp8_block_gemm(*arguments)
        assert str(error.value).startswith(message)
    assert out.isnan().all()
