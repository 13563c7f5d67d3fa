"""Steps as captured CUDA graphs: one launch for a whole step of the model."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.logger import get_logger

logger = get_logger(__name__)

_WARM_UP_RUNS = 2
_FEW_SEQS = 8  # places in the smaller of the graphs for so many tokens of prompts

Shape = TypeVar("Shape", int, "PromptShape")


class PromptShape(NamedTuple):
    """Of a graph for steps with prompts: its tokens, and requests, of which the last is padding.
    There are more tokens than requests, by which kernels tell such a step from one of decoding."""

    tokens: int
    seqs: int


def bucket_sizes(max_batch: int) -> list[int]:
    """Batch sizes to capture: close together where padding costs most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, max_batch + 1, 64)]
    return sorted({size for size in sizes if size < max_batch} | {max_batch})


def prompt_shapes(max_tokens: int, max_seqs: int) -> list[PromptShape]:
    """Shapes to capture for steps of up to `max_tokens`, of few requests and of any number: the
    next larger one has at most half as many tokens again, from 128 on."""
    sizes = [size for power in range(5, 32) for size in (1 << power, 3 << (power - 1))]
    counts = {size for size in sizes if size < max_tokens and size not in (48, 96)}
    seqs = {min(_FEW_SEQS, max_seqs + 1), max_seqs + 1}
    counts = {count for count in counts | {max_tokens} if count > 1}  # 0 tokens: no shapes
    return sorted({PromptShape(count, min(n, count - 1)) for count in counts for n in seqs})


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


def captured_prompts(config: VllmConfig, is_eager: bool, is_planned: bool) -> list[PromptShape]:
    """What is captured of steps with prompts. is_eager: no step is; is_planned: the host plans
    attention for each."""
    scheduler = config.scheduler_config
    if not scheduler.max_prompt_graph_tokens:
        return []
    reasons = {
        "all steps do here": is_eager,
        "attention is planned on the host": is_planned,
        "engines in lock step have prompts of their own": config.parallel_config.is_in_lock_step,
    }
    if why := next((text for text, holds in reasons.items() if holds), ""):
        logger.warning("--max-prompt-graph-tokens: steps with prompts run eagerly: %s", why)
        return []
    return prompt_shapes(scheduler.max_prompt_graph_tokens, scheduler.max_num_seqs)


class CudaGraphs(Generic[Shape]):
    """Graphs of `compute(shape)` by shape: its result is that of a step.

    `compute` must read its inputs from memory that stays where it is. The largest shape is captured
    first: the smaller ones then fit into the memory it left in the pool, results too, which nobody
    reads any more when another graph of the pool runs. pool: of other graphs, to share. prepare:
    fills in inputs before a shape is captured.
    """

    def __init__(
        self,
        compute: Callable[[Shape], Tensor],
        shapes: Sequence[Shape],
        pool: Any = None,
        prepare: Callable[[Shape], object] = lambda shape: None,
    ):
        start = time.perf_counter()
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool = pool or torch.cuda.graph_pool_handle()
        for shape in sorted(shapes, reverse=True):
            prepare(shape)
            for _ in range(_WARM_UP_RUNS):  # whatever compiles or allocates at first use
                compute(shape)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Only this thread must not wait: NCCL's watchdog asks for the state of its events.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = compute(shape)
            self._graphs[shape] = graph, without_memory(result)
            del result
        self.shapes: list[Shape] = sorted(self._graphs)
        seconds = time.perf_counter() - start
        logger.info("Captured %d CUDA graphs in %.1f s", len(self._graphs), seconds)

    def replay(self, shape: Shape) -> Tensor:
        """Runs the graph of this shape; its result is valid until the next replay of any."""
        graph, result = self._graphs[shape]
        graph.replay()
        return result


def decode_shape(graphs: CudaGraphs[int], batch: int) -> int | None:
    """The captured size that holds `batch`; None where none does."""
    return next((size for size in graphs.shapes if size >= batch), None)


def prompt_shape(
    graphs: CudaGraphs[PromptShape], num_tokens: int, num_seqs: int
) -> PromptShape | None:
    """The smallest captured shape that holds a step, and a request of padding; None where none
    does."""
    fitting = (s for s in graphs.shapes if s.tokens >= num_tokens and s.seqs > num_seqs)
    return next(fitting, None)
