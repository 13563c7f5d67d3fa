"""Weight-only kernels: FP8, MXFP8, NVFP4, MXFP4, int4 and int8 weights widened in registers,
activations untouched; and int4 weights by activations in FP8 (`marlin-w4a8`), for checkpoints that
were made for it, where tensor cores take FP8 from registers.

Few tokens are multiplied by our own kernel, which widens the packed weight in registers, once for
128 tokens; for many it is widened into memory, in parts, and torch's GEMM multiplies. By FP8
activations it multiplies any number: scales of groups leave nothing that torch's FP8 GEMM takes.
MXFP4 is packed as NVFP4, and int8 as twice as many columns of int4, which cost torch's GEMM twice
the work.
The kernel is tested on Hopper; its code is also run thread by thread on a CPU
(tests/native/test_weight_only_gemm.py). Products by FP8 activations have run on 9.0 alone, where no
backend asks for them.
"""

from functools import partial
from typing import TYPE_CHECKING

from vllm.formats.act_scheme import ActScheme
from vllm.kernels.backends import shared
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, MoEProblem, Problem, WeightProblem
from vllm.kernels.select.reason import Reason, Why
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import NATIVE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, device

    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors

# Columns that share a float32 scale: at least so many, and a power of two.
_LEAST_GROUP = 32
# Most tokens for our kernel: more are multiplied with a weight that is widened into memory. In FP8
# 96 tokens take our kernel longer than 512 take that (an H100, tuned/sm_90_132_3352.json), as 128
# do with int4. Scales of NVFP4 are multiplied into the weight: 128 tokens take 0.6 of what widening
# takes, 256 as long (an H200, results/h200/weight_only_sweep.txt).
_MOST_TOKENS, _MOST_TOKENS_NVFP4 = 64, 128
# Rows of an expert that are multiplied together: the token tiles of the kernel.
_BLOCK_ROWS = (8, 16, 32, 64)
# How full blocks should be on average. An expert with a row more than a block holds has another
# block, which widens all of its weight again: with 8 tokens each on average, two experts in five
# have more, and 16 rows cost an eighth more instructions than 8 do.
_FILL = 0.75
# Of a weight that is widened into memory at a time.
WIDE_BYTES = 128 << 20


def most_tokens(element: str) -> int:
    """For which our kernel multiplies a weight of such elements."""
    return _MOST_TOKENS_NVFP4 if element == "nvfp4" else _MOST_TOKENS


def _columns_per_scale(problem: Problem) -> list[Reason]:
    assert isinstance(problem, WeightProblem)
    columns = problem.weight.block[1]
    if problem.weight.scale == "block":  # a cut leaves steps that every shard can begin with
        columns = shared.cut_columns(problem).refined(columns)
    if problem.weight.element == "int8":  # as two int4 numbers, in groups
        k = problem.k if isinstance(problem, LinearProblem) else problem.hidden
        sizes = [k] if isinstance(problem, LinearProblem) else [k, problem.intermediate]
        step = max(columns, _LEAST_GROUP)
        odd = next((size for size in sizes if size % step), 0)
        text = f"{odd} columns of int8, and it takes multiples of {step}"
        return shared.shape_reasons((odd > 0, text))
    if columns == 0 or (columns >= _LEAST_GROUP and columns & (columns - 1) == 0):
        return []
    text = f"scales of {columns} columns, and it takes a power of two from {_LEAST_GROUP} on"
    return [Reason(Why.SHAPE, text)]


def _expert_reasons(problem: Problem) -> list[Reason]:
    assert isinstance(problem, MoEProblem)
    is_refused = problem.activation != "silu" and not problem.bias
    text = f"computes {problem.activation} of experts with biases alone"
    return _columns_per_scale(problem) + shared.shape_reasons((is_refused, text))


_Spec = partial(
    KernelSpec,
    backend="marlin",
    devices=shared.FROM_SM80,
    formats=shared.WEIGHTS - shared.FLOATS,
    dtypes=shared.HALF,
    libs=((NATIVE, ""),),
    native=("marlin_gemm",),
    native_archs=shared.NATIVE_FROM_SM80,
    k_align=16,
    weight_layouts=("marlin",),
    check=_columns_per_scale,
)

_W4A8 = partial(
    _Spec,
    backend="marlin-w4a8",
    devices=frozenset({"sm_89", "sm_12x"}),
    formats=frozenset({"int4-group"}),
    act=frozenset({ActScheme.DYNAMIC_TOKEN}),
    native=("marlin_w4a8_gemm",),
    weight_layouts=("marlin-w4a8",),
    native_archs=frozenset({"89", "120", "120a", "120f", "121a"}),
)

SPECS = (
    _Spec(family="linear"),
    # Rows are sorted by expert, and put together again, by Triton kernels.
    _Spec(
        family="moe",
        libs=((NATIVE, ""), ("triton", "3.2")),
        check=_expert_reasons,
        **shared.EXPERTS,
    ),
    _W4A8(family="linear"),
    _W4A8(family="moe", libs=((NATIVE, ""), ("triton", "3.2"))),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Packs the weight as lanes read it."""
    from vllm.ops.weight_only_layout import pack_weight
    from vllm.ops.weight_only_ops import multiply, multiply_wide

    by_fp8 = winner.act is ActScheme.DYNAMIC_TOKEN
    weight, bias = pack_weight(tensors, by_fp8), tensors.bias
    most = most_tokens(weight.format)

    def apply(x: "Tensor") -> "Tensor":
        if x.shape[0] > most and not by_fp8:
            return multiply_wide(x, weight, bias, WIDE_BYTES)
        return multiply(x, weight, bias)

    return apply


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Packs every expert; each call sorts the pairs of token and expert, and multiplies blocks of
    their rows twice. Nothing waits for the device, so a CUDA graph can capture it."""
    from vllm.kernels import cuda_ops
    from vllm.kernels.triton import moe_rows
    from vllm.kernels.triton.expert_bias import activate_biased
    from vllm.ops import torch_ops
    from vllm.ops.weight_only_layout import pack_experts
    from vllm.ops.weight_only_ops import multiply_experts

    num_experts, by_fp8 = tensors.num_experts, winner.act is ActScheme.DYNAMIC_TOKEN
    stacks = zip(*(tensors.expert(index) for index in range(num_experts)))
    gate_up, down = (pack_experts(stack, num_experts, by_fp8) for stack in stacks)
    ops = cuda_ops if tensors.down.is_cuda else torch_ops
    gate_up_bias, down_bias = tensors.gate_up_bias, tensors.down_bias

    def apply(
        x: "Tensor", weights: "Tensor", ids: "Tensor", block_rows: int | None = None
    ) -> "Tensor":
        if x.shape[0] == 0:
            return x.clone()
        num_pairs, top_k = ids.numel(), ids.shape[1]
        if block_rows is None:
            share = num_pairs / num_experts
            fitting = (size for size in _BLOCK_ROWS if share <= _FILL * size)
            block_rows = next(fitting, _BLOCK_ROWS[-1])
        ids = ids.contiguous()
        rows = moe_rows.sort(ids, num_experts, block_m=block_rows)
        inner = multiply_experts(x, gate_up, rows.blocks, block_rows, num_pairs, rows.order, top_k)
        if gate_up_bias is None:
            inner = ops.silu_and_mul(inner)
        else:
            inner = activate_biased(inner, gate_up_bias, ids, rows.positions, problem.swiglu_limit)
        out = multiply_experts(
            inner, down, rows.blocks, block_rows, num_pairs, bias=down_bias, has_blocks_before=True
        )
        return moe_rows.combine(out, weights, rows.positions, num_experts)

    if tensors.down.is_cuda:
        _warm_up(apply, problem, tensors.down.device)
    return apply


def _warm_up(
    apply: "Callable[[Tensor, Tensor, Tensor, int], Tensor]",
    problem: MoEProblem,
    device: "device",
) -> None:
    """Compiles the Triton kernels of every size of blocks, once for all layers: else the first
    request with another number of tokens would wait for it."""
    import torch

    from vllm.utils.torch_utils import dtype_of

    x = torch.zeros(1, problem.hidden, dtype=dtype_of(problem.dtype), device=device)
    ids = torch.zeros(1, problem.top_k, dtype=torch.int64, device=device)
    for size in _BLOCK_ROWS:
        apply(x, torch.ones_like(ids, dtype=torch.float32), ids, size)
