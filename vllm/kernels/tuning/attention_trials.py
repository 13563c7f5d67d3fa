"""Checks and times attention over a paged KV cache, as the engine calls it for a step.

Layers of a model share one batch, and of a kernel that the host plans one plan, while each has a
cache of its own; so do the copies that are timed in a row here. Decodes read batches as a captured
graph holds them. Times are the device's on a GPU: what the host plans, once a step for all layers,
and what goes to the device for that is not in them. The cache is not written.
"""

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.kernels import registry
from vllm.kernels.cache_numerics import attention_comparison, batch_of
from vllm.kernels.evidence.steps import Step
from vllm.kernels.select.problem import AttentionProblem
from vllm.kernels.tuning.clocks import (
    Runs,
    Steps,
    bytes_to_read,
    make_clock,
    make_pool,
    measured_in_turns,
)
from vllm.kernels.tuning.jobs import Job, Turns
from vllm.ops import torch_ops
from vllm.ops.paged_attention import PagedAttention
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import dtype_of

BLOCK_SIZE = 16  # tokens of a page: the engine's default
# What a captured graph of decodes is made for, whatever its requests have.
MAX_MODEL_LEN = 32768
_MAX_LAYERS = 64


def checked(job: Job, device: torch.device) -> Steps:
    """The relative error of the comparison that a start makes; then signs of life after a first
    call of each step, which may compile. WrongResultError as of that comparison."""
    problem = job.problem
    assert isinstance(problem, AttentionProblem)
    yield "comparison", attention_comparison(problem, job.backend, BLOCK_SIZE, device)()
    for name in job.tokens:
        StepCase(problem, Step.parse(str(name)), device, num_layers=1).runs(job.backend)[0]()
        if device.type == "cuda":
            torch.cuda.synchronize()
        yield name, None


def timed(turns: Turns, device: torch.device) -> Steps:
    """What each kernel takes (`Measured`), until the seconds are over."""
    end = time.monotonic() + turns.seconds
    for name in turns.tokens:
        yield from _timed_step(turns, str(name), device)
        if time.monotonic() > end:
            return


def _timed_step(turns: Turns, name: str, device: torch.device) -> Steps:
    problem, step = turns.problem, Step.parse(name)
    assert isinstance(problem, AttentionProblem)
    layers = min(_MAX_LAYERS, cdiv(bytes_to_read(device), step.bytes_of_cache(problem)))
    case, pool, clocks = StepCase(problem, step, device, layers), make_pool(device), {}
    for job in turns.jobs:
        if name in job.tokens:
            clocks[job.backend, "us"] = make_clock(case.runs(job.backend), device, pool)
            yield name, None
    yield from measured_in_turns(name, clocks)


class StepCase:
    """A step with the caches of some layers, whose pages are shuffled."""

    def __init__(
        self, problem: AttentionProblem, step: Step, device: torch.device, num_layers: int
    ):
        self._problem = problem
        generator = torch.Generator(device).manual_seed(0)
        counts = [cdiv(keys, BLOCK_SIZE) for _, keys in step.requests]
        shuffled = torch.randperm(sum(counts) + 1, generator=generator, device=device)
        self._batch = batch_of(step.requests, shuffled[:-1].split(counts), shuffled[-1], BLOCK_SIZE)
        self._host = self._batch.host
        if device.type == "cuda" and not step.prompt:
            self.read_as_captured()
        self._caches = [self._cache(len(shuffled), device, generator) for _ in range(num_layers)]
        heads, dtype = (problem.num_heads, problem.num_kv_heads), dtype_of(problem.dtype)
        self._q, self._kv = (
            torch.randn(
                step.num_tokens, count, problem.head_dim, generator=generator, device=device
            ).to(dtype)
            for count in heads
        )

    def read_as_captured(self) -> None:
        """Bounds and block tables of a graph that serves requests of any length."""
        batch = self._batch
        width = cdiv(MAX_MODEL_LEN, BLOCK_SIZE)
        tables = torch.zeros_like(batch.block_tables[:, :1]).repeat(1, width)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        batch.block_tables, batch.max_seq_len, batch.host = tables, MAX_MODEL_LEN, None

    def _cache(
        self, num_pages: int, device: torch.device, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, the same in each page."""
        layer = PagedAttention(torch_ops.paged_attention, None, self._problem)
        layer.allocate(num_pages, BLOCK_SIZE, device)
        for cache in (layer.k_cache, layer.v_cache):
            page = torch.randn(cache.shape[1:], generator=generator, device=device).to(cache.dtype)
            cache.view(torch.uint8).copy_(page.view(torch.uint8))
        return layer.k_cache, layer.v_cache

    def runs(self, backend: str) -> Runs:
        """A call for each layer, two at least; planned, where the host plans."""
        made: list[PagedAttention] = []
        for k_cache, v_cache in self._caches:
            kernel: PagedAttention = registry.backend(backend).attention(self._problem, None)
            kernel.k_cache, kernel.v_cache = k_cache, v_cache
            made.append(kernel)
        given = self._q, self._kv, self._kv, self._batch
        planner: Any = made[0].planner
        if planner is not None and self._batch.host is None:
            # Makes the graph's buffers. It is not run by the plan of an earlier step of this size,
            # whose pages are gone.
            planner.runner(self._batch, BLOCK_SIZE)
            assert self._host is not None
            planner.plan_graph((*self._batch.block_tables.shape, BLOCK_SIZE), self._host)
        calls = [partial(kernel, *given) for kernel in made]
        return calls if len(calls) > 1 else calls * 2
