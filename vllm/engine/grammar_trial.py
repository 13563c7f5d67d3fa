"""Compiles grammars in a process that can be ended: what never ends, or faults, harms no engine.

The process says whether a grammar compiles; one that did so in time is then compiled where it is
needed, by the same code. It starts with the first grammar and ends with its parent.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from typing import Any

MAX_COMPILE_SECONDS = 10.0
_START_SECONDS = 120.0
_MAX_MEMORY = 4 << 30
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm.engine.grammar_trial import answer; answer()"
)


class GrammarError(ValueError):
    """A grammar that cannot be compiled or that no text matches."""


class GrammarTrial:
    """One such process, for one thread at a time. tokenizer_info: xgrammar's, as JSON."""

    def __init__(self, tokenizer_info: str):
        self._tokenizer_info = tokenizer_info
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, kind: str, text: str, timeout: float = MAX_COMPILE_SECONDS) -> None:
        """GrammarError if the grammar does not compile, or not within `timeout` seconds."""
        try:
            if self._process is None:
                self._start()
            self._send([kind, text])
            error = self._receive(timeout)
        except TimeoutError:
            self.close()
            raise GrammarError(
                f"the grammar took more than {timeout:g} s to compile; simplify it"
            ) from None
        except (OSError, EOFError):
            self.close()
            raise GrammarError("the grammar is more than its compiler can take") from None
        if error:
            raise GrammarError(error)

    def close(self) -> None:
        """Ends the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not sent is not missed
                    pipe.close()  # type: ignore[union-attr]

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._send(self._tokenizer_info)
        self._receive(_START_SECONDS)

    def _send(self, value: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, timeout: float) -> str:
        """The next line; TimeoutError, or EOFError when the process is gone."""
        assert self._process is not None and self._process.stdout is not None
        out = self._process.stdout.fileno()
        deadline, line = time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            piece = os.read(out, 1 << 16)
            if not piece:
                raise EOFError
            line += piece
        return str(json.loads(line))


def answer() -> None:
    """Runs in the process: a line in, a line out, until the parent is gone."""
    from vllm.utils.processes import die_with_parent

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent's business
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
    import xgrammar

    from vllm.engine.structured_output import check_grammar, compile_grammar, make_compiler

    compiler = None
    for line in sys.stdin.buffer:
        error = ""
        if compiler is None:
            compiler = make_compiler(xgrammar.TokenizerInfo.deserialize_json(json.loads(line)))
        else:
            try:
                kind, text = json.loads(line)
                check_grammar(kind, text)
                compile_grammar(compiler, kind, text)
            except Exception as failure:  # xgrammar raises RuntimeError for what it dislikes
                error = str(failure) or type(failure).__name__
        os.write(out, json.dumps(error).encode() + b"\n")
