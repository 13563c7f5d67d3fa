"""What a streamed token costs the processes that answer HTTP, in CPU time.

usage: python benchmarks/serving/bench_api.py [MODEL] [--out FILE] [-- FLAG ...]

Starts `vllm serve MODEL FLAG ...` and stops it. The default is a model of two small layers with
random weights, so that the engine leaves the machine to the server. CLIENTS connections
stream chats of TOKENS tokens at once, ROUNDS times after one that does not count. CPU time is that
of the server's process, or of all API processes with --api-server-count: user and system, as Linux
counts it; others who use the machine make it more, so the least of the rounds is told beside the
median. A client that reads late gets several tokens in one event, so events are counted too.
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


async def measure(port: int, args: argparse.Namespace) -> list[dict[str, float]]:
    rows, num_tokens = [], args.clients * args.tokens
    for turn in range(args.rounds + 1):
        pids = api_pids(port)
        before, start = cpu_seconds(pids), time.perf_counter()
        bodies = (body_of(args, number) for number in range(args.clients))
        events = await asyncio.gather(*(stream(port, args.path, body) for body in bodies))
        seconds, wall = cpu_seconds(pids) - before, time.perf_counter() - start
        if turn:
            rows.append({
                "us_per_token": seconds / num_tokens * 1e6,
                "us_per_event": seconds / sum(events) * 1e6,
                "tokens_per_s": num_tokens / wall,
                "processes": len(pids),
            })  # fmt: skip
    return rows


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
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--out", type=Path)
    mark = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:mark]), sys.argv[mark + 1 :]
    load = Path("/proc/loadavg").read_text().split()[0]
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(write_tiny_llama(Path(folder)))
        with served(model, flags) as url:
            rows = asyncio.run(measure(urlsplit(url).port or 80, args))
    medians = {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]}
    least = round(min(row["us_per_token"] for row in rows), 1)
    print(json.dumps({**medians, "least_us_per_token": least}))
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, CPU, {os.cpu_count()} cores",
        "load_before": load,
        "packages": {name: _version(name) for name in ("uvicorn", "uvloop", "httptools")},
        "median": medians,
        "least_us_per_token": least,
        "rounds": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
