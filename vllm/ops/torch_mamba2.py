"""Mamba2 in plain torch on any device: the state space recurrence of the paper (arXiv 2405.21060)
and the gated norm after it.

As of `torch_delta_net`: a step of one token for each request runs on gathered states, longer pieces
of prompts request by request, in chunks whose products are those of matrices (section 6, SSD). A
prompt that is cut into other pieces has other chunks: its results agree up to rounding.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from vllm.ops.draft_states import has_drafts, keep_draft_states
from vllm.ops.torch_delta_net import pieces

_CHUNK = 64


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
    """The recurrence of Mamba2, as `cpu_ops.mamba2_scan` defines it."""
    if has_drafts(draft_slots):
        return keep_draft_states(
            mamba2_scan, (x, dt, b, c), (decay_rate, dt_bias, skip), state,
            (state_slots, query_start_loc, seq_lens), draft_slots, out, dt_limits=dt_limits,
        )  # fmt: skip
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_groups = b.shape[1]
    steps = softplus(dt.float() + dt_bias).clamp(*dt_limits)
    for tokens, requests in pieces(query_start_loc, x.shape[0]):
        slots = state_slots[requests].long()
        is_fresh = seq_lens[requests] <= tokens.shape[1]
        before = torch.where(is_fresh[:, None, None, None], 0.0, state[slots])
        # [requests, groups, heads of a group, tokens, ...] from here on.
        values, own_steps, own_b, own_c = (y[tokens].float() for y in (x, steps, b, c))
        values = values.transpose(1, 2).unflatten(1, (num_groups, -1))
        own_steps = own_steps.transpose(1, 2).unflatten(1, (num_groups, -1))
        own_b, own_c = (y.transpose(1, 2).unsqueeze(2) for y in (own_b, own_c))
        rates, skips = (y.view(num_groups, -1, 1) for y in (decay_rate, skip))
        before = before.unflatten(1, (num_groups, -1))
        run = _one_token if tokens.shape[1] == 1 else _chunked
        scaled = values * own_steps[..., None]
        outputs, after = run(scaled, -rates * own_steps, own_b, own_c, before)
        outputs = (outputs + skips[..., None] * values).flatten(1, 2)
        result[tokens] = outputs.transpose(1, 2).to(x.dtype)
        state[slots] = after.flatten(1, 2)
    return result if out is None else out.copy_(result)


def _one_token(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """x [R, G, H, 1, P], log_decay [R, G, H, 1], b, c [R, G, 1, 1, N], state [R, G, H, N, P]."""
    state = state * log_decay.exp()[..., None] + b.mT * x
    return (state * c.mT).sum(3, keepdim=True), state


def _chunked(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for T tokens. Within a chunk, with D[i, j] the decay between tokens j and i:
    y_i = sum over j <= i of D[i, j] (c_i . b_j) x_j, and what the state that enters it gives."""
    outputs = []
    for start in range(0, x.shape[3], _CHUNK):
        own = slice(start, start + _CHUNK)
        own_x, own_b, own_c = x[..., own, :], b[..., own, :], c[..., own, :]
        since_begin = log_decay[..., own].cumsum(3)
        between = since_begin[..., :, None] - since_begin[..., None, :]
        is_seen = torch.ones_like(between[0, 0, 0], dtype=torch.bool).tril()
        between = between.masked_fill(~is_seen, float("-inf")).exp()
        y = (own_c @ own_b.mT * between) @ own_x
        outputs.append(y + own_c @ state * since_begin.exp()[..., None])
        until_end = (since_begin[..., -1:] - since_begin).exp()
        state = state * since_begin[..., -1].exp()[..., None, None]
        state = state + own_b.mT @ (own_x * until_end[..., None])
    return torch.cat(outputs, 3), state


def silu_mul_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """As `cpu_ops.silu_mul_rms_norm`."""
    gated = x.float() * silu(gate.float())
    scale = (gated.square().mean(-1, keepdim=True) + eps).rsqrt()
    result = (gated * scale * weight).to(x.dtype)
    return result if out is None else out.copy_(result)


def relu2(x: Tensor, out: Tensor | None = None) -> Tensor:
    """max(x, 0) ** 2, rounded once."""
    result = x.float().relu().square().to(x.dtype)
    return result if out is None else out.copy_(result)
