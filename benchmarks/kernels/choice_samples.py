"""Fresh times of every kernel that can run some layers here, by the trials of `vllm kernels tune`,
with the sample of every replay.

`serve` is what the tuner's child processes run: the trials, which also write their samples to the
file that BENCH_SAMPLES names.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from vllm.kernels.evidence.tables import Chip, Entry, Table
from vllm.kernels.tuning import clocks, trials, tune
from vllm.kernels.tuning.clocks import median_and_noise, sample_in_turns
from vllm.kernels.tuning.jobs import Job, Measured, Turns
from vllm.kernels.tuning.progress import Progress

VARIABLE = "BENCH_SAMPLES"
SERVE = "choice_samples:serve"


class Series(NamedTuple):
    """Microseconds of one kernel's replays. field: of `Entry`, which keeps their median."""

    size_key: str
    backend: str
    field: str
    tokens: int
    samples: tuple[float, ...]


def serve(channel: Connection, device_kind: str) -> None:
    kept: dict[tuple[str, str], list[float]] = {}

    def sample(timed: Mapping[Any, Any], samples: dict[Any, list[float]]) -> Iterator[None]:
        kept.clear()
        yield from sample_in_turns(timed, samples)
        kept.update(samples)

    timed = trials.timed

    def recorded(turns: Turns, device: Any) -> Iterator[tuple[int, Any]]:
        for num_tokens, found in timed(turns, device):
            if isinstance(found, Measured):
                own = {field: us for (name, field), us in kept.items() if name == found.backend}
                _append(turns.problem.size_key, found.backend, num_tokens, own)
            yield num_tokens, found

    clocks.sample_in_turns, trials.timed = sample, recorded
    trials.serve(channel, device_kind)


def _append(
    size_key: str, backend: str, num_tokens: int, samples: Mapping[str, Sequence[float]]
) -> None:
    with open(os.environ[VARIABLE], "a") as file:
        for field, us in samples.items():
            file.write(json.dumps([size_key, backend, field, num_tokens, us]) + "\n")


def measure(
    jobs: Sequence[Job], chip: Chip, name: str, limits: tune.Limits
) -> tuple[list[Series], list[Job]]:
    """Checks and times `jobs`; without those whose kernel failed, which the output says, and those
    that no time or memory was left for, which it returns."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "samples")
        file.touch()
        os.environ[VARIABLE] = str(file)
        run = tune.Run(
            chip.device, Table(chip, name), Path(folder, "table.json"), limits,
            _progress(limits), SERVE,
        )  # fmt: skip
        left = run.carry_out(jobs)
        lines = map(json.loads, file.read_text().splitlines())
        found = [Series(*place, tuple(us)) for *place, us in lines]
    # What was timed in turns and again alone counts once, as the tuner counts it.
    return list({one[:4]: one for one in found}.values()), left


def _progress(limits: tune.Limits) -> Progress:
    return Progress(sys.stdout, limits.total and time.monotonic() + limits.total)


def table_of(
    series: Sequence[Series],
    chip: Chip,
    name: str,
    changed: Callable[[Series], Sequence[float]] = lambda one: one.samples,
) -> Table:
    """The table that the tuner would write. changed: the samples that count."""
    us: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for one in series:
        fields = us.setdefault((one.size_key, one.backend), {"noise": {}})
        median, noise = median_and_noise(changed(one))
        fields.setdefault(one.field, {})[one.tokens] = median
        fields["noise"][one.tokens] = max(noise, fields["noise"].get(one.tokens, 0.0))
    table = Table(chip, name, source="fresh")
    for (size_key, backend), fields in us.items():
        times = {field: tuple(sorted(by_tokens.items())) for field, by_tokens in fields.items()}
        table = table.with_entry(size_key, backend, Entry("", "", **{"us": (), **times}))
    return table
