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
from vllm.formats.act_scheme import ActScheme
from vllm.kernels.backends import emulation
from vllm.kernels.interface import LinearKernel, LinearTensors
from vllm.kernels.make_kernel import make_linear
from vllm.kernels.select.decision import Candidate, Decision
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.reason import DEFAULT_ORDER
from vllm.kernels.tuning.workers import MACHINE, Job
from vllm.machine import Device
from vllm.ops import nvfp4, torch_ops
from vllm.ops.packed_weights import element_values
from vllm.ops.scale_rounding import requantised
from vllm.platforms.child import requests
from vllm.utils import fp8
from vllm.utils.torch_utils import dtype_of

# Largest relative Frobenius error against the reference, by output dtype: it covers the rounding of
# the output and of activations halfway between two FP8 values.
MAX_ERROR = {"bf16": 6e-3, "fp16": 2e-3, "fp32": 2e-4}
# Rows of NaN behind the input: a kernel that reads past its end has NaN in its output.
_NUM_POISONED_ROWS = 160
_MAX_COPIES, _CPU_CACHE_BYTES = 64, 64 << 20
_MIN_REPLAYS, _MAX_REPLAYS, _REPLAY_SECONDS = 5, 20, 0.05
_GRAPH_SECONDS = 0.02


class WrongResultError(Exception):
    """The kernel's result differs from the reference."""


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
        self.tensors = random_tensors(job.problem, device)
        self.kernels = [self._kernel(self.tensors)]
        size = max(*job.tokens, *job.gate) + _NUM_POISONED_ROWS
        dtype = dtype_of(job.problem.dtype)
        self.x = torch.randn(size, job.problem.k, device=device, dtype=torch.float32).to(dtype)

    def _kernel(self, tensors: LinearTensors) -> LinearKernel:
        problem, candidate = self.subject
        device = Device(self.device.type)
        decision = Decision(problem, device, candidate.backend, DEFAULT_ORDER, (candidate,))
        return make_linear(decision, tensors)

    def check(self, job: Job) -> Iterator[tuple[int, float]]:
        """The relative error for each of the gate's token counts, then 0 for a first call of each
        count to be timed, which may compile. WrongResultError for a large error or NaN."""
        for num_tokens in job.gate:
            yield num_tokens, self._error(num_tokens)
        for num_tokens in job.tokens:
            self.kernels[0](self.x[:num_tokens])
            self._synchronize()
            yield num_tokens, 0.0

    def _error(self, num_tokens: int) -> float:
        problem, candidate = self.subject
        x = self.x[: num_tokens + _NUM_POISONED_ROWS].clone()
        x[num_tokens:] = float("nan")
        _poison_free_memory(num_tokens * max(problem.n, problem.k), self.x)
        out = self.kernels[0](x[:num_tokens]).float()
        self._synchronize()
        if not bool(torch.isfinite(out).all()):
            rows, columns = (~torch.isfinite(out)).nonzero()[0].tolist()
            raise WrongResultError(
                f"NaN or infinity at [{rows}, {columns}] for M = {num_tokens}, with NaN beside x"
            )
        expected = reference(candidate, self.tensors, x[:num_tokens])
        error = float((out - expected).norm() / expected.norm())
        limit = MAX_ERROR[problem.dtype]
        if not error <= limit:
            raise WrongResultError(
                f"relative error {error:.2e} for M = {num_tokens}, more than {limit:.0e}"
            )
        return error

    def measure(self, job: Job) -> Iterator[tuple[int, float]]:
        """(tokens, microseconds of a call), until the seconds of the job are over; with negative
        tokens for a call with quantised input, where the kernel takes that."""
        self._add_copies()
        end = time.monotonic() + job.seconds
        for num_tokens in job.tokens:
            x = self.x[:num_tokens]
            timed = _cuda_microseconds if self.device.type == "cuda" else _cpu_microseconds
            yield num_tokens, timed([partial(kernel, x) for kernel in self.kernels])
            quantised = _quantised(self.kernels[0], x)
            if quantised is not None:
                yield -num_tokens, timed([partial(kernel, quantised) for kernel in self.kernels])
            if time.monotonic() > end:
                return

    def _add_copies(self) -> None:
        weight_bytes = self.tensors.weight.nbytes
        copies = min(_MAX_COPIES, max(2, -(-2 * _cache_bytes(self.device) // weight_bytes)))
        while len(self.kernels) < copies:
            weight = self.tensors.weight.clone()
            self.kernels.append(self._kernel(replace(self.tensors, weight=weight)))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _quantised(kernel: LinearKernel, x: Tensor) -> Any:
    """x quantised by the preceding layer; None for a kernel that does not take that."""
    asks = getattr(kernel, "input_quant", None)
    quant = asks(x.shape[0]) if asks is not None else None
    return None if quant is None else quant.quantise(x)


def _cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_CACHE_BYTES
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _poison_free_memory(num_elements: int, like: Tensor) -> None:
    """NaN in memory that the allocator is likely to return next, for outputs and scales."""
    for size in (num_elements, num_elements // 2, num_elements // 32):
        torch.full((size + 1,), float("nan"), device=like.device, dtype=like.dtype)


# ---------------------------------------------------------------- reference


# Of static activation schemes: with these, 6 is the largest value, the most of a Gaussian of 2^30
# numbers.
_INPUT_SCALES = {
    ActScheme.STATIC_TENSOR: 6 / fp8.FP8_MAX,
    ActScheme.NVFP4_GROUP16: 6 / (nvfp4.E4M3_MAX * nvfp4.E2M1_MAX),
}


def random_tensors(problem: LinearProblem, device: torch.device, seed: int = 0) -> LinearTensors:
    """A random weight of the problem's format, as a checkpoint stores it."""
    generator = torch.Generator(device).manual_seed(seed)
    found: dict[str, Any] = {"shard_rows": (problem.n,)}
    shapes = problem.weight.shapes((problem.n,), problem.k)
    for tensor in problem.weight.description.tensors:
        if tensor.is_optional:
            continue
        dtype, size = getattr(torch, tensor.dtype), shapes[tensor.name]
        if dtype == torch.uint8:
            values = torch.randint(0, 256, size, generator=generator, device=device)
        elif tensor.one_per == "code":
            values = torch.randn(size, generator=generator, device=device)
        else:
            values = torch.rand(size, generator=generator, device=device) + 0.5
        found[tensor.name] = values.to(dtype)
    scheme = next((act for act in problem.act if act in _INPUT_SCALES), None)
    if scheme is not None:
        found["input_scale"] = torch.tensor(_INPUT_SCALES[scheme], device=device)
    return LinearTensors(problem.weight, **found)


def reference(candidate: Candidate, tensors: LinearTensors, x: Tensor) -> Tensor:
    """x [M, K] times the weight in float32, with activations rounded as the kernel rounds them."""
    if candidate.rescales:
        tensors = requantised(tensors, candidate.scales, x.dtype)
    values = element_values(tensors) if tensors.is_packed else tensors.weight
    packed = torch_ops.pack_linear(values, tensors.row_scales(), tensors.block_k)
    rounded: Tensor = emulation.rounding(candidate, tensors)(x)
    return rounded @ packed.dequantize().T


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
