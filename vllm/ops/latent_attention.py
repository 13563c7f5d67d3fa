"""Multi-head latent attention over a paged cache of latents, with the reference in plain torch.

The cache is [num_blocks, block_size, head_dim]: of each token one vector that all heads share as
their key, whose first value_dim columns are their value (https://arxiv.org/abs/2405.04434).
"""

import torch
from torch import Tensor

from vllm.ops.paged_attention import (
    AttentionBatch,
    CacheTarget,
    PagedAttention,
    zeros_on_demand,
)
from vllm.utils.fp8 import FP8_MAX
from vllm.utils.torch_utils import dtype_of

# Of scores that are held at a time, float32.
_MAX_SCORES = 1 << 24


class LatentPagedAttention(PagedAttention):
    """Writes the latents of new tokens to the cache, then attends causally over it.

    k_cache: the cache.
    """

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Zeros, so that a position never written holds a finite number."""
        shape = num_blocks, block_size, self.problem.head_dim
        self.k_cache = zeros_on_demand(shape, self.dtype, device)

    def zeros(self, num_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
        dim, dtype = self.problem.head_dim, dtype_of(self.problem.dtype)
        shapes = (num_tokens, self.problem.num_heads, dim), (num_tokens, dim)
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

    def target(self, v: Tensor, batch: AttentionBatch) -> CacheTarget | None:
        return None

    def write(self, *latents_and_batch: object) -> None:
        """Latents [T, head_dim] of new tokens, and the batch."""
        latents, batch = latents_and_batch
        assert self._write is not None and isinstance(batch, AttentionBatch)
        self._write(latents, self.k_cache, batch.slot_mapping, self.k_scale)

    def __call__(self, q: Tensor, *latents_and_batch: object) -> Tensor:
        """q [T, heads, head_dim], latents [T, head_dim], batch -> [T, heads, value_dim]."""
        self.write(*latents_and_batch)
        batch = latents_and_batch[1]
        assert isinstance(batch, AttentionBatch)
        return self.attend(q, batch)

    def attend(self, q: Tensor, batch: AttentionBatch) -> Tensor:
        """Over what the cache holds."""
        bounds = (
            {"max_query_len": batch.max_query_len, "max_seq_len": batch.max_seq_len}
            if self.k_cache.is_cuda
            else {}
        )
        requests = batch.block_tables, batch.query_start_loc, batch.seq_lens
        sizes = self.scale, self.problem.value_dim, self.k_scale
        return self._attend(q, self.k_cache, *requests, *sizes, **bounds)


def write_latents(latents: Tensor, cache: Tensor, slot_mapping: Tensor, scale: float) -> None:
    """latents [T, head_dim] into the slots (int64 [T]) of the cache; negative ones are skipped.
    scale: what an FP8 cache stores is divided by it."""
    is_kept = slot_mapping >= 0
    slots, kept = slot_mapping[is_kept], latents[is_kept]
    if cache.dtype == torch.float8_e4m3fn:
        kept = (kept.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    stored, rows = kept.to(cache.dtype), cache.view(-1, cache.shape[2])
    # torch cannot store to places of E4M3 on every device.
    if cache.itemsize == 1:
        stored, rows = stored.view(torch.uint8), rows.view(torch.uint8)
    rows[slots] = stored


def paged_latent_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    value_dim: int,
    k_scale: float = 1.0,
    **bounds: int,
) -> Tensor:
    """Causal attention of query [T, heads, head_dim] over the cache -> [T, heads, value_dim], in
    float32, rounded to the query's type. The host waits for the device."""
    result = query.new_zeros(*query.shape[:2], value_dim)
    starts, block_size = query_start_loc.tolist(), cache.shape[1]
    for r, seq_len in enumerate(seq_lens.tolist()):
        first, stop = starts[r : r + 2]
        if first == stop or seq_len == 0:
            continue
        blocks = block_tables[r, : -(-seq_len // block_size)].long()
        keys = cache[blocks].flatten(0, 1)[:seq_len].float() * k_scale
        position = torch.arange(seq_len, device=query.device)
        step = max(1, _MAX_SCORES // (query.shape[1] * seq_len))
        for row in range(first, stop, step):
            rows = slice(row, min(row + step, stop))
            last = position[seq_len - stop + rows.start : seq_len - stop + rows.stop]
            scores = query[rows].float() @ keys.T * scale  # [rows, heads, keys]
            is_ahead = position > last[:, None]
            weights = scores.masked_fill_(is_ahead[:, None], float("-inf")).softmax(-1)
            result[rows] = (weights @ keys[:, :value_dim]).to(query.dtype)
    return result
