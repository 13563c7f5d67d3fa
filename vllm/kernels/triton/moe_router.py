"""The router of a mixture of experts in Triton: the choice by logits, and the product before it.

Nothing waits for the device and every size depends on the number of tokens alone, so that all of
it can be captured in a CUDA graph.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from vllm.kernels.tensors import LinearKernel
from vllm.kernels.triton.moe_router_kernels import gate_kernel, route_kernel
from vllm.kernels.triton.moe_rows import launch_dependent
from vllm.model_executor.layers.fused_moe.router import Routing

# Most tokens of which one launch computes logits and choice. Estimated, not measured: each block of
# tokens reads the whole gate again, and up to here all programs of 128 experts run at once.
MOST_GATED = 128
ROWS, BLOCK_E, BLOCK_K = 16, 16, 512
_HALF = (torch.bfloat16, torch.float16)


def choose_experts(
    x: Tensor, gate: LinearKernel, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`route` of gate(x), for x [T, hidden]: in one launch for few tokens, and a gate that keeps
    its weight [num_experts, hidden] as it was stored."""
    weight = getattr(gate, "weight", None)
    if weight is None or len(x) > MOST_GATED or x.dtype not in _HALF or len(weight) < BLOCK_E:
        return route(gate(x), bias=bias, **routing.arguments())
    assert weight.is_contiguous() and weight.dtype == x.dtype and x.stride(1) == 1
    (num_tokens, hidden), num_experts = x.shape, len(weight)
    results, constants = _results(x, num_experts, bias=bias, **routing.arguments())
    if num_tokens == 0:
        return results
    num_splits, num_blocks = triton.cdiv(hidden, BLOCK_K), triton.cdiv(num_tokens, ROWS)
    shape = (num_splits, num_tokens, constants["E_PAD"])
    partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    num_warps = 8 if constants["E_PAD"] >= 512 else 4  # four would spill registers
    gate_kernel[(num_splits, triton.cdiv(num_experts, BLOCK_E), num_blocks)](
        x, weight, constants.pop("bias"), partial, arrival_counters(x.device), *results,
        num_tokens, x.stride(0), constants.pop("factor"), HIDDEN=hidden, BLOCK_K=BLOCK_K,
        BLOCK_E=BLOCK_E, ROWS=ROWS, num_warps=num_warps, **constants,
    )  # fmt: skip
    return results


def route(logits: Tensor, top_k: int, renormalise: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int64 [T, top_k] as `fused_moe.router.route` defines them and their
    options, in one launch; of equal experts the first is chosen."""
    num_tokens, num_experts = logits.shape
    results, constants = _results(logits, num_experts, top_k, renormalise, **options)
    if num_tokens == 0:
        return results
    assert logits.stride(1) == 1
    route_kernel[(num_tokens,)](
        logits, constants.pop("bias"), *results, num_tokens, logits.stride(0),
        constants.pop("factor"), ROWS=1, num_warps=1, **constants,
    )  # fmt: skip
    return results


@cache
def arrival_counters(device: torch.device) -> Tensor:
    """Zeros that the kernel counts in and leaves zero.

    One tensor for all calls and captured graphs, so calls on a device must not run at the same
    time on several streams.
    """
    return torch.zeros(triton.cdiv(MOST_GATED, ROWS), dtype=torch.int32, device=device)


def _results(
    x: Tensor,
    num_experts: int,
    top_k: int,
    renormalise: bool,
    *,
    is_sigmoid: bool = False,
    bias: Tensor | None = None,
    num_groups: int = 1,
    kept_groups: int = 1,
    factor: float = 1.0,
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Memory for weights and ids, and what the kernels are told of the choice."""
    weights = torch.empty(len(x), top_k, dtype=torch.float32, device=x.device)
    ids = torch.empty(len(x), top_k, dtype=torch.int64, device=x.device)
    padded = triton.next_power_of_2(num_experts)
    assert num_groups == 1 or padded == num_experts
    return (weights, ids), {
        "bias": bias,
        "factor": factor,
        "NUM_EXPERTS": num_experts,
        "E_PAD": padded,
        "TOP_K": top_k,
        "K_PAD": triton.next_power_of_2(top_k),
        "IS_SIGMOID": is_sigmoid,
        "RENORMALISES": renormalise,
        "HAS_BIAS": bias is not None,
        "NUM_GROUPS": num_groups,
        "KEPT_GROUPS": kept_groups,
        **launch_dependent(x.device),
    }
