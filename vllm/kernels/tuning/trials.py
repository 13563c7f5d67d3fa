"""Checks and times kernels on this device, as the engine would run them.

`serve` runs in a child process of `vllm kernels tune`, which a kernel may crash or hang.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from vllm.errors import is_of_machine
from vllm.kernels.activations import input_quant
from vllm.kernels.interface import LinearTensors, MoETensors
from vllm.kernels.make_kernel import make_linear, make_moe
from vllm.kernels.numerics import LinearCase, MoECase, WrongResultError
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.problem import AttentionProblem, Measurable, MoEProblem
from vllm.kernels.select.reason import DEFAULT_ORDER
from vllm.kernels.tuning import attention_trials
from vllm.kernels.tuning.clocks import (
    Steps,
    bytes_to_read,
    make_clock,
    make_pool,
    measured_in_turns,
)
from vllm.kernels.tuning.jobs import Job, Turns
from vllm.kernels.tuning.routing import EVEN, SKEWED, draws
from vllm.kernels.tuning.workers import MACHINE
from vllm.machine import Device
from vllm.platforms.child import requests
from vllm.utils.math_utils import cdiv

# Copies of one weight, so that none is in the cache when it is read: experts are large.
_MAX_COPIES, _MAX_COPIES_OF_EXPERTS = 64, 2
# Batches of choices of experts; one rank's share of one batch is a matter of luck.
_MIN_DRAWS, _MAX_DRAWS = 8, 32


def serve(channel: Connection, device_kind: str) -> None:
    """Runs in the child (`Worker`): carries out requests; returns after the first that fails."""
    with torch.inference_mode():
        has_begun = False
        for request in requests(channel):
            try:
                if not has_begun:
                    torch.empty(1, device=device_kind)  # a failure here is not the kernel's
                    channel.send(("begun", 0, None))
                    has_begun = True
                for step in _steps(request, torch.device(device_kind)):
                    channel.send(("at", *step))
                if device_kind == "cuda":
                    torch.cuda.empty_cache()  # others may need it while this process waits
                channel.send(("done", 0, None))
            except ConnectionError:
                raise
            except WrongResultError as error:
                channel.send(("failed", "numerics", str(error)))
                return
            except Exception as error:  # whatever else a kernel raises speaks against it
                why = "library" if has_begun and not is_of_machine(error) else MACHINE
                text = " ".join(str(error).split())[:300]
                channel.send(("failed", why, f"{type(error).__name__}: {text}"))
                return


def _steps(request: Job | Turns, device: torch.device) -> Steps:
    of_attention = isinstance(request.problem, AttentionProblem)
    if isinstance(request, Turns):
        return (attention_trials.timed if of_attention else timed)(request, device)
    return (attention_trials.checked if of_attention else checked)(request, device)


def _case(job: Job, device: torch.device, max_tokens: int) -> Any:
    kind = MoECase if isinstance(job.problem, MoEProblem) else LinearCase
    return kind.of(job.problem, job.candidate, device, max_tokens)  # type: ignore[arg-type]


def _kernel(job: Job, tensors: Any, device: torch.device) -> Any:
    one = (job.candidate,)
    decision = Decision(job.problem, Device(device.type), job.backend, DEFAULT_ORDER, one)
    make: Any = make_moe if isinstance(job.problem, MoEProblem) else make_linear
    return make(decision, tensors)


# ---------------------------------------------------------------- checks


def checked(job: Job, device: torch.device) -> Steps:
    """The relative error for each of the gate's token counts; then signs of life after a first call
    of each count to be timed, which may compile. WrongResultError for a large error or NaN."""
    case = _case(job, device, job.max_tokens)
    kernel = _kernel(job, case.tensors, device)
    for num_tokens in job.gate:
        expected = case.expected(num_tokens)
        yield num_tokens, case.error(kernel, num_tokens, expected)
    for num_tokens in job.counts:
        for (routing,) in _routings(job.problem, num_tokens, 1, device).values():
            kernel(case.x[:num_tokens], *routing)
        if device.type == "cuda":
            torch.cuda.synchronize()
        yield num_tokens, None


# ---------------------------------------------------------------- times


def timed(turns: Turns, device: torch.device) -> Steps:
    """What each kernel takes (`Measured`), until the seconds are over."""
    problem = turns.problem
    counts = [column for column in turns.tokens if isinstance(column, int)]
    case = _case(turns.jobs[0], device, max(counts))
    copies = _copies(case.tensors, device)
    kernels: dict[Job, list[Any]] = {}
    for job in turns.jobs:
        kernels[job] = [_kernel(job, tensors, device) for tensors in copies]
        yield 0, None
    end = time.monotonic() + turns.seconds
    for num_tokens in counts:
        x, pool, clocks = case.x[:num_tokens], make_pool(device), {}
        count = _num_calls(problem, num_tokens, copies, device)
        routings = _routings(problem, num_tokens, count, device)
        for job, own in kernels.items():
            runs = _runs(own, problem, x, routings) if num_tokens in job.tokens else {}
            for field, calls in runs.items():
                clocks[job.backend, field] = make_clock(calls, device, pool)
                yield num_tokens, None
        yield from measured_in_turns(num_tokens, clocks)
        if time.monotonic() > end:
            return


def _copies(tensors: LinearTensors | MoETensors, device: torch.device) -> list[Any]:
    """So many that the cache cannot hold them; experts are large, and each call reads others."""
    names: tuple[str, ...]
    if isinstance(tensors, MoETensors):
        names, least, most = ("gate_up", "down"), 1, _MAX_COPIES_OF_EXPERTS
    else:
        names, least, most = ("weight",), 2, _MAX_COPIES
    weights = {name: getattr(tensors, name) for name in names}
    size = sum(weight.nbytes for weight in weights.values())
    count = min(most, max(least, cdiv(bytes_to_read(device), size)))
    clones = [
        replace(tensors, **{name: weight.clone() for name, weight in weights.items()})
        for _ in range(count - 1)
    ]
    return [tensors, *clones]


def _num_calls(
    problem: Measurable, num_tokens: int, copies: list[Any], device: torch.device
) -> int:
    """Calls that differ in their weights, or in their choice of experts: more than the cache can
    hold what they read."""
    if not isinstance(problem, MoEProblem):
        return len(copies)
    experts: MoETensors = copies[0]
    of_one = (experts.gate_up.nbytes + experts.down.nbytes) / experts.num_experts
    pairs = max(1, num_tokens * problem.top_k / problem.cut_experts)
    read = int(min(experts.num_experts, pairs) * of_one)
    return min(_MAX_DRAWS, max(_MIN_DRAWS, cdiv(bytes_to_read(device), read)))


def _routings(
    problem: Measurable, num_tokens: int, count: int, device: torch.device
) -> dict[str, list[Any]]:
    """What each of `count` calls takes besides tokens, by the prefix of the fields that their times
    have: of experts even choices and skewed ones."""
    if not isinstance(problem, MoEProblem):
        return {"": [()] * count}
    return {
        prefix: draws(problem, num_tokens, count, exponent, device)
        for prefix, exponent in (("", EVEN), ("skewed_", SKEWED))
    }


def _runs(
    kernels: Sequence[Any],
    problem: Measurable,
    x: torch.Tensor,
    routings: dict[str, list[Any]],
) -> dict[str, list[Any]]:
    """Calls by the field of `Entry` that keeps their times: of floats, and of quantised tokens
    where some layer of the size hands them over and the kernel takes them."""
    given: dict[str, Any] = {"us": x}
    comes_as_floats = isinstance(problem, MoEProblem) and problem.cut_experts > 1
    quant = None if comes_as_floats else input_quant(kernels[0], x.shape[0])
    if quant is not None:
        given["quantised_us"] = quant.quantise(x)
    return {
        prefix + field: [
            partial(kernels[i % len(kernels)], value, *routing) for i, routing in enumerate(calls)
        ]
        for prefix, calls in routings.items()
        for field, value in given.items()
    }
