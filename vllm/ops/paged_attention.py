"""Attention over a paged KV cache, built from the operations that backends name."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vllm.architectures.decoder import CHUNKED
from vllm.kernels.select.problem import AttentionProblem
from vllm.utils.torch_utils import dtype_of

Attend: TypeAlias = Callable[..., Tensor]
"""`paged_attention` of an ops module (see vllm.ops)."""
CacheWriter: TypeAlias = Callable[..., None] | None
"""`reshape_and_cache` of an ops module; None where the kernel that rotates K writes the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """What the host knows of a step of R requests; valid until the next step is put together.

    query_start_loc [R + 1], seq_lens [R], block_tables [R, max blocks]: as in `AttentionBatch`.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray


@dataclass(slots=True)
class AttentionBatch:
    """Where the tokens of one step stand, for R requests and T tokens.

    query_start_loc: int32 [R + 1], first token of each request. seq_lens: int32 [R], keys of
    each request, those of this step included. block_tables: int32 [R, max blocks].
    slot_mapping: int64 [T], block * block_size + offset where each token's K and V go; negative
    for a token that fills up a captured graph. state_slots: int32 [R], where each request's
    recurrent states are; 0 is nobody's, for what fills up a graph. draft_slots: int32 [T], where
    the states after draft tokens go, -1 for other tokens (`cpu_ops.causal_conv1d`); None where no
    step has both. max_query_len, max_seq_len: bounds that kernels size their grids by, which a
    captured graph cannot read from the device.
    host: the same for kernels that the host plans; None in a captured graph, and for padding.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    state_slots: Tensor
    max_query_len: int
    max_seq_len: int
    host: HostBatch | None = None
    draft_slots: Tensor | None = None


GraphShape: TypeAlias = tuple[int, int, int]
"""Of a captured graph: requests, most blocks of one, and tokens of a block."""


@dataclass(frozen=True, slots=True)
class CacheTarget:
    """Where the kernel that rotates K puts it, and V as it is: value [T, kv heads, head_dim];
    caches as a GPU has them; slot_mapping as in `AttentionBatch`; scales as in `PagedAttention`."""

    value: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    k_scale: float
    v_scale: float


class GraphPlanner(Protocol):
    """Plans on the host what the attention of a captured graph computes at its next replay."""

    def plan_graph(self, shape: GraphShape, host: HostBatch) -> None:
        """`host`: of the first requests of the graph; the others are padding."""


# Axes of the K and of the V cache, one rule for all backends of a kind of device, so that any of
# them may write what any other reads. On the CPU the keys of a block lie side by side, for vectors
# over keys; on a GPU a token's heads do ("NHD").
_CPU_AXES = (("block", "head", "dim", "token"), ("block", "head", "token", "dim"))
_GPU_AXES = (("block", "token", "head", "dim"),) * 2


class PagedAttention:
    """Writes K and V of new tokens to the cache, then attends causally over it.

    k_scale, v_scale: what an FP8 cache stores is divided by. sinks: float32 [heads] of the variant
    `sinks`, logits of keys without values; else None. planner: of a kernel that the host plans,
    shared by layers.
    """

    planner: GraphPlanner | None = None

    def __init__(self, attend: Attend, write: CacheWriter, problem: AttentionProblem):
        self._attend = attend
        self._write = write
        self.problem = problem
        self.dtype = dtype_of(problem.format)
        self.scale = problem.softmax_scale
        self.k_scale = self.v_scale = 1.0
        self.sinks: Tensor | None = None
        self.k_cache = self.v_cache = torch.empty(0)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Zeros, so that a position never written holds a finite number."""
        self.k_cache, self.v_cache = (
            zeros_on_demand((num_blocks, *shape), self.dtype, device)
            for shape in self._block_shapes(block_size, device)
        )

    def place(self, memory: Sequence[Tensor], first: int, block_size: int) -> None:
        """Puts the caches into zeros uint8 that other layers use too, those of K and of V: its
        blocks lie side by side from block `first` on."""
        shapes = self._block_shapes(block_size, memory[0].device)
        self.k_cache, self.v_cache = (
            all_bytes.view(self.dtype).view(-1, *shape)[first:]
            for all_bytes, shape in zip(memory, shapes)
        )

    def _block_shapes(self, block_size: int, device: torch.device) -> list[tuple[int, ...]]:
        """Of a block of K and of one of V."""
        problem = self.problem
        sizes = {"token": block_size, "head": problem.num_kv_heads, "dim": problem.head_dim}
        axes = _CPU_AXES if device.type == "cpu" else _GPU_AXES
        return [tuple(sizes[axis] for axis in one[1:]) for one in axes]

    def zeros(self, num_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
        """What a call takes before the batch."""
        problem = self.problem
        counts = problem.num_heads, problem.num_kv_heads, problem.num_kv_heads
        dtype = dtype_of(problem.dtype)
        return tuple(
            torch.zeros(num_tokens, heads, problem.head_dim, dtype=dtype, device=device)
            for heads in counts
        )

    def by_token(self) -> tuple[Tensor, Tensor]:
        """Views of both caches, [blocks, tokens of a block, kv heads, head_dim]."""
        order = _GPU_AXES[0]
        axes = _CPU_AXES if self.k_cache.device.type == "cpu" else _GPU_AXES
        k_axes, v_axes = ([own.index(axis) for axis in order] for own in axes)
        return self.k_cache.permute(k_axes), self.v_cache.permute(v_axes)

    def target(self, v: Tensor, batch: AttentionBatch) -> CacheTarget | None:
        """Where K and V are to be written while K is rotated; None where the call does it."""
        if self._write is not None:
            return None
        scales = self.k_scale, self.v_scale
        return CacheTarget(v, self.k_cache, self.v_cache, batch.slot_mapping, *scales)

    def write(self, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """What of it was not done with the rotation."""
        if self._write is not None:
            scales = self.k_scale, self.v_scale
            self._write(k, v, self.k_cache, self.v_cache, batch.slot_mapping, *scales)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv heads, head_dim] -> [T, heads, head_dim]. What was
        written to `target` is not read here."""
        self.write(k, v, batch)
        bounds: dict[str, Any] = (
            {"max_query_len": batch.max_query_len, "max_seq_len": batch.max_seq_len}
            if self.k_cache.is_cuda
            else {}
        )
        if self.problem.variant == CHUNKED:
            bounds["is_chunked"] = True
        if self.problem.softcap:
            bounds["softcap"] = self.problem.softcap
        if self.sinks is not None:
            bounds["sinks"] = self.sinks
        requests = batch.block_tables, batch.query_start_loc, batch.seq_lens
        options = self.scale, self.problem.sliding_window, self.k_scale, self.v_scale
        return self._attend(q, self.k_cache, self.v_cache, *requests, *options, **bounds)


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU, zeros whose pages the system provides at first use; torch.zeros writes them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
