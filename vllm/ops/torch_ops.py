"""Model operations in plain torch on any device: the reference of `vllm.ops.cpu_ops`.

Same functions, signatures and contract (`vllm.ops`); clear rather than fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.ops.moe_router import choose_experts as choose_experts
from vllm.ops.torch_delta_net import causal_conv1d as causal_conv1d
from vllm.ops.torch_delta_net import gated_delta_rule as gated_delta_rule
from vllm.ops.torch_mamba2 import mamba2_scan as mamba2_scan
from vllm.ops.torch_mamba2 import relu2 as relu2
from vllm.ops.torch_mamba2 import silu_mul_rms_norm as silu_mul_rms_norm

USES_TORCH_THREADS = True
LOGIT_DTYPES = (torch.float32,)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A linear layer as given; widened to float32 at every call."""

    weight: Tensor  # [n, k]
    row_scales: Tensor | None  # [n, ceil(k / block_k)] float32
    block_k: int
    bias: Tensor | None  # [n] float32

    def dequantize(self) -> Tensor:
        """weight[i, j] * row_scales[i, j // block_k] in float32, [n, k]."""
        weight = self.weight.float()
        if self.row_scales is None:
            return weight
        return weight * self.row_scales.repeat_interleave(self.block_k, 1)[:, : weight.shape[1]]


def pack_linear(
    weight: Tensor,
    row_scales: Tensor | None = None,
    block_k: int | None = None,
    bias: Tensor | None = None,
) -> LinearWeight:
    """Keeps `weight` [n, k], `row_scales` [n, ceil(k / block_k)] and `bias` [n] as they are."""
    return LinearWeight(weight, row_scales, block_k or max(weight.shape[1], 1), bias)


def linear(x: Tensor, packed: LinearWeight, out: Tensor | None = None) -> Tensor:
    """x [m, k] -> [m, n] = x @ weight.T + bias in float32, rounded to x's type."""
    y = x.float() @ packed.dequantize().T
    if packed.bias is not None:
        y += packed.bias
    return _deliver(y.to(x.dtype), out)


def pack_heads(weights: Tensor) -> Tensor:
    """Keeps `weights` [heads, k, n] of one product per head."""
    return weights


def linear_heads(x: Tensor, packed: Tensor, out: Tensor | None = None) -> Tensor:
    """x [tokens, heads, k] -> [tokens, heads, n]: each head with its own weight."""
    return _deliver(torch.bmm(x.transpose(0, 1), packed).transpose(0, 1), out)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight float32."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return _deliver((wide * scale * weight).to(x.dtype), out)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """In place: residual += x, then x = rms_norm(residual, weight, eps)."""
    residual += x
    rms_norm(residual, weight, eps, out=x)


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """rms_norm(x, weight, eps) * silu(gate), rounded once."""
    normed = rms_norm(x.float(), weight, eps)
    return _deliver((normed * torch.nn.functional.silu(gate.float())).to(x.dtype), out)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """Rotates the first cos_sin_cache.shape[1] columns of every head in place.

    Pairs are (i, i + rotary_dim / 2) where `is_neox`, else (2 i, 2 i + 1).
    """
    rotary_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
    for heads in (query, key):
        if heads is None:
            continue
        rotated = heads[..., :rotary_dim]
        if is_neox:
            first, second = rotated.chunk(2, -1)
        else:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        a, b = first.float(), second.float()
        turned = a * cos - b * sin, b * cos + a * sin
        first.copy_(turned[0])
        second.copy_(turned[1])


def qk_norm_rotary(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    is_neox: bool = True,
) -> None:
    """rms_norm of every head of query and of key in place, then rotary_embedding."""
    rms_norm(query, query_weight, eps, out=query)
    rms_norm(key, key_weight, eps, out=key)
    rotary_embedding(positions, query, key, cos_sin_cache, is_neox)


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x [tokens, 2 n] -> [tokens, n] = silu(x[:, :n]) * x[:, n:]."""
    gate, up = x.float().chunk(2, -1)
    return _deliver((torch.nn.functional.silu(gate) * up).to(x.dtype), out)


def gelu_and_mul(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """x [tokens, 2 n] -> [tokens, n] = gelu(x[:, :n]) * x[:, n:]; approximate: none or tanh."""
    gate, up = x.float().chunk(2, -1)
    gelu = torch.nn.functional.gelu(gate, approximate=approximate)
    return _deliver((gelu * up).to(x.dtype), out)


def soft_cap(x: Tensor, softcap: float) -> None:
    """In place: x [tokens, n] = softcap * tanh(x / softcap), in float32."""
    x.copy_(softcap * torch.tanh(x.float() / softcap))


def swigluoai_and_mul(x: Tensor, limit: float) -> Tensor:
    """x [tokens, 2 n] -> [tokens, n], as `vllm.architectures.decoder.SWIGLUOAI` says."""
    gate, up = x.float().chunk(2, -1)
    gate = gate.clamp(max=limit)
    glu = gate * torch.sigmoid(1.702 * gate)
    return (glu * (up.clamp(-limit, limit) + 1)).to(x.dtype)


def mul_sigmoid(x: Tensor, gate: Tensor) -> None:
    """In place: x [tokens, heads, dim] *= sigmoid(gate), gate of that shape or [..., 1]."""
    x.copy_(x.float() * torch.sigmoid(gate.float()))


def routed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    experts: Sequence[tuple[LinearWeight, LinearWeight]],
    activate: Callable[[Tensor], Tensor] = silu_and_mul,
) -> Tensor:
    """x [tokens, n] -> [tokens, n]: for each token the weighted sum of its experts' results.

    Every expert computes every token. On a GPU even the experts that no token asked for: to leave
    them out the host would have to wait for the device, which a CUDA graph cannot hold.
    """
    total = torch.zeros_like(x, dtype=torch.float32)
    for index, (gate_up, down) in enumerate(experts):
        is_chosen = topk_ids == index
        if x.is_cuda or bool(is_chosen.any()):
            result = linear(activate(linear(x, gate_up)), down).float()
            weight = (topk_weights * is_chosen).sum(1, keepdim=True)
            total += torch.where(is_chosen.any(1, keepdim=True), result * weight, 0.0)
    return total.to(x.dtype)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Writes key and value [tokens, num_kv_heads, head_dim] into slots of the paged cache."""
    block_size = k_cache.shape[3]
    is_kept = slot_mapping >= 0
    slots = slot_mapping[is_kept]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, :, offset] = _to_cache(key[is_kept], k_scale, k_cache.dtype)
    v_cache[block, :, offset, :] = _to_cache(value[is_kept], v_scale, v_cache.dtype)


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    is_chunked: bool = False,
) -> Tensor:
    """Causal attention of query [tokens, num_heads, head_dim] over the paged cache. sinks: float32
    [heads], logits of keys without values that every query sees. softcap: scores become softcap *
    tanh(score / softcap); 0 for none. is_chunked: a query sees the keys of its own chunk of
    sliding_window positions."""
    result = torch.zeros_like(query)
    group = query.shape[1] // k_cache.shape[1]
    block_size = k_cache.shape[3]
    starts = query_start_loc.tolist()
    for r, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[r], starts[r + 1])
        query_len = rows.stop - rows.start
        if query_len == 0 or seq_len == 0:
            continue
        blocks = block_tables[r, : -(-seq_len // block_size)].long()
        # [blocks, heads, dim, block_size] -> [heads, keys, dim]
        keys = k_cache[blocks].float().permute(1, 0, 3, 2).flatten(1, 2)[:, :seq_len] * k_scale
        values = v_cache[blocks].float().transpose(0, 1).flatten(1, 2)[:, :seq_len] * v_scale
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = query[rows].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(seq_len, device=query.device)
        ahead = position[seq_len - query_len :, None] - position
        is_seen = ahead >= 0
        if is_chunked:
            is_seen &= position[seq_len - query_len :, None] % sliding_window >= ahead
        elif sliding_window > 0:
            is_seen &= ahead < sliding_window
        scores = scores.masked_fill(~is_seen, float("-inf"))
        if sinks is not None:
            added = sinks[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat((scores, added), -1)
        weights = scores.softmax(-1)[..., :seq_len]
        result[rows] = (weights @ values).transpose(0, 1).to(query.dtype)
    return _deliver(result, out)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """One token for each row, as `cpu_ops.sample_tokens` defines it."""
    rows = zip(logits, temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(),
               uniforms.tolist())  # fmt: skip
    return torch.tensor([_sample_row(*row) for row in rows], dtype=torch.int64)


def _sample_row(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    best = int(logits.argmax())
    if temperature == 0 or not logits[best] > -torch.inf:
        return best
    weights = torch.exp((logits - logits[best]).double() / temperature)
    if 0 < top_k < len(weights):
        weights = weights * (weights >= weights.topk(top_k).values[-1])
    if top_p < 1:
        ordered = weights.sort(descending=True).values
        # The weight with which the likeliest ones first hold top_p of the mass.
        reached = ordered.cumsum(0) >= top_p * weights.sum()
        weights = weights * (weights >= ordered[int(reached.int().argmax())])
    weights = weights * (weights >= min_p)
    sums = weights.cumsum(0)
    index = int(torch.searchsorted(sums, uniform * sums[-1], right=True))
    return min(index, int(weights.nonzero()[-1]))


def _to_cache(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        return (x.float() / scale).clamp(-limit, limit).to(dtype)
    return x.to(dtype)


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)
