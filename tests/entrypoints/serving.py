"""A server process under test, and ways to talk to it."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 150
COMMAND = [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def environment(**variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **variables}


def run_cli(
    *words: str, timeout: float = 180, **variables: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
    )


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The message, after checking that the error has OpenAI's shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return str(error["message"])


@dataclass
class RunningServer:
    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, fields, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"Content-Type": "application/json", **headers})

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed; greedy and short unless `fields` say otherwise."""
        defaults = {"model": "tiny", "prompt": "ban fick", "max_tokens": 8, "temperature": 0}
        answer = self.post("/v1/completions", {**defaults, **fields})
        assert answer.status == 200, answer.body
        return dict(answer.json)

    def chat(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "ban fick"}]
        defaults = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = self.post("/v1/chat/completions", {**defaults, **fields})
        assert answer.status == 200, answer.body
        return dict(answer.json)

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, after checking that it is well formed and ends with [DONE]."""
        answer = self.post(path, {"model": "tiny", "temperature": 0, "stream": True, **fields})
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, end = answer.body.decode().split("\n\n")
        assert end == ""
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    def metric(self, name: str) -> float:
        """Sum over the labels of a metric."""
        lines = self.get("/metrics").body.decode().splitlines()
        pattern = re.compile(rf"{re.escape(name)}(\{{.*\}})? (\S+)")
        return sum(float(match[2]) for line in lines if (match := pattern.fullmatch(line)))

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def send_completion(self, connection: socket.socket, key: str = "", **fields: Any) -> None:
        """Sends a long completion request on a raw connection, and reads nothing."""
        defaults = {"prompt": "ban", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
        body = json.dumps({**defaults, **fields}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)

    def engine_pids(self) -> list[int]:
        """The children that run a spawned Python (another one tracks resources)."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for child in children for pid in child.read_text().split()]
        return [pid for pid in pids if b"spawn_main" in command_of(pid)]

    def engine_pid(self) -> int:
        (pid,) = self.engine_pids()
        return pid

    @staticmethod
    def children_of(pid: int) -> list[int]:
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for file in files for child in file.read_text().split()]

    def api_pids(self) -> list[int]:
        """Those of `engine_pids` that have the listening socket: with --api-server-count."""
        sockets = {f"socket:[{row[9]}]" for row in connections()
                   if row[3] == "0A" and row[1].endswith(f":{self.port:04X}")}  # fmt: skip
        return [pid for pid in self.engine_pids() if sockets & set(descriptors(pid))]

    def memory(self) -> int:
        """Resident bytes of the API process."""
        text = Path(f"/proc/{self.process.pid}/statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def connections() -> list[list[str]]:
    """Rows of Linux's table of TCP."""
    return [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]


def command_of(pid: int) -> bytes:
    """Of a process; empty of one that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descriptors(pid: int) -> list[str]:
    """What a process has open; nothing of one that has ended meanwhile."""
    found = []
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append(os.readlink(file))
    return found


LONG = {"prompt": "ban", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


class Background:
    """Runs `call` in a thread; `join` gives its result."""

    def __init__(self, call: Callable[[], Any]):
        self._results: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._results.append(call()), daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return bool(self._results)

    def join(self, seconds: float = 60) -> Any:
        self._thread.join(seconds)
        assert self.is_done, "it did not end in time, or raised"
        return self._results[0]


def in_background(server: RunningServer, **fields: Any) -> Background:
    """A completion; `join` gives its Answer."""
    return Background(lambda: server.post("/v1/completions", fields))


def wait_until(condition: Callable[[], bool], seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.05)


@contextlib.contextmanager
def started_server(
    model: Path,
    log: Path,
    *flags: str,
    start_seconds: float = START_SECONDS,
    log_pipe: int | None = None,
    **variables: str,
) -> Iterator[RunningServer]:
    """A server that is ready, on a free port; killed at the end if it still runs.

    log_pipe: of somebody who writes to `log` what comes through it.
    """
    command = [*COMMAND, "serve", str(model), "--host", "127.0.0.1", "--port", "0",
               "--served-model-name", "tiny", "alias", *flags]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output if log_pipe is None else log_pipe,
            stderr=subprocess.STDOUT,
            env=environment(**variables),
        )
    try:
        yield RunningServer(process, _port_when_ready(process, log, start_seconds), log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(10)


def _port_when_ready(process: "subprocess.Popen[bytes]", log: Path, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if match := re.search(r"Serving tiny at https?://[^:]+:(\d+)/v1", log.read_text()):
            return int(match[1])
        time.sleep(0.05)
    raise AssertionError(f"the server did not become ready:\n{log.read_text()}")
