"""What every case of the chaos suite shares: a fault with its times, a prober, and the table."""

import contextlib
import http.client
import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from entrypoints.serving import RunningServer, started_server, wait_until

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "cpu-zen5-2core" / "chaos.json"
PAGE = REPOSITORY / "docs" / "reliability.md"
MOST_HEALTH_S = 1.0
_PROBE_S = 0.1
_BEGIN, _END = "<!-- chaos table -->", "<!-- end of chaos table -->"


class Prober:
    """Asks /health of one server every 100 ms, each time on a new connection."""

    def __init__(self, port: int):
        self._port = port
        self._asked: float | None = None
        self._longest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Forgets what was measured until now."""
        self._longest = 0.0

    @property
    def longest(self) -> float:
        """Seconds that /health took at most, with an answer that has not come yet."""
        asked = self._asked
        return max(self._longest, time.monotonic() - asked if asked is not None else 0.0)

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_PROBE_S):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
            self._asked = begin = time.monotonic()
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
                self._longest = max(self._longest, time.monotonic() - begin)
            except TimeoutError:
                self._longest = max(self._longest, time.monotonic() - begin)
            except OSError:  # the server ended, which is what some faults are about
                pass
            finally:
                self._asked = None
                connection.close()


@dataclass
class Row:
    """One fault. Times in seconds; None where there is nothing to notice, or no server."""

    fault: str
    survived: bool = False
    noticed_s: float | None = None
    recovered_s: float | None = None
    health_p100_s: float | None = None


class Fault:
    """A case while it runs."""

    def __init__(self, row: Row):
        self.row = row
        self._begin = time.monotonic()
        self._probers: list[Prober] = []

    def begins(self) -> None:
        """From here the seconds of `noticed` and `recovered` count."""
        self._begin = time.monotonic()

    def noticed(self) -> float:
        self.row.noticed_s = time.monotonic() - self._begin
        return self.row.noticed_s

    def recovered(self) -> float:
        self.row.recovered_s = time.monotonic() - self._begin
        return self.row.recovered_s

    def probe(self, prober: Prober) -> None:
        prober.begin()
        self._probers.append(prober)

    @contextlib.contextmanager
    def server(self, model: Path, log: Path, *flags: str, **env: Any) -> Iterator[RunningServer]:
        """A server of this case alone, whose /health is asked all the time."""
        with started_server(model, log, *flags, **env) as server:
            prober = Prober(server.port)
            self.probe(prober)
            try:
                yield server
            finally:
                self.measure()
                prober.end()

    def measure(self) -> None:
        found = [prober.longest for prober in self._probers]
        if found:
            self.row.health_p100_s = max(self.row.health_p100_s or 0.0, *found)

    def finish(self) -> None:
        """AssertionError where /health took too long."""
        self.measure()
        longest = self.row.health_p100_s
        assert longest is None or longest < MOST_HEALTH_S, f"/health took {longest:.2f} s"


# ---------------------------------------------------------------- servers and requests


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    wait_until(condition, seconds)


def answers(server: RunningServer) -> bool:
    """Whether a small completion succeeds now."""
    try:
        answer = server.post("/v1/completions", {"prompt": "ban", "max_tokens": 2})
    except OSError:
        return False
    return answer.status == 200


def tokens(server: RunningServer, **fields: Any) -> list[str]:
    """Greedy tokens of a well-behaved request, as texts with their logprobs."""
    answer = server.complete(prompt="ban mest fick tu", max_tokens=24, ignore_eos=True, logprobs=0,
                             **fields)  # fmt: skip
    return list(answer["choices"][0]["logprobs"]["tokens"])


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int) -> int:
    """Bytes."""
    text = Path(f"/proc/{pid}/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def seconds_of(text: str) -> float:
    """`90`, `90s`, `20m` or `2h`; ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is no time such as 90s, 20m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


# ---------------------------------------------------------------- the table


def machine() -> str:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"


def table(rows: list[Row]) -> str:
    """Markdown."""

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} s" if value >= 0.1 else "< 0.1 s"

    lines = ["| fault | survived | noticed after | recovered after | /health p100 |",
             "|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        health = "-" if row.health_p100_s is None else f"{row.health_p100_s:.2f} s"
        cells = (row.fault, "yes" if row.survived else "**no**", seconds(row.noticed_s),
                 seconds(row.recovered_s), health)  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(rows: list[Row], page: Path, results: Path) -> None:
    """Puts the table between the marks of `page`, and the figures beside other results."""
    content = {
        "machine": machine(),
        "date": date.today().isoformat(),
        "command": "make test-chaos ARGS=--write-page",
        "faults": [asdict(row) for row in rows],
    }
    results.write_text(json.dumps(content, indent=1) + "\n")
    text = page.read_text(encoding="utf-8")
    head, rest = text.split(_BEGIN)
    _, tail = rest.split(_END)
    measured = f"Measured on {content['machine']}, {content['date']}, by `{content['command']}`:"
    page.write_text(f"{head}{_BEGIN}\n{measured}\n\n{table(rows)}\n{_END}{tail}", encoding="utf-8")
