"""Where the time of decode steps goes, by layer and kernel.

On a GPU steps run as they are served, from CUDA graphs, first without the profiler and then with
it. A kernel of a graph does not say which layer launched it. So one step runs without graphs, with
a marker around every layer, and tells the layers of the n-th launch of each kernel. On the CPU,
where layers compute when they are called, they are timed themselves.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from vllm.errors import ConfigError
from vllm.kernels.report.roofline import KernelTime
from vllm.platforms.streams import in_turn
from vllm.worker.kernel_spans import Span, in_order, own_nanoseconds, recording, spans_of, waiting
from vllm.worker.layer_marks import DeviceMarkers, HostClock, marked
from vllm.worker.model_runner import ModelRunner

_WARM_UP_STEPS = 4
_EAGER_STEPS = 3
MORE_STEPS = 3 * _WARM_UP_STEPS + _EAGER_STEPS + 1
"""Steps besides those that are asked for, at most: of each request as many tokens."""


@dataclass(frozen=True)
class StepProfile:
    """Microseconds of a step, of which the host waited wait_us for the device, and of a step
    without CUDA graphs, None on the CPU. idle_us: of a step under the profiler, when no kernel
    runs. kernels: () where they were not asked for. context: keys of each request, the mean of the
    timed steps."""

    step_us: float
    wait_us: float
    context: float
    eager_step_us: float | None = None
    idle_us: float = 0.0
    kernels: tuple[KernelTime, ...] = ()


def profile_decode(
    runner: ModelRunner,
    step: Callable[[], object],
    waited: Callable[[], float],
    num_steps: int,
    by_kernel: bool,
) -> StepProfile:
    """step: makes the next step of requests that all decode; at most num_steps twice and MORE_STEPS
    are made. waited: seconds in which the host has waited for results of steps so far. ConfigError
    where the profiler does not work."""
    is_gpu = runner.device.type == "cuda"
    _repeat(step, _WARM_UP_STEPS)
    clock, first, before = HostClock(), _mean_keys(runner) + 1, waited()
    with marked(runner.model, clock) if by_kernel and not is_gpu else nullcontext():
        step_us = _step_us(step, num_steps)
    wait_us = (waited() - before) / num_steps * 1e6
    timed = StepProfile(step_us, wait_us, (first + _mean_keys(runner)) / 2)
    if not by_kernel or not is_gpu:
        return replace(timed, kernels=_layer_times(clock, num_steps))
    with recording():  # the first one takes seconds to begin, in which clocks fall
        pass
    _repeat(step, _WARM_UP_STEPS)
    with recording() as recorded:
        _repeat(step, num_steps)
    spans = spans_of(recorded)
    if not spans:
        raise ConfigError(
            "torch's profiler recorded no kernels of this GPU: CUPTI cannot be used here, or "
            "another profiler is attached; without --roofline steps are timed alone"
        )
    with without_graphs(runner):
        _repeat(step, _WARM_UP_STEPS)
        eager_us = _step_us(step, _EAGER_STEPS)
        markers = DeviceMarkers()
        with recording() as recorded, in_turn(), marked(runner.model, markers):
            _repeat(step, 1)
    known = layers_of_kernels(spans_of(recorded), markers.labels)
    kernels = kernel_times(spans, known, num_steps)
    _, idle, _ = waiting(spans, 0, 0)
    idle_us = idle / num_steps / 1e3
    return replace(timed, eager_step_us=eager_us, idle_us=idle_us, kernels=kernels)


def _repeat(step: Callable[[], object], count: int) -> None:
    """All that was launched has ended before and after."""
    _synchronize()
    for _ in range(count):
        step()
    _synchronize()


def _step_us(step: Callable[[], object], count: int) -> float:
    _synchronize()
    start = time.perf_counter()
    _repeat(step, count)
    return (time.perf_counter() - start) / count * 1e6


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _mean_keys(runner: ModelRunner) -> float:
    rows = list(runner.batch.row_of.values())
    return float(runner.batch.num_computed[rows].mean())


@contextmanager
def without_graphs(runner: ModelRunner) -> Iterator[None]:
    """Steps run eagerly within it, and as before after it."""
    kept = runner._graphs, runner._prompt_graphs
    runner.drop_graphs()
    try:
        yield
    finally:
        runner._graphs, runner._prompt_graphs = kept


# ---------------------------------------------------------------- which layer


def _layer_times(clock: HostClock, num_steps: int) -> tuple[KernelTime, ...]:
    return tuple(
        KernelTime(label, "", seconds / num_steps * 1e6, clock.calls[label] / num_steps)
        for label, seconds in clock.seconds.items()
    )


def layers_of_kernels(spans: Iterable[Span], labels: Sequence[str]) -> dict[str, list[str]]:
    """By the name of a kernel, the layer of each of its launches in a step. spans: of a step on one
    stream, with a marker before what each of `labels` is of. {} where a marker is missing."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    label, following = "", iter(labels)
    num_markers = 0
    for span in in_order(spans):
        if DeviceMarkers.KERNEL in span.name:
            label = next(following, "")
            num_markers += 1
        else:
            found[span.name].append(label)
    return dict(found) if num_markers == len(labels) else {}


def kernel_times(
    spans: Iterable[Span], known: dict[str, list[str]], num_steps: int
) -> tuple[KernelTime, ...]:
    """spans: of num_steps steps. known: as `layers_of_kernels`. A kernel that is launched more or
    less often than there has the layer "", unless all its launches there are of one."""
    own = list(own_nanoseconds(spans))
    counts = Counter(name for name, _ in own)
    seen: Counter[str] = Counter()
    ns: Counter[tuple[str, str]] = Counter()
    launches: Counter[tuple[str, str]] = Counter()
    for name, nanoseconds in own:
        layers = known.get(name, [])
        layer = ""
        if layers and counts[name] == num_steps * len(layers):
            layer = layers[seen[name] % len(layers)]
        elif len(set(layers)) == 1:
            layer = layers[0]
        seen[name] += 1
        ns[layer, name] += nanoseconds
        launches[layer, name] += 1
    return tuple(
        KernelTime(*key, total / num_steps / 1e3, launches[key] / num_steps)
        for key, total in ns.items()
    )
