"""All tests that need a GPU, up to their first use of one, on a machine that has none:

    python tests/gpu_dry_run.py [--every] [FILES ...]

Each file is collected as tests/gpu_tests.py does it: a process of its own with the same options,
plugins and import path. Every test must find its fixtures. Of each test function the first set of
parameters is run (--every: all of them): torch says that there are two H100s, and a test ends where
it, or a process that it started, initialises CUDA. What fails before is printed. Exit code 0:
nothing failed.
"""

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_tests import ROOT, Job, Outcome, gpu_files, name_of, read_events, report_of, tell

FIRST_USE = "first use of a GPU"
# How torch and a program that link no CUDA driver say the same.
ALSO_FIRST_USE = ("without ATen_cuda library", "cudaMalloc: CUDA driver version is insufficient")
NUM_GPUS = 2
SECONDS_PER_FILE = 240
EVERY_VARIABLE = "GPU_DRY_RUN_EVERY"


class FirstUse(pytest.skip.Exception):
    """Skips the test. No `except Exception` of what is tested takes it for a failure of its own."""


# ---------------------------------------------------------------- inside every process


def pretend_gpus() -> None:
    """Called by torch when it is imported, in child processes too."""
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # computes on the CPU
        return

    def stopper() -> Callable[..., None]:  # one for each function: torch keeps rules by identity
        def stop(*_given: object) -> None:
            raise FirstUse(FIRST_USE)

        return stop

    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30,
                          multi_processor_count=132)  # fmt: skip
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: NUM_GPUS
    torch.cuda.get_device_properties = lambda device=None: gpu
    torch.cuda.get_device_capability = lambda device=None: (gpu.major, gpu.minor)
    torch.cuda.get_device_name = lambda device=None: gpu.name
    for name in ("init", "set_device", "_lazy_init"):
        setattr(torch.cuda, name, stopper())


# ---------------------------------------------------------------- inside pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tells of fixtures that no file defines, also where tests are skipped."""
    seen: set[str] = set()
    kept = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        missing = set(item.fixturenames) - {"request", *item._fixtureinfo.name2fixturedefs}
        if missing:
            message = f"fixture not found: {', '.join(sorted(missing))}"
            tell(test=item.nodeid.partition("::")[2], kind="error", message=message)
        elif function not in seen or EVERY_VARIABLE in os.environ:
            seen.add(function)
            kept.append(item)
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """A test is skipped where a process that it started came to its first use of a GPU."""
    report = yield
    text = "\n".join([report.longreprtext, *(text for _, text in report.sections)])
    if report.failed and (
        any(sign in text for sign in (FIRST_USE, *ALSO_FIRST_USE))
        or set(re.findall(r"Module has no function '(\w+)'", text)) & gpu_functions()
    ):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {FIRST_USE}")
    return report


def gpu_functions() -> set[str]:
    """What a native library that is built without CUDA lacks."""
    sources = (ROOT / "csrc" / "bindings").glob("*.cu")
    exported = re.compile(r"TVM_FFI_DLL_EXPORT_TYPED_FUNC\((\w+)")
    return {name for file in sources for name in exported.findall(file.read_text())}


# ---------------------------------------------------------------- the whole


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="all where none is named")
    parser.add_argument("--every", action="store_true", help="all sets of parameters")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.every:
        os.environ[EVERY_VARIABLE] = "1"
    preload()
    outcomes: dict[str, Outcome] = {}
    running: dict[int, tuple[Job, Path, float]] = {}
    waiting = [Job(file.resolve(), 0, 1) for file in args.files or gpu_files()][::-1]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_entry_point(folder)
        while waiting or running:
            if waiting and len(running) < args.jobs:
                job = waiting.pop()
                events = folder / f"{len(waiting)}-{job.file.stem}.jsonl"
                running[start(job, events)] = job, events, time.monotonic()
                continue
            pid, status = os.wait()
            with contextlib.suppress(ProcessLookupError):  # what it started
                os.killpg(pid, signal.SIGKILL)
            job, events, begin = running.pop(pid)
            outcome = ended(job, events, os.waitstatus_to_exitcode(status))
            outcome.seconds = time.monotonic() - begin
            outcomes[name_of(job.file)] = outcome
    print("\n".join(report_of(outcomes)))
    return int(not outcomes or any(outcome.wrong for outcome in outcomes.values()))


def preload() -> None:
    """Imports what takes seconds and is not ours, once for all processes."""
    import torch._dynamo  # noqa: F401
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    for name in ("hypothesis", "triton", "tvm_ffi"):
        with contextlib.suppress(ImportError):
            __import__(name)


def write_entry_point(folder: Path) -> None:
    """What makes torch call `pretend_gpus` in every process that has `folder` on its path."""
    info = folder / "pretended_gpus-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pretended_gpus\nVersion: 1\n")
    entry = "[torch.backends]\npretended_gpus = gpu_dry_run:pretend_gpus\n"
    (info / "entry_points.txt").write_text(entry)


def start(job: Job, events: Path) -> int:
    """A process that runs the tests of a file; returns its id."""
    if pid := os.fork():
        return pid
    os.setsid()
    signal.alarm(SECONDS_PER_FILE)
    log = os.open(events.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= job.environment(events)
    os.environ["PYTHONPATH"] += f"{os.pathsep}{events.parent}"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    sys.path[:1] = os.environ["PYTHONPATH"].split(os.pathsep)
    pretend_gpus()
    code = 70
    try:
        code = pytest.main([*job.pytest_words(), "-p", "gpu_dry_run"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(job: Job, events: Path, code: int) -> Outcome:
    outcome = read_events(events, f"{name_of(job.file)}::")
    if code not in (0, 1, 5) or not sum(outcome.counts.values()):
        log = " ".join(events.with_suffix(".log").read_text(errors="replace").split())
        outcome.wrong[job.name] = f"exit code {code}: {outcome.unread or log[-300:]}"
    return outcome


if __name__ == "__main__":
    sys.exit(main())
