"""The gated delta-net in Triton, for GPUs: signatures and formulas are those of `cpu_ops`.

Nothing waits for the device: grids depend on the numbers of tokens and of requests, and what is
launched on the most tokens that one has. Up to BY_TOKEN are computed token by token, in one launch.
As many tokens as requests are a step of one token for each request. What fills up a CUDA graph has
slot 0, which is nobody's; a graph for other steps than those has more tokens than requests.
"""

import torch
from torch import Tensor

from vllm.kernels.triton.delta_rule_kernels import (
    BY_TOKEN,
    chunk_kernel,
    conv_state_kernel,
    conv_step_kernel,
    conv_tokens_kernel,
    solve_kernel,
    step_kernel,
)
from vllm.kernels.triton.moe_rows import capability_major, launch_dependent
from vllm.utils.math_utils import cdiv, next_power_of_2

CHUNK = 64  # tokens that matrix products take at a time
LEAST_REQUESTS_PAD = 256  # each number is compiled apart, which would keep requests waiting
SOLVE_REGISTERS = 255  # two programs to a multiprocessor take less time than three of 168 (H200)
STEP_BLOCK_V, CHUNK_BLOCK_V = 32, 32  # columns of a state that one program keeps in registers
CONV_TOKENS, CONV_BLOCK, STEP_BLOCK = 32, 128, 512


def most_tokens(num_tokens: int, num_requests: int, max_query_len: int | None) -> int:
    """A bound of the tokens of one request."""
    if num_tokens == num_requests:
        return 1
    return num_tokens if max_query_len is None else max_query_len


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    draft_slots: Tensor | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """silu of a convolution along the tokens, as `cpu_ops.causal_conv1d` defines it."""
    num_tokens, channels = x.shape
    num_requests, taps = state_slots.shape[0], weight.shape[0]
    result = x.new_empty(num_tokens, channels) if out is None else out
    assert x.stride(1) == 1 and result.is_contiguous() and weight.is_contiguous()
    assert state.is_contiguous() and 1 < taps <= BY_TOKEN.value + 1
    requests = (state_slots, query_start_loc, seq_lens, draft_slots)
    most = most_tokens(num_tokens, num_requests, max_query_len)
    conv_step_kernel[(num_requests, cdiv(channels, STEP_BLOCK))](
        x, weight, bias, state, *requests, result, num_requests, x.stride(0), CHANNELS=channels,
        TAPS=taps, BLOCK=STEP_BLOCK, IS_DECODE=most == 1, **launch_dependent(x.device),
    )  # fmt: skip
    if most > BY_TOKEN.value:
        blocks = cdiv(channels, CONV_BLOCK)
        conv_tokens_kernel[(cdiv(num_tokens, CONV_TOKENS), blocks)](
            x, weight, bias, state, *requests, result, num_tokens, num_requests, x.stride(0),
            CHANNELS=channels, TAPS=taps, TOKENS=CONV_TOKENS, BLOCK=CONV_BLOCK,
        )  # fmt: skip
        conv_state_kernel[(num_requests, cdiv(channels, STEP_BLOCK))](
            x, state, *requests, x.stride(0), CHANNELS=channels, TAPS=taps, BLOCK=STEP_BLOCK
        )
    return result


def chunk_operands(value: Tensor, num_chunks: int, key_pad: int, value_pad: int) -> list[Tensor]:
    """What `solve_kernel` leaves for `chunk_kernel`."""
    shapes = (
        ((3, CHUNK, key_pad), torch.float16),
        ((CHUNK, CHUNK), torch.float16),
        ((CHUNK, value_pad), torch.float32),
        ((), torch.float32),
    )
    heads = value.shape[1]
    return [value.new_empty(num_chunks, heads, *shape, dtype=dtype) for shape, dtype in shapes]


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor | None = None,
    draft_slots: Tensor | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """The recurrence of Gated DeltaNet, as `cpu_ops.gated_delta_rule` defines it.

    Pieces of prompts run in chunks (arXiv 2412.06464, section 3.3). Products with the state have
    the digits of TF32; sums, decays and the states themselves are float32.
    """
    num_tokens, heads, dim_v = value.shape
    dim_k, num_requests = key.shape[2], state_slots.shape[0]
    result = value.new_empty(num_tokens, heads, dim_v) if out is None else out
    assert all(x.stride(1) == x.shape[2] and x.stride(2) == 1 for x in (query, key, value))
    assert result.is_contiguous() and state.is_contiguous() and state.dtype == torch.float32
    assert a.stride() == b.stride() and a.stride(1) == 1
    gates, requests = (a, b, decay_rate, dt_bias), (state_slots, query_start_loc, seq_lens)
    strides = (query.stride(0), key.stride(0), value.stride(0), a.stride(0))
    key_pad, group = max(16, next_power_of_2(dim_k)), heads // key.shape[1]
    sizes = {"HEADS": heads, "K": dim_k, "K_PAD": key_pad, "V": dim_v}
    most = most_tokens(num_tokens, num_requests, max_query_len)
    step_kernel[(cdiv(dim_v, STEP_BLOCK_V), heads, num_requests)](
        query, key, value, *gates, state, *requests, draft_slots, result, *strides, num_requests,
        **sizes, GROUP=group, BLOCK_V=STEP_BLOCK_V, IS_DECODE=most == 1,
        **launch_dependent(value.device),
    )  # fmt: skip
    if most > BY_TOKEN.value:
        # A request of n tokens has fewer than n / CHUNK + 1 chunks, and none of up to BY_TOKEN.
        num_chunks = cdiv(num_tokens, CHUNK) + min(num_requests, num_tokens // BY_TOKEN.value)
        requests_pad = max(LEAST_REQUESTS_PAD, next_power_of_2(num_requests))
        sizes |= {"R_PAD": requests_pad, "CHUNK": CHUNK, "V_PAD": CHUNK * cdiv(dim_v, CHUNK)}
        prepared = chunk_operands(value, num_chunks, key_pad, sizes["V_PAD"])
        solve_kernel[(num_chunks, heads)](
            query, key, value, *gates, query_start_loc, draft_slots, *prepared, *strides,
            num_requests, **sizes, GROUP=group, num_warps=4, num_stages=1, maxnreg=SOLVE_REGISTERS,
        )  # fmt: skip
        # Chunks in shared memory: 192 KiB for heads of 128.
        num_stages = 3 if capability_major(value.device) == 9 and key_pad <= 128 else 1
        chunk_kernel[(cdiv(dim_v, CHUNK_BLOCK_V), heads, num_requests)](
            state, *requests, draft_slots, *prepared, result, num_requests, **sizes,
            BLOCK_V=CHUNK_BLOCK_V, num_warps=4, num_stages=num_stages,
        )  # fmt: skip
    return result
