"""The choice of experts in Triton, in one launch.

Nothing waits for the device and every size depends on the number of tokens alone, so that it can
be captured in a CUDA graph.
"""

import torch
import triton
from torch import Tensor

from vllm.kernels.triton.moe_router_kernels import route_kernel
from vllm.kernels.triton.moe_rows import launch_dependent


def route(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    *,
    is_sigmoid: bool = False,
    bias: Tensor | None = None,
    num_groups: int = 1,
    kept_groups: int = 1,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int64 [T, top_k] as `fused_moe.router.route` defines them; of equal
    experts the first is chosen."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    if num_tokens == 0:
        return weights, ids
    padded = triton.next_power_of_2(num_experts)
    assert logits.stride(1) == 1 and (num_groups == 1 or padded == num_experts)
    route_kernel[(num_tokens,)](
        logits, bias, weights, ids, logits.stride(0), factor, NUM_EXPERTS=num_experts,
        E_PAD=padded, TOP_K=top_k, K_PAD=triton.next_power_of_2(top_k), IS_SIGMOID=is_sigmoid,
        RENORMALISES=renormalise, HAS_BIAS=bias is not None, NUM_GROUPS=num_groups,
        KEPT_GROUPS=kept_groups, num_warps=1, **launch_dependent(logits.device),
    )  # fmt: skip
    return weights, ids
