"""The weight-only GEMM on a GPU: exact on numbers that every step represents exactly, within the
output type's rounding on random ones, and refusals. Needs the native library with `marlin_gemm`."""

import pytest
import torch
from weight_only_cases import FORMATS, FP8, INT8, fill_blocks, make_linear, make_moe, wide_of

from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.ops.weight_only_layout import (
    pack_experts,
    pack_weight,
    widen_weight,
)
from vllm.ops.weight_only_ops import multiply, multiply_wide
from vllm.platforms import native
from vllm.utils.torch_utils import SHORT_NAMES

pytestmark = pytest.mark.gpu
NUM_TOKENS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 1000, 4096]
SIZES = [(16, 64), (576, 576), (1000, 1040), (200, 2064), (4096, 4096), (72, 14336)]
SHAPES = [(rows, splits) for rows in (1, 2) for splits in (1, 2, 4, 8)]
TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


@pytest.fixture(scope="module", autouse=True)
def library():
    if not torch.cuda.is_available() or "marlin_gemm" not in native.gpu_archs():
        pytest.skip("needs a GPU and a library with marlin_gemm")
    return native.load()


def powers_of_two(shape, low, high):
    return torch.exp2(torch.randint(low, high, shape, device="cuda").float())


def exact_linear(name, n, k):
    """A weight whose products with small integers are summed in float32 without rounding."""
    tensors, _ = make_linear(name, (n,), k, device="cuda")
    if name == "nvfp4":
        tensors.scales = powers_of_two(tensors.scales.shape, -1, 2).to(FP8)
        tensors.global_scales = torch.full((1,), 0.25, device="cuda")
    elif tensors.scales.dtype == torch.uint8:
        tensors.scales = torch.randint_like(tensors.scales, 125, 129)
    else:
        tensors.scales = powers_of_two(tensors.scales.shape, -2, 2)
    if tensors.weight.dtype == FP8:
        tensors.weight = torch.randint(-4, 5, (n, k), device="cuda").to(FP8)
    return tensors


def poisoned(m, n, dtype=torch.bfloat16):
    return torch.full((m, n), float("nan"), dtype=dtype, device="cuda")


def run(x, packed, bias=None, row_tiles=0, splits=0):
    out = poisoned(len(x), packed.num_rows, x.dtype)
    torch.ops.vllm.marlin_gemm(
        x, None, packed.codes, packed.scales, packed.row_factors, bias, out, packed.format,
        packed.columns_per_scale, row_tiles, splits,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_products_of_small_integers_are_exact(name, n, k, dtype):
    tensors = exact_linear(name, n, k)
    packed, wide = pack_weight(tensors), wide_of(tensors).double()
    bias = torch.randint(-8, 9, (n,), device="cuda").float()
    for m in NUM_TOKENS:
        x = torch.randint(-2, 3, (m, k), device="cuda").to(dtype)
        expected = x.double() @ wide.T
        assert torch.equal(run(x, packed), expected.to(dtype)), m
        assert torch.equal(run(x, packed, bias), (expected + bias.double()).to(dtype)), m


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_shape_is_exact(name, shape):
    for n, k in SIZES[:4]:
        tensors = exact_linear(name, n, k)
        packed, wide = pack_weight(tensors), wide_of(tensors).double()
        for m in (1, 8, 13, 30, 100):
            x = torch.randint(-2, 3, (m, k), device="cuda").bfloat16()
            found = run(x, packed, None, *shape)
            assert torch.equal(found, (x.double() @ wide.T).bfloat16()), (n, k, m)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_error_is_that_of_the_output_type(name, dtype):
    tensors, wide = make_linear(name, (512, 256, 200), 1536, device="cuda")
    packed = pack_weight(tensors)
    for m in (1, 16, 50, 1000):
        x = torch.randn(m, 1536, device="cuda").to(dtype)
        expected = x.double() @ wide.double().T
        for found, rounded in (
            (multiply(x, packed), 1),
            (multiply_wide(x, packed, None, 1 << 20), 2),
        ):
            error = (found.double() - expected).norm() / expected.norm()
            assert error < rounded * TOLERANCE[dtype], (m, rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (200, 336), (1000, 2064)])
def test_a_weight_that_is_widened_is_rounded_once(name, n, k, dtype):
    packed = pack_weight(make_linear(name, (n,), k, device="cuda")[0])
    first = n // 32 * 16
    out = poisoned(n - first, k, dtype)
    torch.ops.vllm.marlin_widen(
        packed.codes, packed.scales, packed.row_factors, n, first, out, packed.format,
        packed.columns_per_scale,
    )  # fmt: skip
    wanted = widen_weight(packed)[first:]
    # Scales are multiplied in another order: a last bit of float32 before the rounding.
    assert (out.double() - wanted.double()).abs().max() <= 2.0**-8 * wanted.abs().max()
    assert (out == wanted.to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize(("rows", "columns"), [((64, 32), 0), ((), 64), ((96, 16), 32)])
def test_shards_that_begin_inside_a_scale_block_are_multiplied_with_their_own(rows, columns):
    tensors, wide = make_linear("fp8-block", (192, 80), 352, rows, columns, "cuda")
    x = torch.randn(9, 352, device="cuda").bfloat16()
    expected = x.double() @ wide.double().T
    found = multiply(x, pack_weight(tensors)).double()
    assert (found - expected).norm() < 2.5e-3 * expected.norm()


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4", "int4-group[128]"])
def test_results_do_not_depend_on_timing_or_on_the_tokens_beside(name):
    packed = pack_weight(make_linear(name, (512,), 8192, device="cuda")[0])
    x = torch.randn(16, 8192, device="cuda").bfloat16()
    first = run(x, packed, None, 2, 4)
    for _ in range(20):
        assert torch.equal(run(x, packed, None, 2, 4), first)
    assert torch.equal(run(x[:3], packed, None, 2, 4), first[:3])


def test_rows_may_be_apart():
    tensors = exact_linear("nvfp4", 200, 256)
    packed, wide = pack_weight(tensors), wide_of(tensors).double()
    x = torch.randint(-2, 3, (20, 512), device="cuda").bfloat16()[:, :256]
    out = poisoned(20, 400)
    torch.ops.vllm.marlin_gemm(
        x, None, packed.codes, packed.scales, packed.row_factors, None, out[:, 200:], "nvfp4", 0, 0,
        0,
    )  # fmt: skip
    assert torch.equal(out[:, 200:], (x.double() @ wide.T).bfloat16())
    assert out[:, :200].isnan().all()


@pytest.mark.parametrize("name", FORMATS)
def test_the_backend_is_captured_in_a_graph_and_waits_for_what_comes_before(name):
    tensors, wide = make_linear(name, (384,), 512, device="cuda")
    problem = LinearProblem(384, 512, WeightFormat.parse(name))
    apply = registry.backend("marlin").linear(problem, tensors, Candidate("marlin", None))
    for m in (3, 300):
        x = torch.randn(m, 512, device="cuda").bfloat16()
        apply(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = apply(x * 2)
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = (2 * x.double()) @ wide.double().T
        assert (y.double() - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize(("n", "k"), [(48, 128), (200, 640), (4096, 4096)])
def test_int8_is_multiplied_as_two_int4_numbers(name, n, k, dtype):
    tensors, wide = make_linear(name, (n,), k, device="cuda")
    problem = LinearProblem(n, k, tensors.format, dtype=SHORT_NAMES[dtype])
    apply = registry.backend("marlin").linear(problem, tensors, Candidate("marlin", None))
    for m in NUM_TOKENS:
        x = torch.randn(m, k, device="cuda").to(dtype)
        expected = x.double() @ wide.double().T
        # A weight that is widened into memory is rounded in each half.
        most = TOLERANCE[dtype] * (1 if m <= 64 else 2)
        assert (apply(x).double() - expected).norm() <= most * expected.norm(), m


# ---------------------------------------------------------------- experts


def routed(num_tokens, num_experts, top_k):
    ids = torch.rand(num_tokens, num_experts, device="cuda").argsort(1)[:, :top_k].contiguous()
    ids[::3, 0] = -1  # of another rank
    return ids


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 40, 700])
@pytest.mark.parametrize("name", [*FORMATS, *INT8])
def test_experts_give_the_weighted_sum_of_their_results(name, num_tokens):
    hidden, inner, num_experts, top_k = 272, 144, 6, 3
    if name.startswith("int"):
        hidden, inner = 256, 128
    tensors, wide = make_moe(name, num_experts, hidden, inner, "cuda")
    sizes = (num_experts, top_k, hidden, inner)
    problem = MoEProblem(*sizes, WeightFormat.parse(name))
    apply = registry.backend("marlin").moe(problem, tensors, Candidate("marlin", None))
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    ids = routed(num_tokens, num_experts, top_k)
    weights = torch.rand(num_tokens, top_k, device="cuda")
    expected = torch.zeros(num_tokens, hidden, dtype=torch.float64, device="cuda")
    for expert, (gate_up, down) in enumerate(wide):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].double() @ gate_up.double().T).chunk(2, 1)
        own = (torch.nn.functional.silu(gate) * up) @ down.double().T
        expected.index_add_(0, tokens, own * weights[tokens, places].double()[:, None])
    found = apply(x, weights, ids)
    assert found.shape == x.shape
    assert (found.double() - expected).norm() <= 8e-3 * expected.norm()


@pytest.mark.parametrize("has_blocks_before", [False, True], ids=["waits", "begins early"])
@pytest.mark.parametrize("block_rows", [1, 8, 16, 32, 64])
def test_blocks_of_experts_are_exact_and_touch_no_other_rows(block_rows, has_blocks_before):
    num_experts, k, n = 4, 320, 200
    weights = [exact_linear("nvfp4", n, k) for _ in range(num_experts)]
    packed = pack_experts(iter(weights), num_experts)
    x = torch.randint(-2, 3, (30, k), device="cuda").bfloat16()
    order = torch.randperm(60, device="cuda").int()
    blocks = torch.tensor(
        [[2, 0, -1, 3], [3, 35, 0, 52], [3 + block_rows // 2, 50, 60, 53]], device="cuda"
    ).int()
    bias = torch.randint(-8, 9, (num_experts, n), device="cuda").float()
    out = poisoned(60, n)
    torch.ops.vllm.marlin_gemm_grouped(
        x, None, packed.codes, packed.scales, packed.row_factors, bias, blocks, order, out, "nvfp4",
        0, block_rows, 2, has_blocks_before, 0, 0,
    )  # fmt: skip
    expected = poisoned(60, n)
    fill_blocks(expected, x, order, blocks, weights, block_rows, bias)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("has_blocks_before", [False, True], ids=["waits", "begins early"])
@pytest.mark.parametrize("num_blocks", [1, 3, 8, 30])
@pytest.mark.parametrize("name", ["nvfp4", "fp8-block"])
def test_rows_that_a_thread_block_multiplies_one_after_another_are_exact(
    name, num_blocks, has_blocks_before
):
    """Rows for one to four of them, the last ones partial; more columns than are in flight."""
    num_experts, n, k = 2, 5736, 2832
    weights = [exact_linear(name, n, k) for _ in range(num_experts)]
    packed = pack_experts(iter(weights), num_experts)
    firsts = torch.arange(num_blocks) * 8
    blocks = torch.stack([firsts // 8 % num_experts, firsts, firsts + 8]).int().cuda()
    order = torch.randperm(8 * num_blocks, device="cuda").int()
    x = torch.randint(-2, 3, (4 * num_blocks, k), device="cuda").bfloat16()
    bias = torch.randint(-8, 9, (num_experts, n), device="cuda").float()
    out, expected = poisoned(8 * num_blocks, n), poisoned(8 * num_blocks, n)
    fill_blocks(expected, x, order, blocks, weights, 8, bias)
    for _ in range(3):
        torch.ops.vllm.marlin_gemm_grouped(
            x, None, packed.codes, packed.scales, packed.row_factors, bias, blocks, order, out,
            packed.format, packed.columns_per_scale, 8, 2, has_blocks_before, 0, 0,
        )  # fmt: skip
        assert torch.equal(out, expected)
        out.fill_(float("nan"))


# ---------------------------------------------------------------- refusals


def weight_and_input():
    packed = pack_weight(make_linear("int4-group[32]", (64,), 128, device="cuda")[0])
    return packed, torch.randn(4, 128, device="cuda").bfloat16()


def arguments(**changes):
    packed, x = weight_and_input()
    given = {
        "x": x, "x_scales": None, "codes": packed.codes, "scales": packed.scales,
        "row_factors": None, "bias": None, "out": poisoned(4, 64), "format": "int4",
        "columns_per_scale": 32, "row_tiles": 0, "splits": 0,
    }  # fmt: skip
    return given | {name: change(given[name]) for name, change in changes.items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x.float()),
        ("x", lambda x: x.cpu()),
        ("x", lambda x: x[:, :124]),
        ("x", lambda x: x.t().contiguous().t()),
        ("codes", lambda c: c[:-1]),
        ("codes", lambda c: c.view(torch.int8)),
        ("codes", lambda c: c[:, :1]),
        ("scales", lambda s: None),
        ("scales", lambda s: s.half()),
        ("scales", lambda s: s[:, :3].contiguous()),
        ("scales", lambda s: s[..., :2].contiguous()),
        ("columns_per_scale", lambda c: 48),
        ("row_factors", lambda r: torch.ones(63, device="cuda")),
        ("bias", lambda b: torch.ones(64, device="cuda").half()),
        ("out", lambda o: o[:3]),
        ("out", lambda o: o.half()),
        ("format", lambda f: "int3"),
    ],
)
def test_wrong_arguments_are_named(library, name, change):
    with pytest.raises(ValueError, match=name):
        library.marlin_gemm(*arguments(**{name: change}).values())


@pytest.mark.parametrize("change", [{"row_tiles": 3}, {"splits": 9}])
def test_shapes_that_were_not_compiled_are_refused(library, change):
    changes = {name: lambda _, value=value: value for name, value in change.items()}
    with pytest.raises(RuntimeError, match="marlin_gemm: invalid argument"):
        library.marlin_gemm(*arguments(**changes).values())


def test_no_tokens_are_nothing_to_do():
    packed, x = weight_and_input()
    assert multiply(x[:0], packed).shape == (0, 64)
    assert multiply_wide(x[:0], packed, None, 1 << 20).shape == (0, 64)
