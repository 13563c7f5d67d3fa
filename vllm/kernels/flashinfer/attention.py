"""Paged attention by FlashInfer's wrappers, which the host plans once a step for all layers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.kernels.jit.flashinfer import watch_flashinfer
from vllm.kernels.select.problem import AttentionProblem
from vllm.ops.paged_attention import (
    AttentionBatch,
    CacheWriter,
    GraphShape,
    HostBatch,
    PagedAttention,
)
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import dtype_of

_bytes = partial(torch.empty, dtype=torch.uint8, device="cuda")
_WORKSPACE_BYTES = 128 << 20  # what the library's documentation recommends, and at times too few


class FlashInferAttention(PagedAttention):
    """Layers of one problem share a `Planner`, and so one plan a step."""

    planner: "Planner"

    def __init__(self, write: CacheWriter, problem: AttentionProblem):
        super().__init__(_no_attend, write, problem)
        self.planner = _planner(problem)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        self.write(k, v, batch)
        run = self.planner.runner(batch, self.k_cache.shape[1])
        if run is None:
            return torch.zeros_like(q)
        cache = self.k_cache, self.v_cache
        out: Tensor = run(q, cache, k_scale=self.k_scale, v_scale=self.v_scale)
        return out


def _no_attend(*_: object) -> Tensor:
    raise AssertionError("FlashInferAttention attends by its planner")


class Planner:
    """FlashInfer's wrappers for one problem: for prompts, for decoding, and for captured graphs.

    A plan is made on the host from lengths and block tables that the host knows, and goes to the
    device in stream order: nothing waits for the device. The captured graphs read buffers at fixed
    addresses, which `plan_graph` fills before each replay.
    """

    def __init__(self, problem: AttentionProblem):
        watch_flashinfer()
        _load_modules(problem)
        self._problem = problem
        self._library: Any = import_module("flashinfer")
        properties = torch.get_device_module("cuda").get_device_properties()
        self._num_sms: int = properties.multi_processor_count
        self._workspace = _bytes(workspace_bytes(problem, self._num_sms))
        self._prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend=_prefill_kind(problem)
        )
        self._decode = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )
        self._graphs: dict[GraphShape, _GraphedDecode] = {}
        self._planned: HostBatch | None = None
        self._copied = torch.Event(device="cuda")

    def runner(self, batch: AttentionBatch, block_size: int) -> Callable[..., Tensor] | None:
        """What computes this step, planned; None for padding, whose results mean nothing."""
        if batch.host is None:
            if batch.max_query_len > 1:
                return None
            size, max_blocks = batch.block_tables.shape
            return self._graph((size, max_blocks, block_size)).run
        wrapper = self._decode if batch.max_query_len == 1 else self._prefill
        if batch.host is not self._planned:
            self._planned = batch.host
            self._plan(wrapper, batch.host, block_size)
        run: Callable[..., Tensor] = wrapper.run
        return run

    def plan_graph(self, shape: GraphShape, host: HostBatch) -> None:
        self._copied.synchronize()
        self._graphs[shape].plan(host)
        self._copied.record()

    def _plan(self, wrapper: Any, host: HostBatch, block_size: int) -> None:
        # The library's pinned buffer may still be read by the copy of the plan before.
        self._copied.synchronize()
        indptr, indices, last = map(_pinned, ragged_pages(host, block_size))
        pages = indptr, indices.to("cuda", non_blocking=True), last
        queries = (_pinned(host.query_start_loc),) if wrapper is self._prefill else ()
        options = _plan_options(self._problem)
        if wrapper is self._prefill:
            options["causal"] = True
        wrapper.plan(*queries, *pages, *_sizes(self._problem), block_size, **options)
        self._copied.record()

    def _graph(self, shape: GraphShape) -> "_GraphedDecode":
        if shape not in self._graphs:
            # The largest graph comes first; smaller ones share what it needed.
            needed = workspace_bytes(self._problem, self._num_sms, shape[0])
            if needed > self._workspace.numel():
                self._workspace = _bytes(needed)
            self._copied.synchronize()
            self._graphs[shape] = _GraphedDecode(self._problem, self._workspace, shape)
            self._copied.record()
        return self._graphs[shape]


_planner = cache(Planner)


class _GraphedDecode:
    """One new token for each request, from buffers that a captured graph reads."""

    def __init__(self, problem: AttentionProblem, workspace: Tensor, shape: GraphShape):
        library: Any = import_module("flashinfer")
        self._plan_again = import_module("flashinfer.decode").fast_decode_plan
        self._problem = problem
        size, max_blocks, page = shape
        self._size, self._page = size, page
        lengths = size + 1, size * max_blocks, size
        self._buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in lengths]
        self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._buffers[0],
            paged_kv_indices_buffer=self._buffers[1],
            paged_kv_last_page_len_buffer=self._buffers[2],
            backend="fa2",
        )
        one_key = np.ones(size, np.int32)
        pages = ragged_pages(HostBatch(np.arange(size + 1), one_key, one_key[:, None] * 0), page)
        self._wrapper.plan(
            *(_pinned(x) for x in pages), *_sizes(problem), page, **_plan_options(problem)
        )
        self.run: Callable[..., Tensor] = self._wrapper.run

    def plan(self, host: HostBatch) -> None:
        """Free places have one key, of block 0."""
        num_free = self._size - len(host.seq_lens)
        lens = np.concatenate((host.seq_lens, np.ones(num_free, np.int64)))
        tables = np.pad(host.block_tables, ((0, num_free), (0, 0)))
        starts = np.arange(self._size + 1)
        pages = ragged_pages(HostBatch(starts, lens, tables), self._page)
        indptr, indices, last = map(_pinned, pages)
        for buffer, values in zip(self._buffers, (indptr, indices, last)):
            buffer[: len(values)].copy_(values, non_blocking=True)
        self._plan_again(
            self._wrapper, indptr, indices, last, *_sizes(self._problem), self._page,
            global_override_indptr_cpu=indptr, **_plan_options(self._problem),
        )  # fmt: skip


def workspace_bytes(problem: AttentionProblem, num_sms: int, graph_size: int = 0) -> int:
    """Bytes for the results of parts of requests: as the library's `PrefillPlan` (0.6.13,
    attention/scheduler.cuh) lays them out for any step, or for a captured graph of `graph_size`
    requests of one token.

    A float32 row with its logarithm for each row of a tile: of two tiles for every SM, and in a
    graph of one for each request at least. Without a graph a tile may be as high as prompts want.
    """
    group = problem.num_heads // problem.num_kv_heads
    rows, num_tiles = 128, 2 * num_sms // problem.num_kv_heads
    if graph_size:
        rows = 16 if group <= 16 else 64 if group <= 64 else 128
        num_tiles = max(num_tiles, cdiv(graph_size * group, rows) + graph_size)
    parts = problem.num_heads * num_tiles * rows * (problem.head_dim + 1) * 4
    return max(_WORKSPACE_BYTES, parts + 32)  # each of the two is aligned to 16 bytes


def ragged_pages(host: HostBatch, page: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the pages of each request begin [R + 1], all pages, and the keys in each last page."""
    counts = -(-host.seq_lens // page)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    indices = host.block_tables[np.arange(host.block_tables.shape[1]) < counts[:, None]]
    last = host.seq_lens - (counts - 1) * page
    return tuple(x.astype(np.int32) for x in (indptr, indices, last))  # type: ignore[return-value]


def _pinned(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32, copy=False)).pin_memory()


def _sizes(problem: AttentionProblem) -> tuple[int, int, int]:
    return problem.num_heads, problem.num_kv_heads, problem.head_dim


def _plan_options(problem: AttentionProblem) -> dict[str, Any]:
    return {
        "window_left": problem.sliding_window - 1 if problem.sliding_window else -1,
        "q_data_type": dtype_of(problem.dtype),
        "kv_data_type": dtype_of(problem.format),
        "sm_scale": problem.softmax_scale,
    }


def _prefill_kind(problem: AttentionProblem) -> str:
    """FlashAttention 3 needs a query in the type of the cache, on Hopper. It compiles for a minute
    and a half, and was run for heads of 128 alone."""
    is_hopper = torch.get_device_module("cuda").get_device_capability() == (9, 0)
    is_plain = problem.format == problem.dtype and not problem.sliding_window
    return "fa3" if is_hopper and is_plain and problem.head_dim == 128 else "fa2"


def _load_modules(problem: AttentionProblem) -> None:
    """Compiles what is not in the cache: half a minute to a minute and a half, side by side."""
    load: Any = import_module("flashinfer.prefill").get_batch_prefill_module
    query, cached = dtype_of(problem.dtype), dtype_of(problem.format)
    has_window = problem.sliding_window > 0
    sizes = problem.head_dim, problem.head_dim
    options = query, cached, query, torch.int32, *sizes, 0, has_window, False, False
    with ThreadPoolExecutor() as threads:
        kinds = {"fa2", _prefill_kind(problem)}
        list(threads.map(lambda kind: load(kind, *options), kinds))
