"""All tests that need a GPU, several at a time on one: `make test-gpu`, or

    python tests/gpu_tests.py [--jobs 6] [--minutes 8] [--out FILE] [FILES ...]

Each file of tests is cut into parts that run in processes of their own, the slowest files first.
FILE gets the machine, the versions, a line for each file and the names of what failed. Exit code 0:
everything passed in time. Needs pytest, and of this repository the package with its library.
As a plugin of pytest (`-p gpu_tests`) it keeps one part of the tests.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests/engine/gpu", "tests/kernels/gpu", "tests/distributed")
PART = "GPU_TESTS_PART"
# Into how many parts a file is cut; those that are not here, into one.
PARTS = {
    "test_architectures_on_gpu.py": 3,
    "test_choices_on_gpu.py": 2,
    "test_cuda_ops.py": 3,
    "test_formats_on_gpu.py": 3,
    "test_fp8_quant.py": 2,
    "test_moe_backends_on_gpu.py": 6,
    "test_nvfp4_quant.py": 2,
    "test_triton_attention.py": 2,
}
LIBRARIES = ("torch", "triton", "sgl-deep-gemm", "flashinfer-python")


def pytest_collection_modifyitems(config, items) -> None:
    """Every n-th test, of all that were collected."""
    index, count = map(int, os.environ.get(PART, "0/1").split("/"))
    kept = items[index::count]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@dataclass
class Outcome:
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    file: Path
    index: int
    count: int

    def run(self, folder: Path, end: float) -> Outcome:
        report = folder / f"{self.file.stem}-{self.index}.xml"
        words = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-m", "gpu"]
        words += ["-p", "gpu_tests", "-p", "no:cacheprovider", f"--junitxml={report}"]
        paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, PART: f"{self.index}/{self.count}", "OMP_NUM_THREADS": "2",
               "PYTHONPATH": os.pathsep.join(paths)}  # fmt: skip
        start = time.monotonic()
        log = report.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*words, str(self.file)], cwd=ROOT, env=env, stdout=output, stderr=output
            )
            try:
                process.wait(max(end - start, 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        outcome = Outcome(seconds=time.monotonic() - start)
        if report.exists():
            read_report(report, outcome)
        if not report.exists() or (process.returncode not in (0, 1, 5)):
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            reason = "out of time" if time.monotonic() >= end else f"exit code {process.returncode}"
            part = f"{self.file.name} {self.index + 1}/{self.count}"
            outcome.counts["unfinished parts"] += 1
            outcome.wrong.append(f"{part}: {reason}: {' '.join(last)[:200]}")
        return outcome


def read_report(report: Path, outcome: Outcome) -> None:
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag: child for child in case}
        kind = next((k for k in ("failure", "error", "skipped") if k in found), "passed")
        outcome.counts[kind] += 1
        if kind in ("failure", "error"):
            message = " ".join((found[kind].get("message") or "").split())[:300]
            outcome.wrong.append(f"{case.get('classname')}::{case.get('name')}: {message}")


def jobs_of(files: list[Path]) -> list[Job]:
    found = [
        Job(file, index, PARTS.get(file.name, 1))
        for file in files
        for index in range(PARTS.get(file.name, 1))
    ]
    return sorted(found, key=lambda job: -job.count)


def gpu_files() -> Iterator[Path]:
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).glob("test_*.py")):
            if "pytest.mark.gpu" in file.read_text():
                yield file


def machine() -> str:
    import torch

    versions = []
    for name in LIBRARIES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{' + '.join(names) or 'no GPU'}; {', '.join(versions)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time (default: 6)")
    parser.add_argument("--minutes", type=float, default=8, help="for all together (default: 8)")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-tests.txt")
    args = parser.parse_args()
    start = time.monotonic()
    end = start + 60 * args.minutes
    jobs = jobs_of([file.resolve() for file in args.files] or list(gpu_files()))
    outcomes: dict[str, Outcome] = defaultdict(Outcome)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(lambda job: job.run(Path(folder), end), jobs)
        for job, outcome in zip(jobs, results, strict=True):
            total = outcomes[job.file.relative_to(ROOT).as_posix()]
            total.counts += outcome.counts
            total.seconds += outcome.seconds
            total.wrong += outcome.wrong
    text = report_of(outcomes, time.monotonic() - start, args.jobs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text)
    print(text)
    return int(any(outcome.wrong for outcome in outcomes.values()))


def report_of(outcomes: dict[str, Outcome], seconds: float, num_jobs: int) -> str:
    total: Counter[str] = sum((o.counts for o in outcomes.values()), Counter())
    lines = [
        f"{machine()}; {datetime.now(UTC).date().isoformat()}",
        f"tests/gpu_tests.py, {num_jobs} processes at a time: {seconds:.0f} s, {said(total)}",
        "",
    ]
    for name, outcome in sorted(outcomes.items()):
        lines.append(f"{name}: {said(outcome.counts)}, {outcome.seconds:.0f} s")
        lines += [f"    {wrong}" for wrong in outcome.wrong]
    return "\n".join(lines) + "\n"


def said(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())) or "nothing"


if __name__ == "__main__":
    sys.exit(main())
