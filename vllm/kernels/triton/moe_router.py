"""The router of a mixture of experts in Triton: the choice by logits, and the product before it.

Nothing waits for the device and every size depends on the number of tokens alone, so that all of
it can be captured in a CUDA graph.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.tensors import LinearKernel
from vllm.kernels.triton.moe_router_kernels import route_kernel, split_product_kernel
from vllm.kernels.triton.moe_rows import launch_dependent
from vllm.model_executor.layers.fused_moe.router import Routing

# Most tokens whose product is a kernel of our own, which reads the gate while the norm before it
# still runs. Estimated: each block of tokens reads the whole gate again.
MOST_SPLIT = 128
ROWS, BLOCK_E, BLOCK_K = 16, 16, 512
_ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def choose_experts(
    x: Tensor, gate: LinearKernel, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`route` of gate(x), for x [T, hidden]."""
    weight = getattr(gate, "weight", None)
    if weight is None or len(x) > MOST_SPLIT or x.dtype not in _ROUNDED or len(weight) < BLOCK_E:
        return route(gate(x), bias=bias, **routing.arguments())
    assert weight.is_contiguous() and weight.dtype == x.dtype and x.stride(1) == 1
    (num_tokens, hidden), num_experts = x.shape, len(weight)
    num_splits = triton.cdiv(hidden, BLOCK_K)
    parts = torch.empty(num_tokens, num_splits, num_experts, dtype=torch.float32, device=x.device)
    if num_tokens:
        blocks = triton.cdiv(num_experts, BLOCK_E), triton.cdiv(num_tokens, ROWS)
        split_product_kernel[(num_splits, *blocks)](
            x, weight, parts, num_tokens, x.stride(0), HIDDEN=hidden, BLOCK_K=BLOCK_K,
            NUM_EXPERTS=num_experts, BLOCK_E=BLOCK_E, ROWS=ROWS, **launch_dependent(x.device),
        )  # fmt: skip
    return _route(parts, _ROUNDED[x.dtype], bias=bias, **routing.arguments())


def route(logits: Tensor, top_k: int, renormalise: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int64 [T, top_k] as `fused_moe.router.route` defines them and their
    options; of equal experts the first is chosen."""
    return _route(logits.unsqueeze(1), None, top_k, renormalise, **options)


def _route(
    logits: Tensor,
    rounded: Any,
    top_k: int,
    renormalise: bool,
    *,
    is_sigmoid: bool = False,
    bias: Tensor | None = None,
    num_groups: int = 1,
    kept_groups: int = 1,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """By logits [T, splits, E], whose sum is rounded."""
    num_tokens, num_splits, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    if num_tokens == 0:
        return weights, ids
    padded = triton.next_power_of_2(num_experts)
    assert logits.stride(2) == 1 and (num_groups == 1 or padded == num_experts)
    route_kernel[(num_tokens,)](
        logits, bias, weights, ids, logits.stride(0), factor, NUM_EXPERTS=num_experts,
        E_PAD=padded, TOP_K=top_k, K_PAD=triton.next_power_of_2(top_k),
        SPLITS=num_splits, ROUNDED=rounded, IS_SIGMOID=is_sigmoid, RENORMALISES=renormalise,
        HAS_BIAS=bias is not None, NUM_GROUPS=num_groups, KEPT_GROUPS=kept_groups, num_warps=1,
        **launch_dependent(logits.device),
    )  # fmt: skip
    return weights, ids
