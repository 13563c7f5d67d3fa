"""The NVFP4 quantisers equal the torch reference, computed on the CPU, bit for bit.

Outputs lie inside larger poisoned buffers: what is not written, or written beside them, shows.
FP4_LIBRARY names a library to test instead of the installed one; needs torch, pytest and tvm-ffi.
"""

import os

import pytest
import torch
import tvm_ffi
from torch import Tensor

from vllm.ops import nvfp4, torch_ops
from vllm.platforms import native

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DTYPES = [torch.bfloat16, torch.float16]
ROWS = (0, 1, 2, 31, 127, 128, 129, 8192)
SHAPES = [
    *((m, 1024) for m in ROWS),
    *((m, 48) for m in ROWS),  # three groups: a column of filling
    *((37, k) for k in (16, 32, 80, 576, 7168)),
    (8192, 4096),
]
GATED_SHAPES = [*((m, 336) for m in ROWS), (37, 16), (5, 7168), (2048, 4096)]
# Experts' rows: empty ones first, last and in between; single rows; whole tiles.
ROUTINGS = [
    [5],
    [0, 0, 3, 0],
    [128, 256, 1, 0, 127, 129],
    [0] * 40 + [1] * 60 + [0] * 28,
    [300, 0, 900, 7] * 8,
    [1] * 1024,
]
# exp(-x) overflows float32 from x = -88.7 down.
FINITE_GATES = [
    0.0,
    -0.0,
    80.0,
    -80.0,
    87.0,
    88.0,
    -88.0,
    100.0,
    -120.0,
    3e38,
    -3e38,
    1e-30,
    -1e-30,
]
GUARD = 64
POISON = 0x7F


@pytest.fixture(scope="module")
def library():
    path = os.environ.get("FP4_LIBRARY")
    return tvm_ffi.load_module(path) if path else native.load()


class Guarded:
    """An output inside a poisoned buffer that checks, later, that nothing beside it was written."""

    def __init__(self, *shape: int):
        size = torch.Size(shape).numel()
        self.buffer = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device=DEVICE)
        self.tensor = self.buffer[GUARD : GUARD + size].view(shape)

    def read(self) -> Tensor:
        edges = torch.cat([self.buffer[:GUARD], self.buffer[-GUARD:]])
        assert bool((edges == POISON).all()), "written beside the output"
        return self.tensor.cpu()


def assert_same(given: Tensor, expected: Tensor) -> None:
    expected = expected.view(torch.uint8)
    assert given.shape == expected.shape
    wrong = given != expected
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        pytest.fail(
            f"{int(wrong.sum())} of {wrong.numel()} bytes differ, the first at {place}: "
            f"{int(given[tuple(place)]):#x}, expected {int(expected[tuple(place)]):#x}"
        )


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def scales_shape(m: int, groups: int, is_swizzled: bool) -> tuple[int, int]:
    return (round_up(m, 128), round_up(groups, 4)) if is_swizzled else (m, groups)


def check(library, x: Tensor, global_scale: float, is_swizzled: bool, is_gated: bool = False):
    """Runs the kernel on x (on the GPU) and compares with the reference."""
    m, k = x.shape[0], x.shape[1] // (2 if is_gated else 1)
    scale = torch.tensor([global_scale], device=DEVICE)
    q, scales = Guarded(m, k // 2), Guarded(*scales_shape(m, k // 16, is_swizzled))
    function = library.silu_and_mul_nvfp4_quant if is_gated else library.nvfp4_quant
    with tvm_ffi.use_torch_stream():
        function(x, scale, q.tensor, scales.tensor, is_swizzled)
    quantised = torch_ops.silu_and_mul(x) if is_gated else x
    expected = nvfp4.nvfp4_quantize(quantised.cpu(), scale.cpu(), is_swizzled)
    assert_same(q.read(), expected[0])
    assert_same(scales.read(), expected[1])


def activations(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, some elements zero."""
    x = torch.randn(m, k, device=DEVICE) * torch.logspace(-3, 2, max(m, 1), device=DEVICE)[:m, None]
    return (x * (torch.rand_like(x) > 0.05)).to(dtype)


# ---------------------------------------------------------------- one tensor


@pytest.mark.parametrize("is_swizzled", [False, True], ids=["linear", "swizzled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, k", SHAPES)
def test_codes_and_scales_equal_the_reference(library, m, k, dtype, is_swizzled):
    check(library, activations(m, k, dtype), 2688 / 300, is_swizzled)


@pytest.mark.parametrize("global_scale", [1e-4, 0.37, 1.0, 2688.0, 1e6])
def test_every_16_bit_float_among_ordinary_ones(library, global_scale):
    for dtype in DTYPES:
        patterns = torch.arange(65536, device=DEVICE, dtype=torch.int32).to(torch.int16).view(dtype)
        x = torch.randn(65536, 16, device=DEVICE).to(dtype)
        x[:, 5] = patterns
        check(library, x, global_scale, is_swizzled=False)


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 6e-5])
def test_groups_of_one_value_alone(library, value):
    for dtype in DTYPES:
        x = torch.full((130, 80), value, device=DEVICE, dtype=dtype)
        check(library, x, 12.0, is_swizzled=True)


@pytest.mark.parametrize("is_swizzled", [False, True], ids=["linear", "swizzled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, k", GATED_SHAPES)
def test_silu_and_mul_then_the_reference(library, m, k, dtype, is_swizzled):
    x = torch.randn(m, 2 * k, device=DEVICE).mul(4).to(dtype)
    check(library, x, 40.0, is_swizzled, is_gated=True)


def test_silu_of_large_gates_and_of_what_is_not_finite(library):
    gates = torch.tensor(
        [*FINITE_GATES, float("inf"), -float("inf"), float("nan")],
        device=DEVICE,
    )
    ups = torch.randn(64, 16, device=DEVICE)
    x = torch.cat([gates.expand(64, 16), ups], 1).bfloat16()
    check(library, x, 1.0, is_swizzled=False, is_gated=True)


def test_a_captured_graph_quantises_what_its_input_holds_later(library):
    x = activations(300, 1024, torch.bfloat16)
    scale = torch.tensor([3.0], device=DEVICE)
    q = torch.empty(300, 512, dtype=torch.uint8, device=DEVICE)
    scales = torch.empty(384, 64, dtype=torch.uint8, device=DEVICE)
    library.nvfp4_quant(x, scale, q, scales, True)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), tvm_ffi.use_torch_stream():
        library.nvfp4_quant(x, scale, q, scales, True)
    x.copy_(activations(300, 1024, torch.bfloat16))
    scale.fill_(5.0)
    graph.replay()
    expected = nvfp4.nvfp4_quantize(x.cpu(), torch.tensor([5.0]), is_swizzled=True)
    assert_same(q.cpu(), expected[0])
    assert_same(scales.cpu(), expected[1])


# ---------------------------------------------------------------- experts


def run_grouped(library, x, global_scales, offsets, is_gated, pairs=None, top_k=1):
    num_experts, k = len(global_scales), x.shape[1] // (2 if is_gated else 1)
    num_rows = x.shape[0] if pairs is None else len(pairs)
    rows = nvfp4.max_grouped_scale_rows(num_rows, num_experts)
    q, scales = Guarded(num_rows, k // 2), Guarded(rows, round_up(k // 16, 4))
    given = (x, global_scales, offsets)
    with tvm_ffi.use_torch_stream():
        if is_gated:
            library.silu_and_mul_nvfp4_quant_grouped(*given, q.tensor, scales.tensor)
        else:
            library.nvfp4_quant_grouped(*given, pairs, top_k, q.tensor, scales.tensor)
    return q.read(), scales.read()


@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", ROUTINGS, ids=lambda counts: f"{len(counts)}-{sum(counts)}")
def test_experts_equal_the_reference_for_each_alone(library, counts, dtype, is_gated):
    k = 208  # 13 groups: three columns of filling
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    x = torch.randn(sum(counts), 2 * k if is_gated else k, device=DEVICE).mul(3).to(dtype)
    global_scales = torch.rand(len(counts)) * 300 + 1
    q, scales = run_grouped(library, x, global_scales.to(DEVICE), offsets.to(DEVICE), is_gated)
    quantised = torch_ops.silu_and_mul(x) if is_gated else x
    expected = nvfp4.nvfp4_quantize_grouped(quantised.cpu(), global_scales, offsets)
    assert_same(q, expected[0])
    used = expected[1].shape[0]
    assert_same(scales[:used], expected[1])
    assert bool((scales[used:] == POISON).all()), "written past the last expert's tiles"


@pytest.mark.parametrize("num_elsewhere", [0, 50])
@pytest.mark.parametrize("counts", ROUTINGS, ids=lambda counts: f"{len(counts)}-{sum(counts)}")
def test_a_token_is_quantised_for_each_of_its_pairs(library, counts, num_elsewhere):
    k, top_k, last = 208, 3, sum(counts)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    pairs = torch.randperm(last + num_elsewhere).int()
    x = torch.randn(round_up(len(pairs), top_k) // top_k, k, device=DEVICE).bfloat16()
    global_scales = torch.rand(len(counts)) * 300 + 1
    wanted = x.cpu()[pairs[:last] // top_k]
    pairs[last:] = torch.randint(-(2**31), 2**31, (num_elsewhere,)).int()  # of no expert
    given = (global_scales.to(DEVICE), offsets.to(DEVICE))
    q, scales = run_grouped(library, x, *given, False, pairs.to(DEVICE), top_k)
    expected = nvfp4.nvfp4_quantize_grouped(wanted, global_scales, offsets)
    assert_same(q[:last], expected[0])
    assert_same(scales[: expected[1].shape[0]], expected[1])
    assert bool((q[last:] == POISON).all()), "written for a pair of no expert"


@pytest.mark.parametrize(
    "offsets", [[0, 900, 0, 900, 0, 300], [5, -7, 10**9, 0, 300, 2], [300, 200, 100, 50, 0, 0]]
)
def test_offsets_that_make_no_sense_write_nothing_outside(library, offsets):
    x = torch.randn(300, 64, device=DEVICE).bfloat16()
    given = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    run_grouped(library, x, torch.ones(5, device=DEVICE), given, is_gated=False)


# ---------------------------------------------------------------- what is refused


def arguments(**changes):
    """Sound arguments of nvfp4_quant for [4, 64], with linear scales, and changes to them."""
    sound = {
        "x": torch.ones(4, 64, device=DEVICE).bfloat16(),
        "global_scale": torch.ones(1, device=DEVICE),
        "q": torch.empty(4, 32, dtype=torch.uint8, device=DEVICE),
        "scales": torch.empty(4, 4, dtype=torch.float8_e4m3fn, device=DEVICE),
        "is_swizzled": False,
    }
    return {**sound, **changes}.values()


def test_sound_arguments_are_taken(library):
    library.nvfp4_quant(*arguments())


def misaligned(*shape: int, dtype: torch.dtype) -> Tensor:
    buffer = torch.zeros(torch.Size(shape).numel() + 1, dtype=dtype, device=DEVICE)
    return buffer[1:].view(shape)


@pytest.mark.parametrize(
    "name, make, text",
    [
        ("x", lambda: misaligned(4, 64, dtype=torch.bfloat16), "multiple of 16 bytes"),
        ("x", lambda: torch.ones(64, 4, device=DEVICE).bfloat16().t(), "contiguous"),
        ("x", lambda: torch.ones(4, 128, device=DEVICE).bfloat16()[:, :64], "contiguous"),
        ("x", lambda: torch.ones(4, 72, device=DEVICE).bfloat16(), "multiple of 16"),
        ("x", lambda: torch.ones(4, 0, device=DEVICE).bfloat16(), "multiple of 16"),
        ("x", lambda: torch.ones(4, 64, device=DEVICE), "bfloat16, float16"),
        ("x", lambda: torch.ones(4, 64).bfloat16(), "CUDA"),
        ("x", lambda: torch.ones(4, 8, 8, device=DEVICE).bfloat16(), "2 dimensions"),
        ("global_scale", lambda: torch.ones(2, device=DEVICE), "one scale"),
        ("global_scale", lambda: torch.ones(1), "CUDA"),
        ("global_scale", lambda: torch.ones(1, device=DEVICE).half(), "float32"),
        ("q", lambda: misaligned(4, 32, dtype=torch.uint8), "multiple of 8 bytes"),
        ("q", lambda: torch.empty(4, 64, dtype=torch.uint8, device=DEVICE), "two codes"),
        ("q", lambda: torch.empty(3, 32, dtype=torch.uint8, device=DEVICE), "rows of x"),
        ("q", lambda: torch.empty(4, 32, dtype=torch.int8, device=DEVICE), "uint8"),
        ("scales", lambda: torch.empty(4, 5, dtype=torch.uint8, device=DEVICE), "groups"),
        ("scales", lambda: torch.empty(8, 4, dtype=torch.uint8, device=DEVICE), "rows of x"),
        ("scales", lambda: torch.empty(4, 4, device=DEVICE), "float8_e4m3fn"),
    ],
)
def test_an_argument_that_cannot_be_served_is_named(library, name, make, text):
    with pytest.raises(ValueError, match=f"{name}: .*{text}"):
        library.nvfp4_quant(*arguments(**{name: make()}))


def test_tiles_need_whole_tiles(library):
    with pytest.raises(ValueError, match=r"scales: .*rounded up to 128"):
        library.nvfp4_quant(*arguments(is_swizzled=True))


@pytest.mark.parametrize(
    "name, index, value, text",
    [
        ("global_scales", 1, lambda: torch.ones(2, device=DEVICE), "each expert"),
        ("expert_offsets", 2, lambda: torch.zeros(4, device=DEVICE), "int32"),
        ("expert_offsets", 2, lambda: torch.zeros(1, device=DEVICE, dtype=torch.int32), "accepted"),
        ("pairs", 3, lambda: torch.zeros(4, device=DEVICE, dtype=torch.int64), "int32"),
        ("top_k", 4, lambda: 0, "accepted: 1 to"),
        ("scales", 6, lambda: torch.empty(256, 4, dtype=torch.uint8, device=DEVICE), "at least"),
    ],
)
def test_an_argument_of_experts_that_cannot_be_served_is_named(library, name, index, value, text):
    given = [
        torch.ones(4, 64, device=DEVICE).bfloat16(),
        torch.ones(3, device=DEVICE),
        torch.tensor([0, 1, 2, 4], device=DEVICE, dtype=torch.int32),
        torch.zeros(4, device=DEVICE, dtype=torch.int32),
        1,
        torch.empty(4, 32, dtype=torch.uint8, device=DEVICE),
        torch.empty(384, 4, dtype=torch.uint8, device=DEVICE),
    ]
    library.nvfp4_quant_grouped(*given)
    given[index] = value()
    with pytest.raises(ValueError, match=f"{name}: .*{text}"):
        library.nvfp4_quant_grouped(*given)
