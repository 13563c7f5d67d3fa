"""The CUDA quantisers equal the torch references, computed on the CPU, bit for bit.

Outputs lie inside larger poisoned buffers: what is not written, or written beside them, shows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_packed_for_deepgemm,
)
from vllm.ops import torch_ops
from vllm.ops.fp8_quant import (
    ScaleLayout,
    per_token_group_fp8_quant,
    rms_norm_group_quant,
    silu_and_mul_group_quant,
)
from vllm.utils.fp8 import FP8, MIN_AMAX, fp8_scales, round_to_fp8
from vllm.utils.math_utils import cdiv, round_up

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [
    *((m, 576) for m in (0, 1, 2, 31, 32, 33, 128, 1000, 8192)),  # the last group is partial
    *((m, 7168) for m in (1, 33, 1000)),
    (8192, 4096),
    *((37, k) for k in (1, 15, 16, 100, 127, 129, 510, 512, 520, 1040, 12288)),
]
GUARD = 64
POISON = 0x7F  # NaN as E4M3, and in every byte of a float32 or int32


# ---------------------------------------------------------------- poisoned outputs, comparisons


class Guarded:
    """An output inside a poisoned buffer that checks, later, that nothing beside it was written."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, is_transposed: bool = False):
        self.buffer = torch.full((shape.numel() + 2 * GUARD,), 0, dtype=dtype, device=DEVICE)
        self.buffer.view(torch.uint8).fill_(POISON)
        inside = self.buffer[GUARD:-GUARD]
        self.tensor = inside.view(shape[::-1]).t() if is_transposed else inside.view(shape)

    def read(self) -> Tensor:
        edges = torch.cat([self.buffer[:GUARD], self.buffer[-GUARD:]]).view(torch.uint8)
        assert bool((edges == POISON).all()), "written beside the output"
        return self.tensor.cpu()


def empty_q(num_tokens: int, num_columns: int) -> Guarded:
    return Guarded(torch.Size((num_tokens, num_columns)), FP8)


def empty_scales(num_tokens: int, num_columns: int, group: int, layout: ScaleLayout) -> Guarded:
    is_packed = layout is ScaleLayout.PACKED_UE8M0
    num_groups = cdiv(num_columns, group)
    width = cdiv(num_groups, 4) if is_packed else num_groups
    is_padded = is_packed or layout is ScaleLayout.TMA_ALIGNED
    rows = round_up(num_tokens, 4) if is_padded else num_tokens
    dtype = torch.int32 if is_packed else torch.float32
    is_transposed = layout is not ScaleLayout.ROW_MAJOR
    return Guarded(torch.Size((rows, width)), dtype, is_transposed)


def assert_same_codes(q: Tensor, expected: Tensor) -> None:
    """E4M3 bytes are equal, and NaN, whose sign no arithmetic promises, is NaN."""
    given, wanted = q.view(torch.uint8), expected.view(torch.uint8)
    are_nan = ((given & 0x7F) == 0x7F) & ((wanted & 0x7F) == 0x7F)
    wrong = (given != wanted) & ~are_nan
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} codes differ, first at {place}: "
            f"{given[tuple(place)]:#04x}, not {wanted[tuple(place)]:#04x}"
        )


def assert_same_scales(scales: Tensor, expected: Tensor) -> None:
    """The rows of `expected` are equal, NaN being NaN, and further rows zeros."""
    num_rows = expected.shape[0]
    torch.testing.assert_close(scales[:num_rows], expected, rtol=0, atol=0, equal_nan=True)
    assert not bool(scales[num_rows:].any()), "filling that is not zero"


def reference(x: Tensor, group: int, layout: ScaleLayout, is_ue8m0: bool) -> tuple[Tensor, Tensor]:
    if layout is ScaleLayout.PACKED_UE8M0:
        return per_token_group_quant_fp8_packed_for_deepgemm(x.cpu(), group)
    return per_token_group_quant_fp8(x.cpu(), group, use_ue8m0=is_ue8m0)


def check_groups(
    run: Callable[..., None],
    quantised: Tensor,
    group: int = 128,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    is_ue8m0: bool = False,
) -> None:
    """run(q, scales, group, eps, is_ue8m0) quantises `quantised` as the reference does."""
    is_ue8m0 = is_ue8m0 or layout is ScaleLayout.PACKED_UE8M0
    q, scales = empty_q(*quantised.shape), empty_scales(*quantised.shape, group, layout)
    run(q.tensor, scales.tensor, group, MIN_AMAX, is_ue8m0)
    expected_q, expected_scales = reference(quantised, group, layout, is_ue8m0)
    assert_same_scales(scales.read(), expected_scales)
    assert_same_codes(q.read(), expected_q)


def quant_group(x: Tensor) -> Callable[..., None]:
    return lambda *rest: torch.ops.vllm.fp8_quant_group(x, *rest)


def wide_range(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random values whose groups differ by orders of magnitude; one row and some values are 0."""
    x = torch.randn(shape, device=DEVICE)
    x *= torch.exp2(torch.randint(-12, 8, (*shape[:-1], 1), device=DEVICE).float())
    x[torch.rand(shape, device=DEVICE) < 0.05] = 0
    if shape[0] > 2:
        x[1] = 0
    return x.to(dtype)


# ---------------------------------------------------------------- per token and group


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_equal_the_reference(shape, dtype):
    x = wide_range(shape, dtype)
    for layout in ScaleLayout:
        check_groups(quant_group(x), x, layout=layout)
    check_groups(quant_group(x), x, layout=ScaleLayout.TMA_ALIGNED, is_ue8m0=True)


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("shape", [(33, 1040), (700, 2048), (5, 100)])
def test_group_sizes(shape, group):
    x = wide_range(shape, torch.bfloat16)
    for layout in ScaleLayout:
        if layout is not ScaleLayout.PACKED_UE8M0 or group <= 128:
            check_groups(quant_group(x), x, group, layout)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_division_by_every_scale_of_16_bit_values_is_exact(dtype):
    """Every significand as the largest of a group, against values of every significand in it.

    Multiplying by a reciprocal would fail here: it misses the quotient's last bits.
    """
    num_significands = round(1 / torch.finfo(dtype).eps)
    significands = 1 + torch.arange(num_significands, dtype=torch.float64) / num_significands
    for binade in range(-17, 1):  # below 2^-17 of the largest, all codes are 0
        values = (significands * 2.0**binade).repeat(num_significands, 1)
        groups = values.view(num_significands, -1, min(num_significands, 64))
        largest = (2 * significands).view(-1, 1, 1).expand(-1, groups.shape[1], 1)
        filling = torch.zeros(*groups.shape[:2], 128 - groups.shape[2] - 1, dtype=torch.float64)
        x = torch.cat([groups, largest, filling], -1).flatten(1).to(dtype).to(DEVICE)
        check_groups(quant_group(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_the_edges(dtype):
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.tiny, -info.tiny, info.smallest_normal / 2, 1.0, info.max, -info.max]
    rows = [special, [*special, float("inf")], [*special, float("-inf")], [1.0, float("nan")]]
    rows += [[scale * value for value in (1.0, -0.5, 2**-10)] for scale in (1e-30, 1e-10, 1e30)]
    x = torch.zeros(len(rows), 640)
    for i, values in enumerate(rows):
        x[i, : len(values)] = torch.tensor(values)
        x[i, 200 : 200 + len(values)] = torch.tensor(values)
    x = x.to(dtype).to(DEVICE)
    for layout in ScaleLayout:
        check_groups(quant_group(x), x, layout=layout)
    check_token(x)
    check_tensor(x)
    check_tensor(x[:1])


@pytest.mark.parametrize("num_columns", [512, 576, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_apart_and_misaligned_data_are_handled(dtype, num_columns):
    wide = wide_range((45, 2 * num_columns + 3), dtype)
    for x in (wide[:, :num_columns], wide[:, 1 : 1 + num_columns], wide[::2, 5 : 5 + num_columns]):
        check_groups(quant_group(x), x, layout=ScaleLayout.TMA_ALIGNED)
        check_token(x)
        check_tensor(x)
        check_static(x, 0.37)
    aligned = wide_range((45, 2 * num_columns), dtype)[:, :num_columns]
    check_groups(quant_group(aligned), aligned)
    check_static(aligned, 0.37)
    check_tensor(wide.flatten()[1 : 1 + 3 * num_columns].view(3, -1))


# ---------------------------------------------------------------- per token, per tensor, given


def check_token(x: Tensor, max_amax: float | None = None) -> None:
    q, scales = empty_q(*x.shape), Guarded(torch.Size(x.shape[:1]), torch.float32)
    bound = None if max_amax is None else torch.tensor([max_amax], device=DEVICE)
    torch.ops.vllm.fp8_quant_token(x, q.tensor, scales.tensor, MIN_AMAX, bound)
    amax = x.cpu().float().abs().amax(-1)
    if max_amax is not None:
        amax = torch.where(amax > max_amax, torch.tensor(max_amax), amax)
    expected = fp8_scales(amax.clamp(min=MIN_AMAX))
    assert_same_scales(scales.read(), expected)
    assert_same_codes(q.read(), round_to_fp8(x.cpu(), expected.unsqueeze(-1)))


def check_tensor(x: Tensor) -> None:
    q, scale = empty_q(*x.shape), Guarded(torch.Size([1]), torch.float32)
    torch.ops.vllm.fp8_quant_tensor(x, q.tensor, scale.tensor, MIN_AMAX)
    amax = x.cpu().float().abs().amax() if x.numel() else torch.zeros(())
    expected = fp8_scales(amax.clamp(min=MIN_AMAX)).view(1)
    assert_same_scales(scale.read(), expected)
    assert_same_codes(q.read(), round_to_fp8(x.cpu(), expected))


def check_static(x: Tensor, scale: float) -> None:
    q, given = empty_q(*x.shape), torch.tensor([scale], device=DEVICE)
    torch.ops.vllm.fp8_quant_static(x, given, q.tensor)
    assert_same_codes(q.read(), round_to_fp8(x.cpu(), given.cpu()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_and_tensors_equal_the_reference(shape, dtype):
    x = wide_range(shape, dtype)
    check_token(x)
    check_token(x, max_amax=1.5)
    check_tensor(x)
    check_static(x, 0.0123)


@pytest.mark.parametrize("num_columns", [16384, 16400, 32768])
def test_long_rows(num_columns):
    check_token(wide_range((5, num_columns), torch.bfloat16))
    check_token(wide_range((5, num_columns), torch.float32))


def test_rows_beyond_what_a_block_holds_are_refused():
    with pytest.raises(ValueError, match="x: given 32784 columns; accepted: up to 32768"):
        check_token(torch.ones(1, 32784, device=DEVICE))


SCALES = [1.0, 2.0**-10, 1e-8, 2.0**-112, 2.0**-120, 1e-40, 1e30, 2.0**100, 3e38]
SCALES += [0.0, -0.0, -0.7, float("inf"), float("nan"), 0.99999994, 1.9999999]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_given_scale(dtype, scale):
    ratios = torch.cat([torch.randn(20000) * 100, torch.exp2(torch.arange(-30.0, 30.0))])
    x = (ratios.double() * scale).to(dtype) if 0 < abs(scale) < 1e38 else ratios.to(dtype)
    x[::1001] = torch.tensor([float("inf"), float("nan"), 0.0, -0.0]).repeat(6)[: x[::1001].numel()]
    check_static(x.to(DEVICE).view(1, -1), scale)
    check_static(ratios.to(dtype).to(DEVICE).view(1, -1), scale)


# ---------------------------------------------------------------- fused


@dataclass(frozen=True)
class Norm:
    """Inputs of an RMSNorm, with a copy of the residual as it was."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    eps: float = 1e-6

    def reference(self) -> tuple[Tensor, Tensor]:
        """The residual after the addition, and its norm, by torch on the same device."""
        total = self.residual + self.x
        return total, torch_ops.rms_norm(total, self.weight, self.eps)

    def run(self, residual: Tensor | None, normed: Tensor | None = None) -> Callable[..., None]:
        op = torch.ops.vllm.rms_norm_fp8_quant_group
        return lambda *rest: op(self.x, residual, self.weight, self.eps, normed, *rest)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_groups_equal_torch(shape, dtype):
    num_tokens, num_columns = shape
    x = wide_range((num_tokens, 2 * num_columns), dtype)
    expected = torch_ops.silu_and_mul(x)
    for layout in (ScaleLayout.ROW_MAJOR, ScaleLayout.TMA_ALIGNED, ScaleLayout.PACKED_UE8M0):
        op = torch.ops.vllm.silu_and_mul_fp8_quant_group
        check_groups(lambda *rest, op=op: op(x, *rest), expected, layout=layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_at_the_edges(dtype):
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, 86.9, 87.1, -86.9, -87.1, -88.8, -104.0, 1e-30, float("inf"), -float("inf")]
    edges += [info.max, info.min, info.tiny, -info.tiny, float("nan")]
    gates = torch.tensor(edges).repeat_interleave(len(edges))
    ups = torch.tensor(edges).repeat(len(edges))
    # One pair per group: a NaN or infinity hides its whole group.
    x = torch.zeros(2, gates.numel(), 128)
    x[0, :, 3], x[1, :, 3] = gates, ups
    x = torch.cat([x[0].view(1, -1), x[1].view(1, -1)], -1).to(dtype).to(DEVICE)
    op = torch.ops.vllm.silu_and_mul_fp8_quant_group
    check_groups(lambda *rest: op(x, *rest), torch_ops.silu_and_mul(x))


@pytest.mark.parametrize(
    "shape",
    # Few rows, one to a block, and more than run at a time (on 132 multiprocessors).
    [*((37, k) for k in (128, 512, 4096, 8192, 16384, 32768)), (300, 12288), (140, 16384)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_exact_sums_equal_torch(dtype, shape):
    """Powers of two, whose squares add up exactly in any order, and a weight of any bits."""
    x = torch.exp2(torch.randint(-2, 2, shape, device=DEVICE).float()).to(dtype)
    residual = x * torch.randint(-1, 2, shape, device=DEVICE).to(dtype)
    norm = Norm(x, residual, torch.rand(shape[1], device=DEVICE) + 0.5)
    total, expected = norm.reference()
    for layout in (ScaleLayout.ROW_MAJOR, ScaleLayout.TMA_ALIGNED, ScaleLayout.PACKED_UE8M0):
        updated, normed = residual.clone(), torch.full_like(x, float("nan"))
        check_groups(norm.run(updated, normed), expected, layout=layout)
        assert torch.equal(updated, total) and torch.equal(normed, expected)
    alone = Norm(total, residual, norm.weight)
    check_groups(alone.run(None), expected)


def check_norm(norm: Norm, residual: Tensor) -> None:
    """Codes and scales against float64; `residual`, a copy of the norm's, is updated exactly."""
    dtype, shape = norm.x.dtype, norm.x.shape
    q, scales = empty_q(*shape), empty_scales(*shape, 128, ScaleLayout.COLUMN_MAJOR)
    normed = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    norm.run(residual, normed)(q.tensor, scales.tensor, 128, MIN_AMAX, False)
    again = per_token_group_fp8_quant(normed)
    assert_same_codes(q.read(), again[0].cpu())
    assert_same_scales(scales.read(), again[1].cpu())
    total, _ = norm.reference()
    assert torch.equal(residual, total)
    exact = total.double().cpu()
    exact = exact * (exact.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    exact = (exact * norm.weight.double().cpu()).to(dtype)
    expected_q, expected_scales = reference(exact, 128, ScaleLayout.ROW_MAJOR, False)
    unit = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(scales.read(), expected_scales, rtol=unit, atol=0)
    # A sum in another order moves a value to its neighbour, seldom, and then its code by one.
    codes, wanted = q.read().view(torch.uint8).int(), expected_q.view(torch.uint8).int()
    assert bool(((codes - wanted).abs() <= 1).all())
    assert int((codes != wanted).sum()) <= 2e-3 * codes.numel() + 130


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_right_up_to_the_order_of_sums(shape, dtype):
    weight = torch.rand(shape[1], device=DEVICE) + 1
    norm = Norm(wide_range(shape, dtype), wide_range(shape, dtype), weight)
    check_norm(norm, norm.residual.clone())


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("num_columns", [512, 100])
def test_fused_kernels_take_rows_apart_and_misaligned_data(num_columns, first):
    wide = wide_range((9, 4 * num_columns + first), torch.bfloat16)[:, first:]
    op, gated = torch.ops.vllm.silu_and_mul_fp8_quant_group, wide[:, : 2 * num_columns]
    check_groups(lambda *rest: op(gated, *rest), torch_ops.silu_and_mul(gated))
    x, residual = wide[:, :num_columns], wide[:, 2 * num_columns : 3 * num_columns]
    weight = torch.rand(num_columns + first, device=DEVICE)[first:]
    before = wide.clone()
    check_norm(Norm(x, residual.clone(), weight), residual)
    residual.copy_(before[:, 2 * num_columns : 3 * num_columns])
    assert torch.equal(wide, before), "written beside the residual"


# ---------------------------------------------------------------- graphs, streams, refusals


def test_graphs_replay_on_new_inputs():
    x, weight = wide_range((64, 1024), torch.bfloat16), torch.rand(1024, device=DEVICE)
    residual = wide_range((64, 1024), torch.bfloat16)

    def quantise() -> list[Tensor]:
        results = [
            *ops.scaled_fp8_quant(x),
            *ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
        ]
        results += ops.scaled_fp8_quant(x, weight[:1])
        results += per_token_group_fp8_quant(x, layout=ScaleLayout.PACKED_UE8M0)
        results += silu_and_mul_group_quant(x, layout=ScaleLayout.TMA_ALIGNED)
        results += rms_norm_group_quant(x, weight, 1e-6, residual.clone())
        return results

    quantise()  # loads the kernels, which a capture must not do
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantise()
    for _ in range(2):
        x.copy_(wide_range((64, 1024), torch.bfloat16))
        graph.replay()
        for given, expected in zip(captured, quantise()):
            if given.dtype == FP8:
                given, expected = given.view(torch.uint8), expected.view(torch.uint8)
            assert torch.equal(given, expected)


def test_work_goes_to_the_current_stream():
    x, stream = torch.ones(4096, 4096, device=DEVICE).bfloat16(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.mul_(2)
        _, scale = ops.scaled_fp8_quant(x)
    stream.synchronize()
    assert scale.item() == fp8_scales(torch.tensor(2.0)).item()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {**a, "x": a["x"].double()}, "x: given float64; accepted: float32, bfloat16"),
        (lambda a: {**a, "x": a["x"][:2]}, r"x: given shape \[2, 256\]; .* 3 \(rows of q\)"),
        (lambda a: {**a, "x": a["x"].t().contiguous().t()}, "x: given a last dimension with str"),
        (lambda a: {**a, "q": a["q"].float()}, "q: given float32; accepted: float8_e4m3fn"),
        (lambda a: {**a, "q": torch.cat([a["q"]] * 2, -1)[:, :256]}, "q: given a strided tensor"),
        (lambda a: {**a, "scales": a["scales"].half()}, "scales: given float16; accepted: float32"),
        (lambda a: {**a, "scales": a["scales"][:, :1]}, r"scales: .* must be 2 \(groups of col"),
        (lambda a: {**a, "scales": a["scales"][:1]}, r"scales: .*accepted: 3 rows .*or 4 with"),
        (lambda a: {**a, "scales": a["scales"][:1].expand(3, 2)}, "scales: given strides 0, 1"),
        (lambda a: {**a, "scales": a["scales"].int()}, "is_ue8m0: given False for int32 scales"),
        (lambda a: {**a, "group_size": 96}, "group_size: given 96; accepted: a power of two"),
        (lambda a: {**a, "group_size": 1024}, "group_size: given 1024; accepted: .* to 512"),
        (lambda a: {**a, "min_amax": 0.0}, "min_amax: given 0; accepted: 1e-30 or more"),
    ],
)
def test_refusals_name_the_argument(change, message):
    arguments = {
        "x": torch.randn(3, 256, device=DEVICE),
        "q": torch.empty(3, 256, dtype=FP8, device=DEVICE),
        "scales": torch.empty(3, 2, device=DEVICE),
        "group_size": 128,
        "min_amax": 1e-10,
        "is_ue8m0": False,
    }
    with pytest.raises(ValueError, match=message):
        torch.ops.vllm.fp8_quant_group(*change(arguments).values())


def test_a_tensor_on_the_cpu_among_others_on_the_gpu_is_refused():
    x, q = torch.randn(3, 256, device=DEVICE), torch.empty(3, 256, dtype=FP8, device=DEVICE)
    with pytest.raises((ValueError, NotImplementedError)):
        torch.ops.vllm.fp8_quant_group(x, q, torch.empty(3, 2), 128, 1e-10, False)


def test_ops_describe_themselves_to_torch_compile():
    x, weight = wide_range((5, 512), torch.bfloat16), torch.rand(512, device=DEVICE)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        norm = rms_norm_group_quant(x, weight, 1e-6, residual, layout=ScaleLayout.TMA_ALIGNED)
        return *norm, *silu_and_mul_group_quant(x), *ops.scaled_fp8_quant(x)

    residual = wide_range((5, 512), torch.bfloat16)
    first, second = residual.clone(), residual.clone()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for given, expected in zip((*compiled(x, first), first), (*block(x, second), second)):
        if given.dtype == FP8:
            given, expected = given.view(torch.uint8), expected.view(torch.uint8)
        assert torch.equal(given, expected)
