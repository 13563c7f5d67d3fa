"""int4 weights by FP8 activations on a GPU: exact on numbers that every step holds exactly, the
arithmetic of the CPU on random ones. Any chip that was compiled for will do, also one that the
backend is not for. Needs the native library with `marlin_w4a8_gemm`."""

from dataclasses import replace

import pytest
import torch
from weight_only_cases import FP8, fill_blocks, make_linear, make_moe, wide_of

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.interface import LinearTensors, MoETensors
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.ops.weight_only_layout import (
    pack_experts,
    pack_weight,
)
from vllm.ops.weight_only_ops import multiply
from vllm.platforms import native

pytestmark = pytest.mark.gpu
FORMATS = ("int4-group[32]", "int4-group[128]")  # with zero points, and without
NUM_TOKENS = [1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 1000, 4096]
SIZES = [(16, 64), (576, 576), (1000, 1040), (4096, 4096), (72, 14336)]
SHAPES = [(rows, splits) for rows in (1, 2) for splits in (1, 2, 4, 8)]
WINNER = Candidate("marlin-w4a8", ActScheme.DYNAMIC_TOKEN)


@pytest.fixture(scope="module", autouse=True)
def library():
    if not torch.cuda.is_available() or "marlin_w4a8_gemm" not in native.gpu_archs():
        pytest.skip("needs a GPU and a library with marlin_w4a8_gemm")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with products of FP8")
    return native.load()


def powers_of_two(shape, low, high):
    return torch.exp2(torch.randint(low, high, shape, device="cuda").float())


def exact_linear(name, n, k):
    """A weight whose products with small integers are summed in float32 without rounding."""
    tensors, _ = make_linear(name, (n,), k, device="cuda")
    tensors.scales = powers_of_two(tensors.scales.shape, -2, 2)
    return tensors


def exact_input(m, k):
    """(x in E4M3, scales, what they stand for in float64)."""
    x, scales = torch.randint(-2, 3, (m, k), device="cuda").float(), powers_of_two((m,), -2, 2)
    return x.to(FP8), scales, x.double() * scales[:, None]


def poisoned(m, n, dtype=torch.bfloat16):
    return torch.full((m, n), float("nan"), dtype=dtype, device="cuda")


def run(x, scales, packed, bias=None, row_tiles=0, splits=0, dtype=torch.bfloat16):
    out = poisoned(len(x), packed.num_rows, dtype)
    torch.ops.vllm.marlin_gemm(
        x, scales, packed.codes, packed.scales, packed.row_factors, bias, out, packed.format,
        packed.columns_per_scale, row_tiles, splits,
    )  # fmt: skip
    return out


def on_gpu(tensors: LinearTensors | MoETensors):
    fields = tensors.__dataclass_fields__
    parts = {name: getattr(tensors, name) for name in fields}
    return replace(tensors, **{n: p.cuda() for n, p in parts.items() if torch.is_tensor(p)})


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_products_of_small_integers_are_exact(name, n, k, dtype):
    tensors = exact_linear(name, n, k)
    packed, wide = pack_weight(tensors, by_fp8=True), wide_of(tensors).double()
    bias = torch.randint(-8, 9, (n,), device="cuda").float()
    for m in NUM_TOKENS:
        x, scales, values = exact_input(m, k)
        expected = (values @ wide.T + bias.double()).to(dtype)
        assert torch.equal(run(x, scales, packed, bias, dtype=dtype), expected), m


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_shape_is_exact(name, shape):
    for n, k in SIZES[:3]:
        tensors = exact_linear(name, n, k)
        packed, wide = pack_weight(tensors, by_fp8=True), wide_of(tensors).double()
        for m in (1, 13, 30, 100):
            x, scales, values = exact_input(m, k)
            found = run(x, scales, packed, None, *shape)
            assert torch.equal(found, (values @ wide.T).bfloat16()), (n, k, m)


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_of_activations_and_every_weight_less_its_zero_point_is_exact(name):
    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(FP8)
    numbers = numbers[~numbers.float().isnan()]
    tensors = exact_linear(name, 512, 256)
    x = torch.zeros(len(numbers), 256, device="cuda").to(FP8)
    columns = torch.randperm(256, device="cuda")[: len(numbers)]
    x[torch.arange(len(numbers), device="cuda"), columns] = numbers
    scales = powers_of_two((len(numbers),), -3, 4)
    found = run(x, scales, pack_weight(tensors, by_fp8=True))
    wide = wide_of(tensors)[:, columns].T
    assert torch.equal(found, (numbers.float() * scales)[:, None].mul(wide).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_backend_computes_what_the_cpu_does_in_a_graph_too(name, dtype):
    tensors, _ = make_linear(name, (384, 128), 1536)
    tensors.bias = torch.randn(512) / 100
    problem = LinearProblem(512, 1536, WeightFormat.parse(name))
    maker = registry.backend("marlin-w4a8").linear
    here, there = maker(problem, on_gpu(tensors), WINNER), maker(problem, tensors, WINNER)
    for m in (1, 9, 50, 300):
        x = torch.randn(m, 1536).to(dtype)
        given = torch.zeros_like(x).cuda()
        here(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = here(given)
        given.copy_(x)
        graph.replay()
        expected = there(x).double()
        assert (y.cpu().double() - expected).norm() < 5e-3 * expected.norm(), m


def test_results_do_not_depend_on_timing_or_on_the_tokens_beside():
    packed = pack_weight(make_linear(FORMATS[0], (512,), 8192, device="cuda")[0], by_fp8=True)
    x = torch.randn(16, 8192, device="cuda").to(FP8)
    scales = torch.rand(16, device="cuda")
    first = run(x, scales, packed, None, 2, 4)
    for _ in range(20):
        assert torch.equal(run(x, scales, packed, None, 2, 4), first)
    assert torch.equal(run(x[:3], scales[:3], packed, None, 2, 4), first[:3])


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 40, 700])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_give_what_their_emulation_on_the_cpu_gives(name, num_tokens):
    tensors, _ = make_moe(name, 6, 256, 128)
    problem = MoEProblem(6, 3, 256, 128, WeightFormat.parse(name))
    x = torch.randn(num_tokens, 256).bfloat16()
    ids = torch.rand(num_tokens, 6).argsort(1)[:, :3].contiguous()
    ids[::3, 0] = -1  # of another rank
    weights = torch.rand(num_tokens, 3)
    expected = registry.backend("emulation").moe(problem, tensors, WINNER)(x, weights, ids).double()
    apply = registry.backend("marlin-w4a8").moe(problem, on_gpu(tensors), WINNER)
    found = apply(x.cuda(), weights.cuda(), ids.cuda()).cpu()
    assert found.shape == x.shape
    # What is between both products is rounded to E4M3: a last bit of bfloat16 may move it.
    assert (found.double() - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize("block_rows", [1, 8, 16, 32, 64])
def test_blocks_of_experts_are_exact_and_touch_no_other_rows(block_rows):
    k, n = 320, 200
    weights = [exact_linear(FORMATS[1], n, k) for _ in range(4)]
    packed = pack_experts(iter(weights), 4, by_fp8=True)
    x, scales, values = exact_input(30, k)
    order = torch.randperm(60, device="cuda").int()
    blocks = torch.tensor(
        [[2, 0, -1, 3], [3, 35, 0, 52], [3 + block_rows // 2, 50, 60, 53]], device="cuda"
    ).int()
    bias = torch.randint(-8, 9, (4, n), device="cuda").float()
    out, expected = poisoned(60, n), poisoned(60, n)
    torch.ops.vllm.marlin_gemm_grouped(
        x, scales, packed.codes, packed.scales, packed.row_factors, bias, blocks, order, out,
        packed.format, packed.columns_per_scale, block_rows, 2, False, 0, 0,
    )  # fmt: skip
    fill_blocks(expected, values, order, blocks, weights, block_rows, bias)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x.to(torch.bfloat16)),
        ("x", lambda x: x[:, :120].contiguous()),
        ("x_scales", lambda s: None),
        ("x_scales", lambda s: s[:3]),
        ("x_scales", lambda s: s.half()),
        ("x_scales", lambda s: s.cpu()),
        ("out", lambda o: o.float()),
        ("format", lambda f: "int3"),
    ],
)
def test_wrong_arguments_are_named(library, name, change):
    packed = pack_weight(make_linear(FORMATS[0], (64,), 128, device="cuda")[0], by_fp8=True)
    given = {
        "x": torch.randn(4, 128, device="cuda").to(FP8), "x_scales": torch.ones(4, device="cuda"),
        "codes": packed.codes, "scales": packed.scales, "row_factors": None, "bias": None,
        "out": poisoned(4, 64), "format": packed.format, "columns_per_scale": 32, "row_tiles": 0,
        "splits": 0,
    }  # fmt: skip
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=name):
        library.marlin_gemm(*given.values())


def test_other_formats_take_no_scales_of_activations(library):
    packed = pack_weight(make_linear("nvfp4", (64,), 128, device="cuda")[0])
    x, scales = torch.randn(4, 128, device="cuda").bfloat16(), torch.ones(4, device="cuda")
    with pytest.raises(ValueError, match="x_scales"):
        library.marlin_gemm(x, scales, packed.codes, packed.scales, packed.row_factors, None,
                            poisoned(4, 64), "nvfp4", 0, 0, 0)  # fmt: skip


def test_no_tokens_are_nothing_to_do():
    packed = pack_weight(make_linear(FORMATS[0], (64,), 128, device="cuda")[0], by_fp8=True)
    x = torch.randn(0, 128, device="cuda").bfloat16()
    assert multiply(x, packed).shape == (0, 64)
