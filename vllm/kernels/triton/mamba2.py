"""The recurrence of Mamba2 in Triton, for GPUs: signature and formulas are those of `cpu_ops`.

Nothing waits for the device, and requests of few tokens are computed token by token, as in
`delta_rule.py`.
"""

import torch
from torch import Tensor

from vllm.kernels.triton.delta_rule import most_tokens
from vllm.kernels.triton.delta_rule_kernels import BY_TOKEN
from vllm.kernels.triton.mamba2_kernels import chunk_kernel, step_kernel
from vllm.kernels.triton.moe_rows import launch_dependent
from vllm.utils.math_utils import cdiv, next_power_of_2

STEP_BLOCK_P = 32  # columns of a state that one program keeps in registers
_MOST_ROWS = 128  # of a state, of which a program of chunks keeps 64 columns
# Tokens that matrix products take at a time, and columns of a state that one program keeps. Triton
# 3.6 computes wrong products of 64 tokens and 32 columns on SM90.
CHUNK, CHUNK_OF_MANY_ROWS = 64, 32


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    state: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    out: Tensor | None = None,
    draft_slots: Tensor | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """The recurrence of Mamba2, as `cpu_ops.mamba2_scan` defines it.

    Pieces of prompts run in chunks (arXiv 2405.21060, section 6). Factors of products that are not
    activations have at least the digits of TF32; sums, decays and states are float32.
    """
    num_tokens, heads, head_dim = x.shape
    groups, state_size = b.shape[1:]
    num_requests = state_slots.shape[0]
    result = x.new_empty(num_tokens, heads, head_dim) if out is None else out
    assert all(one.stride(1) == one.shape[2] and one.stride(2) == 1 for one in (x, b, c))
    assert result.is_contiguous() and state.is_contiguous() and state.dtype == torch.float32
    assert dt.stride(1) == 1
    requests = (state_slots, query_start_loc, seq_lens, draft_slots)
    given = (x, dt, b, c, decay_rate, dt_bias, skip, state, *requests)
    strides = (x.stride(0), dt.stride(0), b.stride(0), c.stride(0))
    pad = max(16, next_power_of_2(state_size))
    sizes = {"HEADS": heads, "GROUP": heads // groups, "N": state_size, "N_PAD": pad, "P": head_dim}
    most = most_tokens(num_tokens, num_requests, max_query_len)
    step_kernel[(cdiv(head_dim, STEP_BLOCK_P), heads, num_requests)](
        *given, result, *strides, *dt_limits, **sizes, BLOCK_P=STEP_BLOCK_P,
        IS_DECODE=most == 1, **launch_dependent(x.device),
    )  # fmt: skip
    if most > BY_TOKEN.value:
        size = CHUNK if pad <= _MOST_ROWS else CHUNK_OF_MANY_ROWS
        chunk_kernel[(cdiv(head_dim, size), heads, num_requests)](
            *given, result, *strides, *dt_limits, **sizes, BLOCK_P=size, CHUNK=size,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return result
