"""Attention over a paged KV cache, built from the operations that backends name."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from vllm.kernels.problem import AttentionProblem

_CACHE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


Attend: TypeAlias = Callable[..., Tensor]
"""`paged_attention` of an ops module (see vllm.ops)."""
CacheWriter: TypeAlias = Callable[..., None]
"""`reshape_and_cache` of an ops module."""


@dataclass(slots=True)
class AttentionBatch:
    """Where the tokens of one step stand, for R requests and T tokens.

    query_start_loc: int32 [R + 1], first token of each request. seq_lens: int32 [R], keys of
    each request, those of this step included. block_tables: int32 [R, max blocks].
    slot_mapping: int64 [T], block * block_size + offset where each token's K and V go.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor


class PagedAttention:
    """Writes K and V of new tokens to the cache, then attends causally over it.

    The cache is K [blocks, kv heads, head_dim, block_size] (keys side by side) and
    V [blocks, kv heads, block_size, head_dim].
    """

    def __init__(self, attend: Attend, write: CacheWriter, problem: AttentionProblem):
        self._attend = attend
        self._write = write
        self.problem = problem
        self.dtype = _CACHE_DTYPES[problem.format]
        self.scale = problem.head_dim**-0.5
        self.k_cache = self.v_cache = torch.empty(0)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of this layer, K and V."""
        p = self.problem
        return 2 * p.num_kv_heads * p.head_dim * block_size * self.dtype.itemsize

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Zeros, so that a position never written holds a finite number."""
        p = self.problem
        keys = (num_blocks, p.num_kv_heads, p.head_dim, block_size)
        values = (num_blocks, p.num_kv_heads, block_size, p.head_dim)
        self.k_cache = _lazy_zeros(keys, self.dtype)
        self.v_cache = _lazy_zeros(values, self.dtype)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv heads, head_dim] -> [T, heads, head_dim]."""
        self._write(k, v, self.k_cache, self.v_cache, batch.slot_mapping)
        return self._attend(
            q,
            self.k_cache,
            self.v_cache,
            batch.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            self.scale,
            self.problem.sliding_window,
        )


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system provides when they are first used; torch.zeros writes them."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
