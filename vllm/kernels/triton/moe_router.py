"""The router of a mixture of experts in Triton: the choice by logits, and the product before it.

Nothing waits for the device and every size depends on the number of tokens alone, so that all of
it can be captured in a CUDA graph.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from vllm.architectures.router import Router
from vllm.kernels.interface import LinearKernel
from vllm.kernels.triton.moe_router_kernels import route_kernel, split_product_kernel
from vllm.kernels.triton.moe_rows import launch_dependent
from vllm.utils.math_utils import cdiv, next_power_of_2, round_up

# Most tokens whose product is a kernel of our own, which reads the gate while the norm before it
# still runs. Estimated: each block of tokens reads the whole gate again.
MOST_SPLIT = 128
ROWS, BLOCK_E, BLOCK_K = 16, 16, 512
# Columns that rows of logits are filled up to: who reads those of no expert finds 16 to divide
# their stride whatever the number of tokens, or Triton would compile it twice.
_ALIGNED = 16
_ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def choose_experts(
    x: Tensor, gate: LinearKernel, router: Router, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`route` of gate(x), for x [T, hidden]; and what gate(x) has beyond the experts' columns."""
    dense = getattr(gate, "dense", None)
    weight = None if dense is None else dense.weight
    if weight is None or len(x) > MOST_SPLIT or x.dtype not in _ROUNDED or len(weight) < BLOCK_E:
        y = gate(x) if dense is None else _product(x, dense)
        logits, others = y.tensor_split([router.num_experts], 1)
        return *_route(logits.unsqueeze(1), router, bias), others
    assert weight.is_contiguous() and weight.dtype == x.dtype and x.stride(1) == 1
    (num_tokens, hidden), num_rows = x.shape, len(weight)
    num_splits, blocks = cdiv(hidden, BLOCK_K), cdiv(num_rows, BLOCK_E)
    # As wide as whole blocks: sums are read several at a time.
    shape = num_tokens, num_splits, blocks * BLOCK_E
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    others = _rows(x, num_rows - router.num_experts)
    if num_tokens:
        split_product_kernel[(num_splits, blocks, cdiv(num_tokens, ROWS))](
            x, weight, parts, num_tokens, x.stride(0), HIDDEN=hidden, BLOCK_K=BLOCK_K,
            NUM_ROWS=num_rows, BLOCK_E=BLOCK_E, ROWS=ROWS, **launch_dependent(x.device),
        )  # fmt: skip
    return *_route(parts, router, bias, others), others


def _product(x: Tensor, dense: Any) -> Tensor:
    """x @ weight.T of a DenseKernel."""
    weight = dense.weight if dense.padded is None else dense.padded
    return torch.mm(x, weight.T, out=_rows(x, len(weight)))[:, : len(dense.weight)]


def _rows(x: Tensor, width: int) -> Tensor:
    """Empty [T, width], rows whole _ALIGNED numbers apart."""
    return x.new_empty(len(x), round_up(width, _ALIGNED))[:, :width]


def route(
    logits: Tensor, top_k: int, renormalise: bool, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int64 [T, top_k] as `route` of vllm.ops.moe_router defines them and
    their options; of equal experts the first is chosen."""
    router = Router(logits.shape[1], top_k, renormalise, **options)
    return _route(logits.unsqueeze(1), router, bias)


def _route(
    logits: Tensor, router: Router, bias: Tensor | None, others: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """By logits [T, splits, N], N at least the experts. others: receives the sums beyond those of
    experts, and all are rounded to its type; None for logits that are whole."""
    num_tokens, num_splits, _ = logits.shape
    num_experts, top_k = router.num_experts, router.top_k
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    if num_tokens == 0:
        return weights, ids
    padded = next_power_of_2(num_experts)
    assert logits.stride(2) == 1 and (router.num_groups == 1 or padded == num_experts)
    route_kernel[(num_tokens,)](
        logits, bias, weights, ids, others, logits.stride(0), router.routed_scale,
        NUM_EXPERTS=num_experts, E_PAD=padded, NUM_OTHERS=0 if others is None else others.shape[1],
        OTHERS_STRIDE=0 if others is None else others.stride(0), TOP_K=top_k,
        K_PAD=next_power_of_2(top_k), SPLITS=num_splits, SPLIT_STRIDE=logits.stride(1),
        ROUNDED=None if others is None else _ROUNDED[others.dtype],
        IS_SIGMOID=router.scoring == "sigmoid", RENORMALISES=router.renormalise,
        HAS_BIAS=bias is not None, NUM_GROUPS=router.num_groups, KEPT_GROUPS=router.topk_groups,
        num_warps=1, **launch_dependent(logits.device),
    )  # fmt: skip
    return weights, ids
