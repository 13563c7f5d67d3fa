"""Checks and times one linear kernel on this device, as the engine would run it.

`serve` runs in a child process of `vllm kernels tune`, which a kernel may crash or hang.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from vllm.errors import is_out_of_memory
from vllm.kernels.interface import LinearKernel, LinearTensors
from vllm.kernels.make_kernel import make_linear
from vllm.kernels.numerics import LinearCase, WrongResultError
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.reason import DEFAULT_ORDER
from vllm.kernels.tuning.workers import MACHINE, Job
from vllm.machine import Device
from vllm.platforms.child import requests
from vllm.utils.math_utils import cdiv

_MAX_COPIES, _CPU_CACHE_BYTES = 64, 64 << 20
_MIN_REPLAYS, _MAX_REPLAYS, _REPLAY_SECONDS = 5, 20, 0.05
_GRAPH_SECONDS = 0.02


def serve(channel: Connection, device_kind: str) -> None:
    """Runs in the child: carries out jobs, and returns after the first that fails (`Worker`)."""
    with torch.inference_mode():
        trial: Trial | None = None
        has_begun = False
        for job in requests(channel):
            try:
                if not has_begun:
                    torch.empty(1, device=device_kind)  # a failure here is not the kernel's
                    channel.send(("begun", 0, 0.0))
                    has_begun = True
                if trial is None or trial.subject != (job.problem, job.candidate):
                    trial = None  # its memory goes before the next takes some
                    if device_kind == "cuda":
                        torch.cuda.empty_cache()
                    trial = Trial(job, torch.device(device_kind))
                steps = trial.measure(job) if job.is_timed else trial.check(job)
                for num_tokens, value in steps:
                    channel.send(("at", num_tokens, value))
                channel.send(("done", 0, 0.0))
            except ConnectionError:
                raise
            except WrongResultError as error:
                channel.send(("failed", "numerics", str(error)))
                return
            except Exception as error:  # whatever else a kernel raises speaks against it
                is_kernels = has_begun and not is_out_of_memory(error)
                why = "library" if is_kernels else MACHINE
                text = " ".join(str(error).split())[:300]
                channel.send(("failed", why, f"{type(error).__name__}: {text}"))
                return


class Trial:
    """One kernel over random weights, with enough copies of them to defeat the caches."""

    def __init__(self, job: Job, device: torch.device):
        self.device = device
        self.subject = (job.problem, job.candidate)
        max_tokens = max(*job.tokens, *job.gate)
        self.case = LinearCase.of(job.problem, job.candidate, device, max_tokens)
        self.kernels = [self._kernel(self.case.tensors)]

    def _kernel(self, tensors: LinearTensors) -> LinearKernel:
        problem, candidate = self.subject
        device = Device(self.device.type)
        decision = Decision(problem, device, candidate.backend, DEFAULT_ORDER, (candidate,))
        return make_linear(decision, tensors)

    def check(self, job: Job) -> Iterator[tuple[int, float]]:
        """The relative error for each of the gate's token counts, then 0 for a first call of each
        count to be timed, which may compile. WrongResultError for a large error or NaN."""
        for num_tokens in job.gate:
            expected = self.case.expected(num_tokens)
            yield num_tokens, self.case.error(self.kernels[0], num_tokens, expected)
        for num_tokens in job.tokens:
            self.kernels[0](self.case.x[:num_tokens])
            self._synchronize()
            yield num_tokens, 0.0

    def measure(self, job: Job) -> Iterator[tuple[int, float]]:
        """(tokens, microseconds of a call), until the seconds of the job are over; with negative
        tokens for a call with quantised input, where the kernel takes that."""
        self._add_copies()
        end = time.monotonic() + job.seconds
        for num_tokens in job.tokens:
            x = self.case.x[:num_tokens]
            timed = _cuda_microseconds if self.device.type == "cuda" else _cpu_microseconds
            yield num_tokens, timed([partial(kernel, x) for kernel in self.kernels])
            quantised = _quantised(self.kernels[0], x)
            if quantised is not None:
                yield -num_tokens, timed([partial(kernel, quantised) for kernel in self.kernels])
            if time.monotonic() > end:
                return

    def _add_copies(self) -> None:
        cache_bytes = _CPU_CACHE_BYTES
        if self.device.type == "cuda":
            cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        copies = min(_MAX_COPIES, max(2, cdiv(2 * cache_bytes, self.case.tensors.weight.nbytes)))
        while len(self.kernels) < copies:
            weight = self.case.tensors.weight.clone()
            self.kernels.append(self._kernel(replace(self.case.tensors, weight=weight)))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _quantised(kernel: LinearKernel, x: Tensor) -> Any:
    """x quantised by the preceding layer; None for a kernel that does not take that."""
    asks = getattr(kernel, "input_quant", None)
    quant = asks(x.shape[0]) if asks is not None else None
    return None if quant is None else quant.quantise(x)


# ---------------------------------------------------------------- time


def _cuda_microseconds(runs: Sequence[Callable[[], Any]]) -> float:
    """Median time of one call, in CUDA graphs of calls with different weights, so that none is in
    the L2 cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        runs[0]()
        begin, end = _events()
        begin.record(stream)
        runs[1]()
        end.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    end.synchronize()
    once = max(begin.elapsed_time(end) * 1e-3, 1e-6)
    runs = runs[: max(2, int(_GRAPH_SECONDS / once))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    samples: list[float] = []
    while len(samples) < _MIN_REPLAYS or (
        len(samples) < _MAX_REPLAYS and sum(samples) * len(runs) * 1e-6 < _REPLAY_SECONDS
    ):
        begin, end = _events()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(runs))
    return statistics.median(samples)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _cpu_microseconds(runs: Sequence[Callable[[], Any]]) -> float:
    """Median time of one call, over different weights in turn."""
    runs[0]()
    samples: list[float] = []
    while len(samples) < _MIN_REPLAYS or (
        len(samples) < 2 * _MAX_REPLAYS and sum(samples) * 1e-6 < _REPLAY_SECONDS
    ):
        run = runs[len(samples) % len(runs)]
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    return statistics.median(samples)
