"""All tests that need a GPU, several at a time on each: `make test-gpu`, or

    python tests/gpu_tests.py [--out FILE] [--before FILE] [--only-failed FILE] [--logs FOLDER]
        [FILES ...]

Each file of tests is cut into parts that run in processes of their own; the parts that took longest
in the results `--before` come first. FILE gets the machine, the versions, a line for each file, the
names of what failed or was not run, why tests were skipped, and the slowest tests, with how much of
them was the start of engines. It is written anew whenever a part ends, and when time is up or
SIGTERM comes. Exit code 0: everything passed in time.

Three processes run on four cores, and one for each 8 GiB of the GPUs at most; --jobs says another
number. Of several GPUs each process sees all, in turn another one first: there it computes what
takes one. Needs pytest, and of this repository the package with its library. As a plugin of pytest
(`-p gpu_tests`) it keeps one part of the tests and writes down what becomes of each. Without a GPU
`tests/gpu_dry_run.py` runs the same files in the same way, up to their first use of one.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Into how many parts a file is cut; those that are not here, into one.
PARTS = {
    "test_architectures_on_gpu.py": 6,
    "test_choices_on_gpu.py": 3,
    "test_cuda_ops.py": 3,
    "test_first_calls_on_gpu.py": 4,
    "test_formats_on_gpu.py": 8,
    "test_fp8_quant.py": 2,
    "test_humming.py": 6,
    "test_kernel_probes_on_gpu.py": 8,
    "test_moe_backends_on_gpu.py": 6,
    "test_nccl_on_gpus.py": 4,
    "test_no_compile_on_gpu.py": 3,
    "test_nvfp4_quant.py": 2,
    "test_triton_attention.py": 3,
}
# Those that wait for compilers; first where nothing has been measured.
COMPILING = (
    "test_flashinfer_attention.py",
    "test_flashinfer_on_gpu.py",
    "test_deep_gemm_blocks.py",
    "test_deep_gemm_h100.py",
    "test_kernel_probes_on_gpu.py",
    "test_no_compile_on_gpu.py",
)
LIBRARIES = ("torch", "triton", "sgl-deep-gemm", "flashinfer-python", "transformers")
GIB_PER_JOB = 8  # what one process takes of the GPUs at most, on average
NUM_SLOWEST = 20
JOB_VARIABLE = "GPU_TESTS"  # what a process has to do, for the plugin in it
STOPPED = threading.Event()


# ---------------------------------------------------------------- inside pytest


@pytest.hookimpl(trylast=True)  # of those that are marked, ordered by what they share
def pytest_collection_modifyitems(config, items) -> None:
    """Keeps one stretch of several, of all tests or of those that are named."""
    job = json.loads(os.environ.get(JOB_VARIABLE, "{}"))
    if not job:
        return
    index, count, only = job["index"], job["count"], job["only"]
    kept = [item for item in items if not only or item.nodeid.partition("::")[2] in only]
    kept = kept[len(kept) * index // count : len(kept) * (index + 1) // count]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_collectreport(report) -> None:
    """A file that cannot be imported, or that skips all of its tests."""
    if report.skipped:
        tell(test="all tests", kind="skipped", message=reason_of(report))
    elif report.failed:
        tell(unread=" ".join(report.longreprtext.split())[-300:])


def pytest_collection_finish(session) -> None:
    tell(tests=[item.nodeid.partition("::")[2] for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    tell(begun=nodeid.partition("::")[2])


def pytest_runtest_logreport(report) -> None:
    test = report.nodeid.partition("::")[2]
    if report.when == "call" or not report.passed:
        kind = report.outcome if report.when == "call" or report.skipped else "error"
        tell(test=test, kind=kind, message=reason_of(report))
    log = report.capstderr if report.when == "call" else ""
    start = sum(map(float, re.findall(r"Ready after ([\d.]+) s", log)))
    tell(timed=test, seconds=report.duration, start=start)


def reason_of(report) -> str:
    """Why a test failed or was skipped, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message if crash else report.longrepr or "")
    if isinstance(report.longrepr, tuple):  # (file, line, reason)
        message = report.longrepr[2].partition(": ")[2]
    return " ".join(message.split())[:300]


def tell(**event) -> None:
    if job := json.loads(os.environ.get(JOB_VARIABLE, "{}")):
        with open(job["events"], "a") as file:
            file.write(json.dumps(event) + "\n")


# ---------------------------------------------------------------- parts of files


@dataclass
class Outcome:
    """skips: reasons. wrong: by test (or part) why it did not pass. times: of tests, and of starts
    in them. unread: why the file could not be imported. is_known: which tests there are."""

    counts: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    wrong: dict[str, str] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    unread: str = ""
    is_known: bool = False

    def add(self, other: "Outcome") -> None:
        self.counts += other.counts
        self.skips += other.skips
        self.seconds += other.seconds
        self.wrong |= other.wrong
        self.times |= other.times


@dataclass(frozen=True)
class Job:
    """only: the tests to run, `name[parameters]`; all of the file where there are none."""

    file: Path
    index: int
    count: int
    only: tuple[str, ...] = ()

    def run(self, folder: Path, end: float, gpus: str = "") -> Outcome:
        """gpus: those it sees, as CUDA_VISIBLE_DEVICES takes them; "": all that we do."""
        events = folder / f"{self.file.stem}-{self.index}.jsonl"
        events.unlink(missing_ok=True)
        log = events.with_suffix(".log")
        words = [sys.executable, "-m", "pytest", *self.pytest_words()]
        env = self.environment(events) | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        begin = time.monotonic()
        if STOPPED.is_set() or begin >= end:
            wrong = {f"{self.name}, all tests": "not run"}
            return Outcome(Counter({"unfinished parts": 1}), wrong=wrong)
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
            )
            while process.poll() is None and time.monotonic() < end and not STOPPED.is_set():
                time.sleep(0.1)
            is_late = process.poll() is None
            with contextlib.suppress(ProcessLookupError):  # with what it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        outcome = read_events(events, f"{name_of(self.file)}::")
        outcome.seconds = time.monotonic() - begin
        if process.returncode not in (0, 1, 5):
            last = outcome.unread or " ".join(log.read_text(errors="replace").split("\n")[-3:])
            reason = "out of time" if is_late else f"exit code {process.returncode}"
            outcome.counts["unfinished parts"] += 1
            name = self.name if outcome.is_known else f"{self.name}, all tests"
            outcome.wrong[name] = f"{reason}: {last.strip()[-300:]}"
        return outcome

    def pytest_words(self) -> list[str]:
        return ["-q", "-m", "gpu", str(self.file), "-p", "gpu_tests", "-p", "no:cacheprovider"]

    def environment(self, events: Path) -> dict[str, str]:
        """events: where the plugin writes."""
        job = {"index": self.index, "count": self.count, "only": self.only, "events": str(events)}
        paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        # Without that cuBLAS variable older torch refuses deterministic products.
        return {"OMP_NUM_THREADS": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ,
                JOB_VARIABLE: json.dumps(job),
                "PYTHONPATH": os.pathsep.join(filter(None, paths))}  # fmt: skip

    @property
    def name(self) -> str:
        return f"{name_of(self.file)} part {self.index + 1} of {self.count}"


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)


def read_events(file: Path, prefix: str) -> Outcome:
    """What pytest told before it ended, or was ended. prefix: of the names of tests."""
    outcome, waiting, begun = Outcome(), [], ""
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:  # cut off with its process
            break
        waiting = event.get("tests", waiting)
        outcome.is_known |= "tests" in event
        begun = event.get("begun", begun)
        outcome.unread = event.get("unread", outcome.unread)
        if "test" in event:
            outcome.counts[event["kind"]] += 1
            waiting = [name for name in waiting if name != event["test"]]
            if event["kind"] in ("failed", "error"):
                outcome.wrong[prefix + event["test"]] = event["message"]
            elif event["kind"] == "skipped":
                outcome.skips[event["message"] or "no reason given"] += 1
        elif "timed" in event:
            times = outcome.times.setdefault(prefix + event["timed"], [0.0, 0.0])
            times[:] = times[0] + event["seconds"], times[1] + event["start"]
    for name in waiting:
        outcome.counts["not run"] += 1
        outcome.wrong[prefix + name] = (
            "it ran when its process ended" if name == begun else "not run"
        )
    return outcome


def gpu_files() -> Iterator[Path]:
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        is_marked = any(sign in text for sign in ("pytest.mark.gpu", "from triton_device import"))
        if is_marked and ("gpu_tests" not in text or file.parent.name == "gpu"):
            yield file


def jobs_of(files: list[Path], before: str, failed: str | None) -> list[Job]:
    """Longest first. before, failed: results of another run."""
    lines = re.findall(r"^(\S+\.py): .*?(\d+) s(?:,|$)", before, re.MULTILINE)
    seconds = {name: float(number) for name, number in lines}
    found = []
    for file in files:
        only = () if failed is None else not_passed(file, failed)
        if only is None:
            continue
        count = min(PARTS.get(file.name, 1), len(only) or sys.maxsize)
        found += [Job(file, index, count, only) for index in range(count)]

    def length(job: Job) -> float:
        guess = 1000.0 if job.file.name in COMPILING else 0.0
        return seconds.get(name_of(job.file), guess) / job.count

    return sorted(found, key=length, reverse=True)


def not_passed(file: Path, results: str) -> tuple[str, ...] | None:
    """Names of its tests; () where they are not known, None where all passed."""
    name = re.escape(name_of(file))
    if re.search(rf"^    {name} part .*, all tests\t", results, re.MULTILINE):
        return ()
    return tuple(re.findall(rf"^    {name}::(.*)\t", results, re.MULTILINE)) or None


# ---------------------------------------------------------------- the whole


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="all where none is named")
    parser.add_argument("--jobs", type=int, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=8, help="for all together (default: 8)")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-tests.txt")
    parser.add_argument("--before", type=Path, help="results to order by; those of this GPU if any")
    parser.add_argument("--only-failed", type=Path, help="results: run what did not pass there")
    parser.add_argument("--logs", type=Path, help="folder: keep what each process printed")
    args = parser.parse_args()
    begin = time.monotonic()
    gpus, names, default_jobs = look_around()
    num_jobs = args.jobs or default_jobs
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: STOPPED.set())
    kept = ROOT / "benchmarks" / "results"
    known = [args.before] if args.before else [*kept.glob("*/tests.txt")]
    before = next((t for t in (f.read_text() for f in known) if args.before or gpus in t), "")
    failed = args.only_failed.read_text() if args.only_failed else None
    jobs = jobs_of([file.resolve() for file in args.files] or [*gpu_files()], before, failed)
    outcomes: dict[str, Outcome] = defaultdict(Outcome)
    head = f"{gpus}; {versions()}; {datetime.now(UTC).date().isoformat()}\ntests/gpu_tests.py"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(num_jobs) as pool:
        folder, end = args.logs or Path(scratch), begin + 60 * args.minutes
        running = {
            pool.submit(job.run, folder, end, in_turn(names, turn)): job
            for turn, job in enumerate(jobs)
        }
        for count, future in enumerate(as_completed(running), 1):
            outcomes[name_of(running[future].file)].add(future.result())
            so_far = f"{count} of {len(jobs)} parts, {time.monotonic() - begin:.0f} s"
            lines = [f"{head}, {num_jobs} processes at a time: {so_far}", *report_of(outcomes)]
            args.out.write_text("\n".join(lines) + "\n")
    print(args.out.read_text())
    return int(not jobs or any(outcome.wrong for outcome in outcomes.values()))


def in_turn(gpus: list[str], turn: int) -> str:
    """All of them, another one first each turn; "" where there is no choice."""
    first = turn % max(1, len(gpus))
    return ",".join(gpus[first:] + gpus[:first]) if len(gpus) > 1 else ""


def look_around() -> tuple[str, list[str], int]:
    """What the GPUs are, what CUDA_VISIBLE_DEVICES calls them, and how many processes the machine
    takes."""
    import torch

    count = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    most = len(os.sched_getaffinity(0)) * 3 // 4
    if gpus:
        most = min(most, sum(gpu.total_memory for gpu in gpus) // (GIB_PER_JOB << 30))
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = given.split(",")[:count] if given else [str(i) for i in range(count)]
    return " + ".join(gpu.name for gpu in gpus) or "no GPU", names, max(1, most)


def versions() -> str:
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def report_of(outcomes: dict[str, Outcome]) -> Iterator[str]:
    yield said(sum((o.counts for o in outcomes.values()), Counter()))
    yield ""
    for name, outcome in sorted(outcomes.items()):
        start = sum(s for _, s in outcome.times.values())
        engines = f", {start:.0f} s of them the start of engines" if start else ""
        yield f"{name}: {said(outcome.counts)}, {outcome.seconds:.0f} s{engines}"
        yield from (f"    {wrong}\t{reason}" for wrong, reason in outcome.wrong.items())
        yield from (f"    {count} skipped: {reason}" for reason, count in outcome.skips.items())
    times = {name: t for outcome in outcomes.values() for name, t in outcome.times.items()}
    yield "\nslowest tests, in seconds, and of those the start of engines:"
    for name, (seconds, start) in sorted(times.items(), key=lambda t: -t[1][0])[:NUM_SLOWEST]:
        yield f"  {seconds:5.1f} {start:5.1f}  {name}"


def said(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())) or "nothing"


if __name__ == "__main__":
    sys.exit(main())
