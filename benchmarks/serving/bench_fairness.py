"""How long clients of a server wait beside a greedy one: figures with their limits.

usage: python benchmarks/serving/bench_fairness.py [MODEL] [--out FILE] [-- FLAG ...]

Starts `vllm serve MODEL FLAG ...` (the demo model by default) and stops it; 2,048 sequences may
wait, as many as the case n has. Clients are told apart
by X-Forwarded-For, which the server takes from its own machine. Cases:

greedy      CLIENTS - 1 clients send one request after another, without and with a client that sends
            1,000 at once
n           a client sends 16 prompts with n=128; another one sends one request after another
logprobs    a client sends a long prompt with 20 prompt_logprobs; the same
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

NUM_GREEDY = 1000
LIMIT_OF_P99 = 1.5
START_S = 300


@contextmanager
def served(model: str | None, flags: list[str]) -> Iterator[str]:
    """The URL of a server that is ready."""
    named = [model] if model else []
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *named, "--host",
               "127.0.0.1", "--port", "0", "--disable-log-requests",
               "--max-waiting", "2048", *flags]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + START_S
            while not (found := re.search(r"at (http://\S+)/v1", log.read_text())):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


class Client:
    """number: which client it is to the server."""

    def __init__(self, session: aiohttp.ClientSession, number: int):
        self._session = session
        self._headers = {"X-Forwarded-For": f"10.0.{number // 250}.{number % 250 + 1}"}

    async def ask(self, **fields: Any) -> float:
        """Seconds of a completion, which must succeed."""
        body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, **fields}
        start = time.perf_counter()
        asked = self._session.post("/v1/completions", json=body, headers=self._headers)
        async with asked as answer:
            content = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {content[:300]!r}")
        return time.perf_counter() - start


def prompt(number: int, length: int = 16) -> list[int]:
    return [11 + (number * 7919 + place * (number % 13 + 1)) % 400 for place in range(length)]


async def one_after_another(client: Client, number: int, count: int) -> list[float]:
    return [await client.ask(prompt=prompt(number * 1000 + turn)) for turn in range(count)]


async def of_many(session: aiohttp.ClientSession, num_clients: int, count: int) -> list[float]:
    """Sorted times of all requests of the clients that are not greedy."""
    clients = [Client(session, number) for number in range(1, num_clients)]
    times = await asyncio.gather(
        *(one_after_another(client, place, count) for place, client in enumerate(clients))
    )
    return sorted(one for own in times for one in own)


async def beside(session: aiohttp.ClientSession, **fields: Any) -> dict[str, float]:
    """Times of one client, one request after another, while another one is answered."""
    neighbour, busy = Client(session, 1), Client(session, 0)
    quiet = sorted([await neighbour.ask(prompt=prompt(turn)) for turn in range(10)])
    start = time.perf_counter()
    task = asyncio.create_task(busy.ask(**fields))
    await asyncio.sleep(0.2)
    times = []
    while not task.done():
        times.append(await neighbour.ask(prompt=prompt(1000 + len(times))))
    await task
    return {"quiet_s": quiet[len(quiet) // 2], "longest_s": max(times), "requests": len(times),
            "busy_s": time.perf_counter() - start}  # fmt: skip


def be_greedy(url: str) -> None:
    """The client of NUM_GREEDY requests, in a process of its own, as other machines are."""

    async def run() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=3600)
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
            client = Client(session, 0)
            await asyncio.gather(*(client.ask(prompt=prompt(5000 + n)) for n in range(NUM_GREEDY)))

    asyncio.run(run())


async def num_waiting(session: aiohttp.ClientSession) -> float:
    async with session.get("/metrics") as answer:
        text = await answer.text()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines()
               if line.startswith("vllm:num_requests_waiting"))  # fmt: skip


def shown(times: list[float]) -> dict[str, float]:
    return {"p50_s": times[len(times) // 2], "p99_s": times[int(0.99 * len(times))],
            "longest_s": times[-1], "requests": len(times)}  # fmt: skip


async def figures(url: str, args: argparse.Namespace) -> dict[str, Any]:
    timeout, rows = aiohttp.ClientTimeout(total=3600), dict[str, Any]()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        await of_many(session, args.clients, 1)
        if "greedy" in args.cases:
            without = await of_many(session, args.clients, args.turns)
            greedy = multiprocessing.get_context("spawn").Process(target=be_greedy, args=(url,))
            greedy.start()
            while await num_waiting(session) < NUM_GREEDY / 2:
                await asyncio.sleep(0.02)
            beside_it = await of_many(session, args.clients, args.turns)
            num_left = await num_waiting(session)
            await asyncio.to_thread(greedy.join)
            rows["greedy"] = {
                "without": shown(without),
                "beside": shown(beside_it),
                "waiting_at_the_end": num_left,
                "p99_ratio": shown(beside_it)["p99_s"] / shown(without)["p99_s"],
            }
        if "n" in args.cases:
            prompts = [prompt(number) for number in range(16)]
            rows["n"] = await beside(session, prompt=prompts, n=128, max_tokens=args.n_tokens,
                                     temperature=1)  # fmt: skip
        if "logprobs" in args.cases:
            long = prompt(3, args.prompt_tokens)
            rows["logprobs"] = await beside(session, prompt=long, max_tokens=1, prompt_logprobs=20)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--clients", type=int, default=100, help="The greedy one among them.")
    parser.add_argument("--turns", type=int, default=5, help="Requests of each other client.")
    parser.add_argument("--n-tokens", type=int, default=64, help="Of each choice in the case n.")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--cases", nargs="+", default=["greedy", "n", "logprobs"])
    parser.add_argument("--out", type=Path)
    mark = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:mark]), sys.argv[mark + 1 :]
    load = Path("/proc/loadavg").read_text().split()[0]
    with served(args.model, flags) as url:
        rows = asyncio.run(figures(url, args))
    for case, row in rows.items():
        for name, value in row.items():
            print(f"{case:10} {name:24} {json.dumps(value)}")
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, CPU, {os.cpu_count()} cores",
        "load_before": load,
        "figures": rows,
        "limits": {"greedy.p99_ratio": LIMIT_OF_P99},
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
