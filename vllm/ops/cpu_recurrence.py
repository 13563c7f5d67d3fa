"""The part of `cpu_ops` with a state for each request: convolution, delta rule and Mamba2."""

from torch import Tensor

from vllm.ops.draft_states import has_drafts, keep_draft_states
from vllm.platforms import native

_library = native.load()
_causal_conv1d = _library.causal_conv1d
_gated_delta_rule = _library.gated_delta_rule
_mamba2_scan = _library.mamba2_scan


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
    """silu of a convolution along the tokens of each request: x [tokens, channels] -> the same.

    out[t, c] = silu(bias[c] + sum over j of weight[j, c] * x[t - taps + 1 + j, c]), `weight`
    float32 [taps, channels], up to 8 taps, `bias` float32 [channels] or None. Where that reaches
    back before this step it reads `state` [slots, taps - 1, channels] in x's type, the last inputs
    of the request in slot `state_slots[r]` (int32 [requests]), and then leaves its own last inputs
    there. Requests are given as for `paged_attention`, each with at least one token; one with
    seq_lens[r] tokens in this step starts from zeros, whatever its slot holds. Slots of requests
    must differ.

    draft_slots, int32 [tokens]: of a draft token the slot that the state after it goes to, -1 of
    other tokens. The draft tokens of a request are its last ones, after a single other; the state
    after that one is left in state_slots[r]. None: there are none.

    max_query_len: the most tokens of one request, by which kernels for GPUs decide what to launch;
    None: any number.
    """
    requests = state_slots, query_start_loc, seq_lens
    if has_drafts(draft_slots):
        return keep_draft_states(
            causal_conv1d, (x,), (weight,), state, requests, draft_slots, out, bias=bias
        )
    if out is None:
        out = x.new_empty(x.shape)
    _causal_conv1d(x, weight, bias, state, *requests, out)
    return out


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
    """The recurrence of Gated DeltaNet (arXiv 2412.06464) over the tokens of each request.

    `query`, `key` [tokens, key heads, key_dim]; `value` [tokens, value heads, value_dim], whose
    head h goes with key head h // (value heads / key heads); `a`, `b` [tokens, value heads];
    `decay_rate`, `dt_bias` float32 [value heads]. Per token and value head, in float32:

        q, k = query / |query| / sqrt(key_dim), key / |key|        (lengths sqrt(sum + 1e-6))
        S = exp(-decay_rate * softplus(a + dt_bias)) * S           S [key_dim, value_dim]
        S = S + k (outer product) sigmoid(b) * (value - S.T k)
        out = S.T q                                                out [tokens, value heads, ...]

    S is `state[state_slots[r], h]` (float32 [slots, value heads, key_dim, value_dim]), taken and
    left as `causal_conv1d` does with its own. Head sizes up to 256.
    """
    requests = state_slots, query_start_loc, seq_lens
    if has_drafts(draft_slots):
        return keep_draft_states(
            gated_delta_rule, (query, key, value, a, b), (decay_rate, dt_bias), state, requests,
            draft_slots, out,
        )  # fmt: skip
    if out is None:
        out = value.new_empty(value.shape)
    _gated_delta_rule(query, key, value, a, b, decay_rate, dt_bias, state, *requests, out)
    return out


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
    """The recurrence of Mamba2 over the tokens of each request: -> [tokens, heads, head_dim].

    `x` [tokens, heads, head_dim]; `dt` [tokens, heads]; `b`, `c` [tokens, groups, state_size], of
    which group h // (heads / groups) goes with head h; `decay_rate` (exp of A_log), `dt_bias`,
    `skip` (D) float32 [heads]. Per token and head, in float32:

        d = clamp(softplus(dt + dt_bias), dt_limits)
        S = exp(-decay_rate * d) * S + b (outer product) d * x     S [state_size, head_dim]
        out = S.T c + skip * x

    S is `state[state_slots[r], h]` (float32 [slots, heads, state_size, head_dim]), taken and left
    as `causal_conv1d` does with its own, where requests are explained too. Sizes up to 256.
    """
    requests = state_slots, query_start_loc, seq_lens
    of_heads = decay_rate, dt_bias, skip
    if has_drafts(draft_slots):
        return keep_draft_states(
            mamba2_scan, (x, dt, b, c), of_heads, state, requests, draft_slots, out,
            dt_limits=dt_limits,
        )  # fmt: skip
    if out is None:
        out = x.new_empty(x.shape)
    _mamba2_scan(x, dt, b, c, *of_heads, state, *requests, *dt_limits, out)
    return out
