"""What a new user meets: the words of a server that is ready, a port that is taken, terminals of
every kind."""

import os
import pty
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from vllm.entrypoints.cli import greeting
from vllm.utils import ports
from vllm.utils.terminal import takes_controls, takes_styles

from .serving import run_cli
from .test_chat_terminal import SCRIPT, Scripted


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "a b" / ".venv" / "bin" / "vllm"
    file.parent.mkdir(parents=True)
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(file)])
    return file


def test_a_server_that_is_ready_says_what_to_type_next(program: Path) -> None:
    lines = greeting.greeting("http://localhost:8000", "demo", 2.0, False).splitlines()
    assert lines[1] == f"  '{program}' chat"
    assert lines[2].startswith("  curl http://localhost:8000/v1/chat/completions ")
    assert "Bearer" not in lines[2]
    other = greeting.greeting("https://box:8001", "it's", 2.0, True).splitlines()
    assert other[1] == f"  '{program}' chat --url https://box:8001/v1 --api-key YOUR_KEY"
    assert "-H 'Authorization: Bearer YOUR_KEY'" in other[2]
    unix = greeting.greeting("--unix-socket /s http://localhost", "demo", 2.0, False)
    assert " chat\n" not in unix and "curl --unix-socket /s http://localhost/v1" in unix


def test_the_program_is_named_as_it_is_found(program: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    assert greeting.own_command() == "vllm"
    monkeypatch.setattr(sys, "argv", ["/x/vllm/entrypoints/cli/main.py"])
    assert greeting.own_command() == f"{sys.executable} -m vllm.entrypoints.cli.main"


def test_a_port_that_is_taken_is_told_with_who_has_it_and_the_next_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        own = f"{Path('/proc/self/comm').read_text().strip()} (process {os.getpid()})"
        assert ports.listener_of(port) == own
        assert not ports.is_free("127.0.0.1", port)
        done = run_cli("serve", "/no/model", "--host", "127.0.0.1", "--port", str(port))
    assert done.returncode == 2
    other = ports.next_free("127.0.0.1", port)
    assert f"port {port} is taken by {own}; " in done.stderr
    assert f"{other} is free: --port {other}" in done.stderr
    assert ports.listener_of(port) == "" and ports.is_free("127.0.0.1", port)


@pytest.mark.parametrize(
    ("variables", "controls", "styles"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_terminals_without_styles_get_none(variables, controls, styles, monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, open(ours, "rb"), open(os.devnull, "w") as none:
        assert takes_controls(terminal) is controls
        assert takes_styles(terminal) is styles
        assert not takes_controls(none) and not takes_styles(none)


_ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


def test_an_answer_that_a_terminal_cannot_show_is_shown_in_part(monkeypatch) -> None:
    monkeypatch.setitem(SCRIPT, "where", [{"content": "in Zürich"}])
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = run_cli("chat", "--url", url, "--api-key", "x", "-q", "where", **_ASCII)
        server.shutdown()
    assert (done.returncode, done.stdout) == (0, "in Z?rich\n"), done.stderr
