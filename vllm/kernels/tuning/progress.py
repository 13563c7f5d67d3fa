"""How far a long command is: lines with the time that is left, and on a terminal a bar below."""

import threading
import time
from dataclasses import dataclass, field
from typing import TextIO

from vllm.utils.terminal import takes_controls

_WIDTH = 24
_CLEAR = "\r\x1b[K"


@dataclass
class Progress:
    """Writes to `stream`, from any thread. deadline: of `time.monotonic`, None for no limit."""

    stream: TextIO
    deadline: float | None = None
    total: int = 0
    done: int = 0
    start: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, total: int) -> None:
        """A part of so many steps."""
        self.total, self.done, self.start = total, 0, time.monotonic()

    def step(self, line: str) -> None:
        """One more of them is done."""
        with self.lock:
            self.done += 1
            self._write(f"[{self.done}/{self.total}, {self.left()} left]  {line}")

    def say(self, line: str) -> None:
        with self.lock:
            self._write(line)

    def left(self) -> str:
        """Minutes and seconds, if the rest of the part takes as long as what is done."""
        now = time.monotonic()
        seconds = (now - self.start) / max(self.done, 1) * (self.total - self.done)
        if self.deadline is not None:
            seconds = min(seconds, max(0.0, self.deadline - now))
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}:{rest:02}"

    def end(self) -> None:
        """Removes the bar."""
        if takes_controls(self.stream):
            self.stream.write(_CLEAR)
            self.stream.flush()

    def _write(self, line: str) -> None:
        if not takes_controls(self.stream):
            print(line, file=self.stream, flush=True)
            return
        filled = _WIDTH * self.done // max(self.total, 1)
        bar = f"{'#' * filled:.<{_WIDTH}} {self.done}/{self.total}, {self.left()} left"
        self.stream.write(f"{_CLEAR}{line}\n{bar}")
        self.stream.flush()
