"""What a streamed token costs the processes that answer HTTP, in CPU time.

usage: python benchmarks/serving/bench_api.py [MODEL] [--case=FLAGS ...] [--out FILE] [-- FLAG ...]

Starts `vllm serve MODEL FLAG ...` and stops it; beside it one with the further FLAGS of each case,
in rounds that take turns, so that what else the machine does falls on all. The default is a model
of two small layers with random weights: the engine leaves the machine to the server.

CLIENTS connections stream chats of TOKENS tokens at once, ROUNDS times after one that does not
count. CPU time is that of the server's process, or of all API processes with --api-server-count:
user and system, as Linux counts it. Others who use the machine make it more: the least of the
rounds is told beside the median. A client that reads late gets several tokens in one event: events
are counted too.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench_fairness import served

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from entrypoints.tiny_model import write_tiny_llama

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def api_pids(port: int) -> list[int]:
    """The processes that have the listening socket."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows
               if row[3] == "0A" and row[1].endswith(f":{port:04X}")}  # fmt: skip
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            links = {os.readlink(file) for file in (folder / "fd").iterdir()}
        except OSError:  # of others, or gone
            continue
        if links & sockets:
            found.append(int(folder.name))
    return found


async def stream(port: int, path: str, body: bytes) -> int:
    """The number of events of one answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    text = await reader.read()
    writer.close()
    if b"data: [DONE]" not in text:
        raise RuntimeError(f"no stream: {text[:300]!r}")
    return text.count(b"data: {")


def body_of(args: argparse.Namespace, number: int) -> bytes:
    words = f"Count from {number}."
    fields: dict[str, Any] = {"max_tokens": args.tokens, "ignore_eos": True, "stream": True}
    if args.path.endswith("/chat/completions"):
        fields["messages"] = [{"role": "user", "content": words}]
    else:
        fields["prompt"] = words
    return json.dumps(fields).encode()


async def measured(port: int, args: argparse.Namespace) -> dict[str, float]:
    """One round."""
    pids, num_tokens = api_pids(port), args.clients * args.tokens
    before, start = cpu_seconds(pids), time.perf_counter()
    bodies = (body_of(args, number) for number in range(args.clients))
    events = await asyncio.gather(*(stream(port, args.path, body) for body in bodies))
    seconds, wall = cpu_seconds(pids) - before, time.perf_counter() - start
    return {
        "us_per_token": seconds / num_tokens * 1e6,
        "us_per_event": seconds / sum(events) * 1e6,
        "tokens_per_s": num_tokens / wall,
        "processes": len(pids),
    }


def rounds(model: str, args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Of each case, the rounds that count."""
    cases = ["", *args.case]
    rows: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    with ExitStack() as stack:
        ports = {}
        for case in cases:
            url = stack.enter_context(served(model, [*flags, *case.split()]))
            ports[case] = urlsplit(url).port or 80
        for turn in range(args.rounds + 1):
            for case, port in ports.items():
                row = asyncio.run(measured(port, args))
                rows[case] += [row] if turn else []
    return rows


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    medians = {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]}
    return {**medians, "least_us_per_token": round(min(row["us_per_token"] for row in rows), 1)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--case", action="append", default=[], help="Flags, as one word.")
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--out", type=Path)
    mark = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:mark]), sys.argv[mark + 1 :]
    load = Path("/proc/loadavg").read_text().split()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = rounds(args.model or str(write_tiny_llama(Path(folder))), args, flags)
    figures = {case: summary(own) for case, own in rows.items()}
    for case, figure in figures.items():
        print(f"{case or 'as it is':30} {json.dumps(figure)}")
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, CPU, {os.cpu_count()} cores",
        "load_before": load,
        "packages": {name: _version(name) for name in ("uvicorn", "uvloop", "httptools")},
        "figures": figures,
        "rounds": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
