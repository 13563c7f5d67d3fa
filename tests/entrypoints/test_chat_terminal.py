"""`vllm chat` in a pseudo-terminal, with a server of another make, which answers by a script."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from .serving import COMMAND, environment, wait_until

pytest.importorskip("prompt_toolkit")

CALL = {"index": 0, "id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": '{"city": '}}  # fmt: skip
PROMPT = r"\x1b\[\?2004h"  # a line is being read: pasted text is marked from here on
# What the last message asks for -> deltas of the answer.
SCRIPT: dict[str, list[dict[str, Any]]] = {
    "think": [{"reasoning": "let me "}, {"reasoning": "see"}, {"content": "it is "},
              {"content": "seven"}],
    "weather": [{"tool_calls": [CALL]},
                {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]}],
    "sunny": [{"content": "wear a hat"}],
    "long": [{"content": f"part {i} "} for i in range(600)],
    "hello": [{"content": "hi there"}],
}  # fmt: skip


class Scripted(BaseHTTPRequestHandler):
    """requests: bodies so far; num_left: clients that went before their answer was whole."""

    requests: ClassVar[list[dict[str, Any]]] = []
    num_left = 0

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        word = body["messages"][-1]["content"]
        if word not in SCRIPT:
            self._send(json.dumps({"error": {"message": f"no {word}"}}).encode(), 400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        deltas = SCRIPT[word]
        events: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        usage = {"completion_tokens": len(deltas)}
        events.append({"choices": [], "usage": usage})
        try:
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.02)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            type(self).num_left += 1

    def _send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Screen:
    """What a program in a terminal writes, and what is typed."""

    def __init__(self, *words: str, **variables: str):
        self._end, child = pty.openpty()
        settings = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "100", **variables}
        self.process = subprocess.Popen(
            [*COMMAND, "chat", *words], stdin=child, stdout=child, stderr=child,
            env=environment(**settings), start_new_session=True,
        )  # fmt: skip
        os.close(child)
        self.text = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What came up to and with `pattern`; it is taken out of `text`."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, f"{pattern!r} is not in {self.text!r}"
            if select.select([self._end], [], [], 0.2)[0]:
                self.text += os.read(self._end, 65536).decode(errors="replace")
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def ask(self, text: str) -> None:
        """Types a line at the prompt, once it is there."""
        self.until(PROMPT)
        self.type(f"{text}\r")


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Scripted.requests, Scripted.num_left = [], 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_conversation_in_a_terminal(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "weather"}}]))
    screen = Screen(
        "--url", f"http://127.0.0.1:{server.server_port}", "--tools", str(tools),
        VLLM_CACHE_ROOT=str(tmp_path),
    )  # fmt: skip
    screen.until("first at http")
    screen.ask("think")
    # Reasoning is dimmed, the answer is not, and the speed is told.
    shown = screen.until(r"\[4 tokens, [\d.]+ tokens/s, first after [\d.]+ s\]")
    assert "\x1b[2mlet me see\x1b[0m\r\nit is seven" in shown

    screen.ask("weather")
    screen.until(re.escape('call: weather({"city": "Rome"})'))
    screen.until("weather returns:")
    screen.type("sunny\r")
    screen.until("wear a hat")
    assert Scripted.requests[-1]["messages"][-1] == {
        "role": "tool", "tool_call_id": "c1", "content": "sunny",
    }  # fmt: skip

    screen.ask("long")
    screen.until("part 3 ")
    screen.process.send_signal(signal.SIGINT)
    screen.until(r"\[stopped\]")
    screen.ask("hello")  # the program lives
    screen.until("hi there")
    stopped = Scripted.requests[-1]["messages"][-2]
    assert stopped["role"] == "assistant" and stopped["content"].startswith("part 0 part 1 ")
    wait_until(lambda: Scripted.num_left == 1, 5)  # The server is told that nobody waits.

    screen.ask("nothing")
    screen.until("error: .*no nothing")
    screen.ask("/modle second")
    screen.until("did you mean /model")
    screen.ask("/model second")
    screen.ask("/clear")
    screen.ask("/system be brief")
    screen.ask("\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A")  # six lines up: hello
    screen.until("hi there")
    assert Scripted.requests[-1]["model"] == "second"
    assert Scripted.requests[-1]["messages"] == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"},
    ]  # fmt: skip

    screen.ask(f"/save {tmp_path / 'saved.json'}")
    screen.until("3 messages in")
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert saved[-1] == {"role": "assistant", "content": "hi there"}
    screen.until(PROMPT)
    screen.type("\x04")  # Ctrl-D
    assert screen.process.wait(30) == 0
    assert "+think" in (tmp_path / "chat_history").read_text()
