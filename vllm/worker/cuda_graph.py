"""Decoding as captured CUDA graphs: one launch for a whole step of the model."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from vllm.logger import get_logger

logger = get_logger(__name__)

_WARM_UP_RUNS = 2


def bucket_sizes(max_batch: int) -> list[int]:
    """Batch sizes to capture: close together where padding costs most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, max_batch + 1, 64)]
    return sorted({size for size in sizes if size < max_batch} | {max_batch})


def without_memory(tensor: Tensor) -> Tensor:
    """The same numbers at the same place on a GPU, which do not keep the memory from others."""
    whole_numbers = {1: "|i1", 2: "<i2", 4: "<i4"}[tensor.itemsize]  # the protocol has no bfloat16
    place = {
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
        "typestr": whole_numbers,
        "data": (tensor.data_ptr(), False),
        "version": 3,
    }
    interface = SimpleNamespace(__cuda_array_interface__=place)
    alias = torch.as_tensor(interface, device=tensor.device).view(tensor.dtype)
    assert alias.data_ptr() == tensor.data_ptr(), "a copy would never change"
    return alias


class CudaGraphs:
    """Graphs of `compute(batch size) -> logits` by batch size, sharing one memory pool.

    `compute` must read its inputs from memory that stays where it is. The largest batch is
    captured first: the smaller ones then fit into the memory it left in the pool, logits too, which
    nobody reads any more when another graph runs.
    """

    def __init__(self, compute: Callable[[int], Tensor], max_batch: int):
        start = time.perf_counter()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(bucket_sizes(max_batch)):
            for _ in range(_WARM_UP_RUNS):  # whatever compiles or allocates at first use
                compute(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Only this thread must not wait: NCCL's watchdog asks for the state of its events.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = compute(size)
            self._graphs[size] = graph, without_memory(logits)
            del logits
        self._sizes = sorted(self._graphs)
        seconds = time.perf_counter() - start
        logger.info("Captured %d CUDA graphs in %.1f s", len(self._graphs), seconds)

    def bucket(self, batch: int) -> int | None:
        """The captured size that holds `batch`; None where none does."""
        return next((size for size in self._sizes if size >= batch), None)

    def replay(self, size: int) -> Tensor:
        """Runs the graph of this size; logits [size, vocab], valid until the next replay of any."""
        graph, logits = self._graphs[size]
        graph.replay()
        return logits
