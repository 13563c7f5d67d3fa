"""How soon a stopped or killed process of the demo model's engine is noticed and replaced.

usage: python benchmarks/serving/bench_supervision.py --out FILE [--model FOLDER]

Starts two servers, the second with two ranks (pipeline stages), and counts seconds.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx

DEAD_AFTER = 10
COMMAND = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


@contextmanager
def served(model: str | None, *flags: str) -> Iterator[tuple[httpx.Client, int]]:
    """A client of a server that is ready, and the server's pid."""
    command = [*COMMAND, *([model] if model else []), "--host", "127.0.0.1", "--port", "0",
               "--dead-after", str(DEAD_AFTER), *flags]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(rb"http://\S+(?=/v1)", line):
                with httpx.Client(base_url=found[0].decode(), timeout=120) as client:
                    yield client, process.pid
                return
        raise RuntimeError("the server did not start")
    finally:
        process.kill()
        process.wait()


def descendants(pid: int) -> dict[int, bytes]:
    """Command lines of all processes below `pid`."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            found |= {child: Path(f"/proc/{child}/cmdline").read_bytes(), **descendants(child)}
    return found


def one(pid: int, mark: bytes) -> int:
    (found,) = (child for child, words in descendants(pid).items() if mark in words)
    return found


def until(client: httpx.Client, is_well: bool) -> float:
    """Seconds until /health says so."""
    start = time.monotonic()
    while (client.get("/health").status_code == 200) != is_well:
        time.sleep(0.02)
    return time.monotonic() - start


def answers(client: httpx.Client) -> bool:
    body = {"prompt": "Once", "max_tokens": 1, "temperature": 0}
    return client.post("/v1/completions", json=body).status_code == 200


def until_answer(client: httpx.Client) -> float:
    start = time.monotonic()
    while not answers(client):
        time.sleep(0.02)
    return time.monotonic() - start


def of_process(client: httpx.Client, pid: int, mark: bytes) -> dict[str, float]:
    """Seconds, for a process whose command line has `mark`."""
    figures = {}
    os.kill(one(pid, mark), signal.SIGSTOP)
    figures["stopped_named_s"] = until(client, False)
    os.kill(one(pid, mark), signal.SIGCONT)
    figures["continued_well_s"] = until(client, True)
    assert answers(client)
    os.kill(one(pid, mark), signal.SIGKILL)
    figures["killed_to_answer_s"] = until(client, False) + until_answer(client)
    os.kill(one(pid, mark), signal.SIGSTOP)
    figures["stopped_to_answer_s"] = until_answer(client)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="Default: the demo model.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    figures: dict[str, Any] = {"dead_after_s": DEAD_AFTER}
    with served(args.model) as (client, pid):
        figures["engine"] = of_process(client, pid, b"spawn_main")
    with served(args.model, "-pp", "2") as (client, pid):
        figures["rank_of_two"] = of_process(client, pid, b"vllm-rank-1")
    told = {
        "command": "python benchmarks/serving/bench_supervision.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_before": f"{load:.2f}",
        "figures": figures,
    }
    args.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
