"""The gated delta-net of `vllm.ops.torch_ops`: a causal convolution and a recurrence with states.

A step of one token for each request runs on gathered states and never asks the device for a
value: a CUDA graph can hold it. Longer pieces of prompts run request by request. A row that fills
up a graph has no tokens before it, and so starts from zeros.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from vllm.ops.draft_states import has_drafts, keep_draft_states

_NORM_EPS = 1e-6
_CHUNK = 64


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
    if has_drafts(draft_slots):
        return keep_draft_states(
            causal_conv1d, (x,), (weight,), state, (state_slots, query_start_loc, seq_lens),
            draft_slots, out, bias=bias,
        )  # fmt: skip
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    for tokens, requests in pieces(query_start_loc, x.shape[0]):
        slots = state_slots[requests].long()
        is_fresh = seq_lens[requests] <= tokens.shape[1]
        kept = torch.where(is_fresh[:, None, None], 0, state[slots])
        # [requests, taps - 1 + tokens, channels]
        inputs = torch.cat((kept, x[tokens]), 1)
        windows = inputs.unfold(1, weight.shape[0], 1).float()
        sums = (windows * weight.T).sum(-1)
        result[tokens] = silu(sums if bias is None else sums + bias).to(x.dtype)
        state[slots] = inputs[:, tokens.shape[1] :]
    return result if out is None else out.copy_(result)


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
    """The recurrence of Gated DeltaNet, as `cpu_ops.gated_delta_rule` defines it."""
    if has_drafts(draft_slots):
        return keep_draft_states(
            gated_delta_rule, (query, key, value, a, b), (decay_rate, dt_bias), state,
            (state_slots, query_start_loc, seq_lens), draft_slots, out,
        )  # fmt: skip
    result = torch.empty_like(value, memory_format=torch.contiguous_format)
    group = value.shape[1] // query.shape[1]
    log_decay = -decay_rate * softplus(a.float() + dt_bias)
    beta = torch.sigmoid(b.float())
    for tokens, requests in pieces(query_start_loc, value.shape[0]):
        slots = state_slots[requests].long()
        is_fresh = seq_lens[requests] <= tokens.shape[1]
        before = torch.where(is_fresh[:, None, None, None], 0.0, state[slots])
        q, k = (_unit(x[tokens].float()).repeat_interleave(group, 2) for x in (query, key))
        q = q * query.shape[2] ** -0.5
        run = _one_token if tokens.shape[1] == 1 else _chunked
        # Heads before tokens from here on: [requests, heads, tokens, ...].
        arguments = (q, k, value[tokens].float(), log_decay[tokens], beta[tokens])
        q, k, v, decays, betas = (x.transpose(1, 2) for x in arguments)
        outputs, after = run(q, k, v, decays, betas, before)
        result[tokens] = outputs.transpose(1, 2).to(value.dtype)
        state[slots] = after
    return result if out is None else out.copy_(result)


def pieces(query_start_loc: Tensor, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens [R, n], requests [R]) of requests that have the same number of tokens n, as indices:
    all requests of one token together, any other alone."""
    num_requests = query_start_loc.shape[0] - 1
    device = query_start_loc.device
    if num_tokens == num_requests:
        everything = torch.arange(num_requests, device=device)
        yield everything[:, None], everything
        return
    starts = query_start_loc.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    if single := [r for r, length in enumerate(lengths) if length == 1]:
        requests = torch.tensor(single, device=device)
        yield query_start_loc[requests].long()[:, None], requests
    for r, length in enumerate(lengths):
        if length > 1:
            tokens = torch.arange(starts[r], starts[r + 1], device=device)
            yield tokens[None], torch.tensor([r], device=device)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [R, H, 1, K], v [R, H, 1, V], state [R, H, K, V]: the definition itself."""
    state = state * log_decay.exp()[..., None]
    delta = (v - k @ state) * beta[..., None]
    state = state + k.transpose(2, 3) @ delta
    return q @ state, state


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for T tokens, in chunks that matrix products compute (section 3.3 of the paper).

    Within a chunk, with D[i, j] = the decay between tokens j and i, the deltas u solve
    (I + beta_i D[i, j] k_i.k_j, j < i) u = beta_i (v_i - decay since the chunk's begin * S.T k_i),
    and only the product with the state S that enters the chunk waits for the chunk before.
    """
    num_tokens = q.shape[2]
    missing = -num_tokens % _CHUNK  # tokens that change nothing: beta 0, no decay
    q, k, v = (pad(x, (0, 0, 0, missing)).unflatten(2, (-1, _CHUNK)) for x in (q, k, v))
    log_decay, beta = (pad(x, (0, missing)).unflatten(2, (-1, _CHUNK)) for x in (log_decay, beta))
    since_begin = log_decay.cumsum(3)
    is_seen = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).tril()
    between = since_begin[..., :, None] - since_begin[..., None, :]
    between = between.masked_fill(~is_seen, float("-inf")).exp()
    system = beta[..., None] * (k @ k.transpose(3, 4)) * between  # its diagonal is not read
    wanted = torch.cat((v, k * since_begin.exp()[..., None]), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    from_values, from_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    seen = (q @ k.transpose(3, 4)) * between
    q = q * since_begin.exp()[..., None]
    k = k * (since_begin[..., -1:] - since_begin).exp()[..., None]
    chunk_decay = since_begin[..., -1].exp()[..., None, None]
    outputs = []
    for i in range(q.shape[2]):
        delta = from_values[:, :, i] - from_state[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + seen[:, :, i] @ delta)
        state = state * chunk_decay[:, :, i] + k[:, :, i].transpose(2, 3) @ delta
    return torch.cat(outputs, 2)[:, :, :num_tokens], state
