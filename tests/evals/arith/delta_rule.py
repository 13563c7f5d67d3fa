"""The gated delta rule in chunks, of matrix products alone: fast to train with, exact to rounding.

Yang et al., "Gated Delta Networks" (2024), section 3.3.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64
_LEAF = 16


def chunked(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, None]:
    """query, key [B, T, key heads, K]; value [B, T, heads, V]; g (log decay), beta [B, T, heads].
    From an empty state; query and key are L2-normalised here. Returns [B, T, heads, V]."""
    dtype, length, num_heads = query.dtype, query.shape[1], value.shape[2]
    repeats = num_heads // key.shape[2]
    query, key = (_unit(x.float()).repeat_interleave(repeats, 2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    padding = -length % _CHUNK
    query, key, value = (
        F.pad(x.float().transpose(1, 2), (0, 0, 0, padding)).unflatten(2, (-1, _CHUNK))
        for x in (query, key, value)
    )
    g, beta = (
        F.pad(x.float().transpose(1, 2), (0, padding)).unflatten(2, (-1, _CHUNK)) for x in (g, beta)
    )
    total = g.cumsum(-1)
    lower = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=g.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    scaled = key * beta[..., None]
    system = (scaled @ key.mT) * decay
    inverse = unit_lower_inverse(system.masked_fill(~lower.tril(-1), 0.0))
    new_values = inverse @ (value * beta[..., None])
    old_keys = inverse @ (scaled * total.exp()[..., None])
    within = (query @ key.mT) * decay
    query = query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1, None, None].exp()
    state = torch.zeros_like(key[:, :, 0].mT @ value[:, :, 0])
    outputs = []
    for i in range(key.shape[2]):
        written = new_values[:, :, i] - old_keys[:, :, i] @ state
        outputs.append(query[:, :, i] @ state + within[:, :, i] @ written)
        state = state * kept[:, :, i] + key[:, :, i].mT @ written
    out = torch.stack(outputs, 2).flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2).to(dtype), None


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower triangular a [..., n, n], n a power of two times 16 at most.

    Blocks of 16 by their Neumann series, which ends: larger powers would cancel in float32.
    """
    n = a.shape[-1]
    if n > _LEAF:
        half = n // 2
        halves = torch.stack([a[..., :half, :half], a[..., half:, half:]])
        top, bottom = unit_lower_inverse(halves).unbind(0)
        corner = -bottom @ a[..., half:, :half] @ top
        upper = torch.cat([top, torch.zeros_like(corner)], -1)
        return torch.cat([upper, torch.cat([corner, bottom], -1)], -2)
    power = -a
    inverse = torch.eye(n, dtype=a.dtype, device=a.device) + power
    for _ in range((n - 1).bit_length() - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
