"""CUDA graphs: one launch for a whole step of the model."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.config.speculative import STEP_DRAFT_TOKENS
from vllm.logger import get_logger
from vllm.utils.math_utils import cdiv

logger = get_logger(__name__)

_WARM_UP_RUNS = 2
_FEW_SEQS = 8  # requests in the smaller of the two prompt graphs of a size
_LONG = 2048  # tokens of the largest of these, from which on there is one
_HOST_BOUND = 0.9  # share of a step for which the host has launched it, from which it is too slow
_VERIFIED = 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512  # tokens of steps that verify drafts
# Most tokens of one request in such a shape: more are not computed by the kernels of decode steps
# (BY_TOKEN in `kernels/triton/delta_rule_kernels.py`), and take the shapes of prompts.
MOST_VERIFIED = 8

Shape = TypeVar("Shape", int, "PromptShape")


class PromptShape(NamedTuple):
    """Tokens, most tokens of one request, and requests of a graph for steps that are not one token
    of each request. There are more tokens than requests: that is how kernels tell such a step from
    a decode step. Of shapes with as many tokens, that of the shorter requests is the lesser."""

    tokens: int
    longest: int
    seqs: int

    def holds(self, tokens: int, longest: int, seqs: int) -> bool:
        """Whether such a step fits, with its padding in requests of `self.longest` tokens."""
        num_padding = self.tokens - tokens
        has_room = num_padding >= 0 and seqs + cdiv(num_padding, self.longest) <= self.seqs
        return has_room and longest <= self.longest


def bucket_sizes(max_batch: int) -> list[int]:
    """Decode batch sizes to capture: denser where padding costs most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, max_batch + 1, 64)]
    return sorted({size for size in sizes if size < max_batch} | {max_batch})


def prompt_shapes(max_tokens: int, max_seqs: int, num_drafts: int = 0) -> list[PromptShape]:
    """Shapes to capture for steps of up to `max_tokens`, for few requests and for `max_seqs`. From
    128 tokens on, consecutive sizes differ by a factor of at most 1.5, and of 1.25 where kernels
    take so long that padding costs more than a graph; there are those for few requests alone then.
    num_drafts: draft tokens of a request and step at most; more than verification shapes hold take
    a smaller size too."""
    sizes = [size for power in range(5, 32) for size in (1 << power, 3 << (power - 1))]
    sizes += [parts * _LONG // 4 << power for power in range(20) for parts in (5, 7)]
    sizes += [2 * MOST_VERIFIED] if num_drafts >= MOST_VERIFIED else []
    counts = {size for size in sizes if size < max_tokens and size not in (48, 96)}
    seqs = {min(_FEW_SEQS, max_seqs + 1), max_seqs + 1}
    counts = {count for count in counts | {max_tokens} if count > 1}  # 0 tokens: no shapes
    shapes = {
        PromptShape(count, count, min(n, count - 1))
        for count in counts
        for n in (seqs if count <= _LONG else [min(seqs)])
    }
    return sorted(shapes)


def verification_shapes(max_tokens: int, max_seqs: int, num_drafts: int) -> list[PromptShape]:
    """Shapes to capture for steps in which each of up to `max_seqs` requests has one token and up
    to `num_drafts` draft tokens, as far as a request has few.

    Every such step of n requests and t <= T tokens fits the shape of T tokens, where L are those of
    its longest request, if one has a draft: then t > n, so that n <= m = min(max_seqs, T - 1), and
    the padding takes n + ceil((T - t) / L) <= n + ceil((T - 1 - n) / L) requests. That grows with
    n, and is what the shape has for n = m: no more than T - 1, and than 2 * max_seqs, as T is at
    most L * max_seqs.
    """
    most_of_one = min(num_drafts + 1, MOST_VERIFIED)
    most = min(max_tokens, max_seqs * most_of_one, max_seqs + STEP_DRAFT_TOKENS)
    sizes = {size for size in _VERIFIED if size < most} | {most}
    shapes = []
    for tokens in sorted(size for size in sizes if size > 1):
        longest, seqs = min(most_of_one, tokens), min(max_seqs, tokens - 1)
        shapes.append(PromptShape(tokens, longest, seqs + cdiv(tokens - 1 - seqs, longest)))
    return shapes


def pays_off(shape: PromptShape, launching: float, whole: float) -> bool:
    """Whether to capture a shape for prompts. The padding of a long one takes as long as it saves,
    unless the host is slower than the device."""
    return shape.tokens <= _LONG or launching > _HOST_BOUND * whole


def without_memory(tensor: Tensor) -> Tensor:
    """A view of the tensor's GPU memory that does not keep the memory allocated."""
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


def step_shapes(config: VllmConfig, max_tokens: int) -> list[PromptShape]:
    """Shapes to capture for steps of up to `max_tokens` that are not one token of each request."""
    max_seqs, drafts = config.scheduler_config.max_num_seqs, config.speculative_config
    if drafts is None:
        return prompt_shapes(max_tokens, max_seqs)
    num_drafts = drafts.num_speculative_tokens
    most_drafting = min(max_seqs, drafts.disable_by_batch_size or max_seqs)
    verifying = verification_shapes(max_tokens, most_drafting, num_drafts)
    return sorted({*prompt_shapes(max_tokens, max_seqs, num_drafts), *verifying})


def captured_prompts(config: VllmConfig, is_eager: bool, is_planned: bool) -> list[PromptShape]:
    """Shapes of steps with prompts to capture. is_eager: no step is captured. is_planned: the host
    plans attention for every step."""
    max_tokens = config.scheduler_config.max_prompt_graph_tokens
    if not max_tokens:
        return []
    if config.parallel_config.num_engine_ranks > 1:  # each would time the longer ones for itself
        max_tokens = min(max_tokens, _LONG)
    reasons = {
        "all steps are eager": is_eager,
        "attention is planned on the host": is_planned,
        "data-parallel ranks in lock-step have different prompts": (
            config.parallel_config.is_in_lock_step
        ),
    }
    if why := next((text for text, holds in reasons.items() if holds), ""):
        logger.info("Steps with prompts run without CUDA graphs: %s", why)
        return []
    return step_shapes(config, max_tokens)


class CudaGraphs(Generic[Shape]):
    """CUDA graphs of `compute(shape)`, by shape.

    `compute` must read its inputs from persistent memory. The largest shape is captured first: the
    smaller ones reuse its memory in the pool, results included, which are read before the next
    replay. pool: a memory pool to share with other graphs. prepare: fills in the inputs before a
    shape is captured. pays: whether a shape is worth a graph, by the seconds that the host takes to
    launch it, and that pass until it is done.
    """

    def __init__(
        self,
        compute: Callable[[Shape], Tensor],
        shapes: Sequence[Shape],
        pool: Any = None,
        prepare: Callable[[Shape], object] = lambda shape: None,
        pays: Callable[[Shape, float, float], bool] = lambda shape, launching, whole: True,
    ):
        start = time.perf_counter()
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool = pool or torch.cuda.graph_pool_handle()
        for shape in sorted(shapes, reverse=True):
            prepare(shape)
            for _ in range(_WARM_UP_RUNS):  # whatever compiles or allocates at first use
                begin = time.perf_counter()
                compute(shape)
                launching = time.perf_counter() - begin
                torch.cuda.synchronize()
            if not pays(shape, launching, time.perf_counter() - begin):
                continue
            graph = torch.cuda.CUDAGraph()
            # Thread-local: NCCL's watchdog thread queries its events meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = compute(shape)
            self._graphs[shape] = graph, without_memory(result)
            del result
        self.shapes: list[Shape] = sorted(self._graphs)
        seconds = time.perf_counter() - start
        logger.info("Captured %d CUDA graphs in %.1f s", len(self._graphs), seconds)

    def fitting(self, fits: Callable[[Shape], bool]) -> Shape | None:
        """The smallest captured shape that fits a step; None where none does."""
        return next(filter(fits, self.shapes), None)

    def replay(self, shape: Shape) -> Tensor:
        """Runs the graph of this shape; the result is valid until the next replay of any graph."""
        graph, result = self._graphs[shape]
        graph.replay()
        return result
