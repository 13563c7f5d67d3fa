"""DeepGEMM: FP8 block GEMM, dense and grouped, compiled at run time by the library itself."""

from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from vllm.formats.scales import Scales
from vllm.kernels.backends import shared
from vllm.kernels.jit.compiled_call import CompiledCall
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, MoEProblem, Problem
from vllm.kernels.select.spec import STORED, UP_FIRST, KernelSpec
from vllm.machine import Device
from vllm.platforms.installed import installed_device
from vllm.platforms.libraries import LibraryTrial
from vllm.utils.dataclasses import dataclass

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors
    from vllm.kernels.triton import moe_rows

    Weight = tuple[Tensor, Tensor]

_Spec = partial(
    KernelSpec,
    backend="deep_gemm",
    # Every version has kernels for 9.0 and 10.x; those for 12.x only where the package says so.
    devices=frozenset({"sm_90", "sm_10x", "sm_12x"}),
    carries=(("sm_12x", "deep_gemm", "sm120"),),
    libs=(("deep_gemm", ""),),
    compiles="nvcc",
    dtypes=frozenset({"bf16"}),
    k_align=128,
    **shared.FP8_BLOCKS
    | {"scales": (("sm_9x", Scales.FLOAT32), ("sm_10x", Scales.UE8M0), ("sm_12x", Scales.UE8M0))},
)

LINEAR = _Spec(family="linear", n_align=64)
SPECS = (
    LINEAR,
    # Rows are sorted and quantised by Triton kernels, and so is what is between the products: it
    # takes gate and up in either order.
    _Spec(
        family="moe",
        libs=(("deep_gemm", ""), ("triton", "3.2")),
        layouts=frozenset({"standard", "batched"}),
        weight_layouts=(STORED, UP_FIRST),
    ),
)

_BLOCK = 128
# Rows at which the library's choice of a tiling may change: these and multiples of the last. So it
# was for every M up to 520 of 6144x4096, and every 8th after, of 0.1.3 on an H100.
_ROW_STEPS = (16, 32, 64)
# Most tokens for which each expert gets a block of its own, with room for all of them.
_MASKED_TOKENS = 256


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Lays the weight out once; each call quantises x [M, K] and runs one GEMM."""
    import torch

    from vllm.kernels.activations import InputQuant, QuantizedInput, QuantizingKernel
    from vllm.ops.block_fit import fitted_kernel
    from vllm.ops.fp8_quant import ScaleLayout
    from vllm.utils.deep_gemm import fp8_gemm_nt

    is_packed = winner.scales == Scales.UE8M0
    layout = ScaleLayout.PACKED_UE8M0 if is_packed else ScaleLayout.TMA_ALIGNED
    quant = InputQuant(layout, winner.scales == Scales.FLOAT32_CEIL_UE8M0)

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, bias = prepare(tensors, winner), tensors.bias

        def multiply(x: QuantizedInput) -> "Tensor":
            out = x.q.new_empty(x.shape[0], weight[0].shape[0], dtype=torch.bfloat16)
            if x.shape[0]:
                fp8_gemm_nt((x.q, x.scales), weight, out)
            return out if bias is None else out.add_(bias)

        return QuantizingKernel(quant, multiply)

    return fitted_kernel(tensors, winner.fit, make)


def prepare(
    tensors: "LinearTensors", winner: Candidate, arch: Device | None = None
) -> "tuple[Tensor, Tensor]":
    """The weight and its scales as `fp8_gemm_nt` reads them; `tensors` are never written to.

    arch: the chip to lay out for, None for the current one.
    """
    import torch

    from vllm.ops.fp8 import deepgemm_post_process_fp8_weight_block, requantised_ue8m0

    assert tensors.scales is not None
    if tensors.scales.dtype == torch.int32:  # exponents, laid out before
        return tensors.weight, tensors.scales
    if winner.rescales:
        tensors = requantised_ue8m0(tensors)
    assert tensors.scales is not None
    # Already re-quantised, in tensors of their own.
    return deepgemm_post_process_fp8_weight_block(
        tensors.weight, tensors.scales, (_BLOCK, _BLOCK), use_e8m0=False, arch=arch
    )


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Lays the weights out once."""
    if winner.fit is not None:
        from vllm.ops.block_fit import padded_experts

        tensors = padded_experts(tensors)
    gate_up, down = (prepare(stack, winner) for stack in tensors.all_experts())
    return Experts(gate_up, down, winner.scales, tensors.is_up_first)


@dataclass(frozen=True)
class Experts:
    """Two grouped GEMMs over the rows of pairs of token and expert, sorted by expert: padded to
    whole tiles, or for few tokens in a block for each expert, of which the library reads the rows
    that are there. scales: the form that it takes, of weights and inputs. is_up_first: as of
    `MoETensors`.
    """

    gate_up: "Weight"
    down: "Weight"
    scales: str
    is_up_first: bool = False

    def __call__(self, x: "Tensor", weights: "Tensor", ids: "Tensor") -> "Tensor":
        return self.unadded(x, weights, ids).total() if len(x) else x.clone()

    def unadded(self, x: "Tensor", weights: "Tensor", ids: "Tensor") -> "moe_rows.ExpertRows":
        from vllm.kernels.triton import moe_rows
        from vllm.utils import deep_gemm as library
        from vllm.utils.math_utils import round_up

        num_experts = len(self.gate_up[0])
        tile = library.get_mk_alignment_for_contiguous_layout()[0]
        if x.shape[0] <= _MASKED_TOKENS:
            # Whole tiles: the library writes whole ones, over what comes after an expert's rows.
            size = round_up(x.shape[0], tile)
            rows = moe_rows.sort(ids, num_experts, rows_per_expert=size)
            layout = moe_rows.Rows(num_experts * size, size, self.scales)
            expected = -(-ids.numel() // num_experts)
            multiply = partial(_masked, counts=rows.ends[1:], expected_m=expected)
        else:
            rows = moe_rows.sort(ids, num_experts, block_m=tile, is_aligned=True)
            layout = moe_rows.Rows(rows.num_blocks * tile, scales=self.scales)
            multiply = partial(_contiguous, expert_of_row=rows.expert_of_row)
        between = multiply(*moe_rows.spread(x, rows.positions, layout), self.gate_up)
        out = multiply(
            *moe_rows.activate(between, rows.positions, layout, self.is_up_first), self.down
        )
        return moe_rows.ExpertRows(out, weights, rows.positions, num_experts)

    def from_quantized(
        self, q: "Tensor", scales: "Tensor", counts: "Tensor", expected_m: int
    ) -> "Tensor":
        """See `BatchedMoEKernel`."""
        from vllm.kernels.triton import moe_rows
        from vllm.utils import deep_gemm as library

        num_experts, size, hidden = q.shape
        assert size % library.get_mk_alignment_for_contiguous_layout()[0] == 0
        multiply = partial(_masked, counts=counts, expected_m=expected_m)
        layout = moe_rows.Rows(num_experts * size, size, self.scales)
        between = multiply(q, scales, self.gate_up)
        taken = moe_rows.taken_rows(counts, size)
        inner = moe_rows.activate(between, taken, layout, self.is_up_first)
        return multiply(*inner, self.down).view(num_experts, size, hidden)


def _contiguous(
    q: "Tensor", scales: "Tensor", weight: "Weight", expert_of_row: "Tensor"
) -> "Tensor":
    """Rows [M, K], of which whole tiles are one expert's -> [M, N]."""
    import torch

    from vllm.utils import deep_gemm as library

    out = q.new_empty(len(q), weight[0].shape[1], dtype=torch.bfloat16)
    library.m_grouped_fp8_gemm_nt_contiguous((q, scales), weight, out, expert_of_row)
    return out


def _masked(
    q: "Tensor", scales: "Tensor", weight: "Weight", counts: "Tensor", expected_m: int
) -> "Tensor":
    """Rows of blocks [E * size, K] or [E, size, K], scales [E, size, groups] -> [E * size, N], of
    the first counts[e] rows of each expert; the others hold anything."""
    import torch

    from vllm.utils import deep_gemm as library

    num_experts, size, _ = scales.shape
    out = q.new_empty(num_experts, size, weight[0].shape[1], dtype=torch.bfloat16)
    a = (q.view(num_experts, size, -1), scales)
    library.fp8_m_grouped_gemm_nt_masked(a, weight, out, counts, expected_m)
    return out.view(num_experts * size, -1)


# ---------------------------------------------------------------- what it compiles


def compiled_calls(
    problem: Problem, winner: Candidate, m_range: tuple[int, int]
) -> list[CompiledCall]:
    """The GEMMs of `linear` or `moe` for so many tokens, over memory that holds nothing."""
    if isinstance(problem, LinearProblem):
        n, k = winner.fit.sizes if winner.fit is not None else (problem.n, problem.k)
        name = f"fp8_gemm_nt {n}x{k} {winner.scales}"
        return [CompiledCall(name, _row_sizes(*m_range), partial(_dense_call, n, k))]
    assert isinstance(problem, MoEProblem)
    inner, hidden = winner.fit.sizes if winner.fit is not None else (
        problem.intermediate, problem.hidden
    )  # fmt: skip
    calls = []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        calls += _expert_calls(problem, n, k, winner.scales, m_range)
    return calls


def _row_sizes(low: int, high: int) -> tuple[int, ...]:
    *first, step = _ROW_STEPS
    sizes = [*first, *range(step, high + step, step)]
    return tuple(
        size for before, size in zip((0, *sizes), sizes) if size >= low and before < high
    )  # fmt: skip


def _dense_call(n: int, k: int, num_rows: int) -> None:
    """Nothing of it stays: between the plan and the first call weights take the memory."""
    from vllm.utils.deep_gemm import fp8_gemm_nt

    a, b = (_fp8(num_rows, k), _ones(num_rows, k, 1)), (_fp8(n, k), _ones(n, k, _BLOCK))
    fp8_gemm_nt(a, b, _bf16(num_rows, n))


def _expert_calls(
    problem: MoEProblem, n: int, k: int, scales: str, m_range: tuple[int, int]
) -> list[CompiledCall]:
    """For few tokens by the mean number of rows of an expert, for each number of rows that it has
    room for; for more by the number of rows, with those that fill up tiles."""
    from vllm.kernels.triton.moe_rows import max_blocks
    from vllm.utils import deep_gemm as library
    from vllm.utils.math_utils import cdiv, round_up

    num_experts = problem.num_experts // problem.cut_experts
    tile = library.get_mk_alignment_for_contiguous_layout()[0]

    def weight() -> "Weight":
        return _fp8(num_experts, n, k), _ones(n, k, _BLOCK, num_experts)

    def masked(size: int, expected: int) -> None:
        a = _fp8(num_experts, size, k), _ones(size, k, 1, num_experts)
        out, counts = _bf16(num_experts, size, n), _empty("int32", num_experts).zero_()
        library.fp8_m_grouped_gemm_nt_masked(a, weight(), out, counts, expected)

    def contiguous(num_rows: int) -> None:
        a = _fp8(num_rows, k), _ones(num_rows, k, 1)
        out, experts = _bf16(num_rows, n), _empty("int32", num_rows).zero_()
        library.m_grouped_fp8_gemm_nt_contiguous(a, weight(), out, experts)

    calls = []
    low, high = m_range[0], min(m_range[1], _MASKED_TOKENS)
    while low <= high:
        size = round_up(low, tile)
        most = min(size, high)
        means = range(cdiv(low * problem.top_k, num_experts),
                      cdiv(most * problem.top_k, num_experts) + 1)  # fmt: skip
        name = f"m_grouped_fp8_gemm_nt_masked {num_experts}x{n}x{k} {scales} of {size}"
        calls.append(CompiledCall(name, tuple(means), partial(masked, size)))
        low = most + 1
    if m_range[1] > _MASKED_TOKENS:
        tokens = max(m_range[0], _MASKED_TOKENS + 1), m_range[1]
        fewest, most = (max_blocks(t * problem.top_k, num_experts, tile) for t in tokens)
        sizes = tuple(range(fewest * tile, (most + 1) * tile, tile))
        name = f"m_grouped_fp8_gemm_nt_contiguous {num_experts}x{n}x{k} {scales}"
        calls.append(CompiledCall(name, sizes, contiguous))
    return calls


def _empty(dtype: str, *shape: int) -> "Tensor":
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")


_fp8, _bf16 = partial(_empty, "float8_e4m3fn"), partial(_empty, "bfloat16")


def _ones(rows: int, k: int, block_rows: int, num_groups: int | None = None) -> "Tensor":
    """Scales of an [rows, k] operand as the chip takes them, which are powers of two too."""
    import torch

    from vllm.utils.deep_gemm import transform_sf_into_required_layout

    shape = [-(-rows // block_rows), -(-k // _BLOCK)]
    scales = torch.ones([num_groups, *shape] if num_groups else shape, device="cuda")
    return transform_sf_into_required_layout(
        scales, rows, k, (block_rows, _BLOCK), num_groups=num_groups
    )


# ---------------------------------------------------------------- trial


def _try(deep_gemm: ModuleType, archs: tuple[str, ...]) -> None:
    """Lays scales out on the GPU and compares with our own layout; raises what goes wrong.

    Builds against another torch import and then fail right here ("dim == 2 or dim == 3"), and so
    does a machine without nvcc, which the library compiles its kernels with.
    """
    import torch

    from vllm.utils.deep_gemm import transform_sf_into_required_layout

    device = installed_device()
    has_kernels = device.arch == "sm_90" or device.family == "sm_10x"
    if not has_kernels and not (device.family == "sm_12x" and "sm120" in archs):
        return
    num_rows, num_groups = 6, 8
    exponents = 100 + torch.arange(num_rows * num_groups, dtype=torch.int32, device="cuda")
    scales = (exponents << 23).view(torch.float32).view(num_rows, num_groups)  # powers of two
    sizes = (num_rows, num_groups * 128, (1, 128, 128))
    theirs = deep_gemm.transform_sf_into_required_layout(scales, *sizes, None, True)
    ours = transform_sf_into_required_layout(scales, *sizes, None, True, arch=device)
    if theirs.stride() != ours.stride() or not torch.equal(theirs, ours):
        raise RuntimeError(f"its layout of scales on {device} is not the documented one")


TRIALS = {"deep_gemm": LibraryTrial(_try)}
