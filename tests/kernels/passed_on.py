"""Compares every kernel that can serve here with the reference, and records which passed:

    python tests/kernels/passed_on.py [--out FILE] [--jobs N] [--seconds S] [KERNEL ...]

KERNEL: `family/backend/format`; of those that are named nothing is recorded. FILE has an entry for
each architecture, of which that of this machine is written anew; by default it is the file of this
package, `vllm/kernels/evidence/ran_on.json`. The problems: tests/kernel_comparisons.py. Each kernel
runs in a child process, which a kernel may crash or hang; several run at a time. Exit code 0: every
kernel that can serve here passed.
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kernel_comparisons import Outcome, kernels  # noqa: E402

from vllm.kernels.jit.caches import use_caches  # noqa: E402
from vllm.kernels.select.spec import COMPILERS  # noqa: E402
from vllm.machine import BUILD, Device, Libs  # noqa: E402
from vllm.platforms.child import Child, ChildEndedError  # noqa: E402
from vllm.platforms.probe import device_name, probe_device, probe_libs  # noqa: E402
from vllm.utils.files import write_atomically  # noqa: E402

RECORD = ROOT / "vllm" / "kernels" / "evidence" / "ran_on.json"
COMMAND = "python tests/kernels/passed_on.py"


def run(
    names: Iterable[str],
    device: Device,
    libs: Libs,
    jobs: int,
    end: float,
    serve: str = "kernel_comparisons:serve",
) -> dict[str, Outcome]:
    """By name. What takes long to compile begins first. end: of time.monotonic(). serve: what a
    child runs."""
    known, order = kernels(), (*COMPILERS, "")
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in sorted(names, key=lambda name: order.index(known[name].spec.compiles)):
        waiting.put(name)
    found: dict[str, Outcome] = {}

    def work() -> None:
        child: Child | None = None
        try:
            while True:
                name = waiting.get_nowait()
                if time.monotonic() >= end:
                    found[name] = Outcome("not run", "time was up")
                    continue
                child = child or Child(serve, device, libs)
                found[name] = asked(child, name, end)
                if found[name].kind not in ("passed", "absent"):
                    child.close()  # it hangs, is gone, or has lost the GPU
                    child = None
        except queue.Empty:
            if child is not None:
                child.close()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def asked(child: Child, name: str, end: float) -> Outcome:
    begin = time.monotonic()
    try:
        child.send(name)
        outcome: Outcome = child.receive(max(0.0, end - begin))
        return outcome
    except TimeoutError:
        seconds = time.monotonic() - begin
        return Outcome("not run", "it was not over when time was up", seconds)
    except ChildEndedError as error:
        return Outcome("failed", f"its process {error}", time.monotonic() - begin)


def entry(found: dict[str, Outcome], libs: Libs) -> dict[str, Any]:
    """Of this machine in the record."""
    return {
        "machine": device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": COMMAND,
        "libs": sorted(
            f"{lib.name} {lib.version}"
            for lib in libs.libs
            if lib.name != BUILD and lib.version and not lib.broken
        ),
        "kernels": sorted(name for name, outcome in found.items() if outcome.kind == "passed"),
    }


def merged(record: dict[str, Any], arch: str, entry: dict[str, Any]) -> dict[str, Any]:
    """`record` with the entry in place of what it says of the architecture."""
    return dict(sorted((record | {arch: entry}).items()))


def table(found: dict[str, Outcome]) -> str:
    order = ("passed", "absent", "not run", "failed", "wrong")
    rows = sorted(found.items(), key=lambda row: (order.index(row[1].kind), row[0]))
    lines = [f"{o.kind:<8} {name:<36} {o.seconds:6.1f} s  {o.text}" for name, o in rows]
    counts = (f"{sum(o.kind == kind for o in found.values())} {kind}" for kind in order)
    return "\n".join([*lines, ", ".join(counts)])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="all where none is named")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--jobs", type=int, help="processes at a time (default: 3 on 4 cores)")
    parser.add_argument("--seconds", type=float, default=220, help="for all (default: 220)")
    args = parser.parse_args()
    if unknown := {*args.kernels} - {*kernels()}:
        parser.error(
            f"unknown kernels {', '.join(sorted(unknown))}: it takes family/backend/format"
        )
    begin = time.monotonic()
    device = probe_device()
    if device.kind == "cuda":
        use_caches()  # an engine finds there what compiles here
    libs = probe_libs()
    jobs = args.jobs or max(1, len(os.sched_getaffinity(0)) * 3 // 4)
    names = args.kernels or kernels()
    found = run(names, device, libs, jobs, begin + args.seconds)
    print(f"{device_name()} ({device}), {time.monotonic() - begin:.0f} s\n{table(found)}")
    if not args.kernels:
        record = json.loads(args.out.read_text()) if args.out.exists() else {}
        record = merged(record, device.arch, entry(found, libs))
        write_atomically(args.out, (json.dumps(record, indent=1) + "\n").encode())
    return int(any(o.kind in ("wrong", "failed", "not run") for o in found.values()))


if __name__ == "__main__":
    sys.exit(main())
