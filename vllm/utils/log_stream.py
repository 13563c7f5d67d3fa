"""A handler of log lines that does not wait for whoever reads them.

A pipe whose reader has stopped, a paused terminal or a stuck journal would stop every process at
its next line, and with the API process all requests.
"""

import array
import fcntl
import logging
import os
import socket
import stat
import termios

# Stays free in a pipe: processes that write to it at the same time all find room.
_MARGIN = 16 << 10
# At most so much is written at once, less than the margin.
_PIECE = 4 << 10


class LineHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Leaves out lines that would wait, and says how many as soon as lines are read again."""

    _num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            descriptor = self.stream.fileno()
        except (AttributeError, OSError, ValueError):  # a stream in memory never waits
            super().emit(record)
            return
        try:
            text = self.format(record)
            if self._num_lost:
                note = f"lines before this one were lost, as nobody read the log: {self._num_lost}"
                lost = logging.LogRecord(record.name, logging.WARNING, "", 0, note, (), None)
                text = f"{self.format(lost)}{self.terminator}{text}"
            line = (text + self.terminator).encode(errors="backslashreplace")
            self._num_lost = 0 if _is_begun(descriptor, line) else self._num_lost + 1
        except OSError:
            self.handleError(record)


def _is_begun(descriptor: int, line: bytes) -> bool:
    """Writes the line; False where its begin would wait. A long one is cut where it would."""
    mode = os.fstat(descriptor).st_mode
    for begin in range(0, len(line), _PIECE):
        try:
            _write(descriptor, mode, line[begin : begin + _PIECE])
        except BlockingIOError:
            return begin > 0
    return True


def _write(descriptor: int, mode: int, piece: bytes) -> None:
    """BlockingIOError where it would wait."""
    if stat.S_ISFIFO(mode):
        queued = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, queued)
        if queued[0] + _MARGIN > fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ):
            raise BlockingIOError
    elif stat.S_ISSOCK(mode):
        with socket.socket(fileno=os.dup(descriptor)) as sending:
            sending.send(piece, socket.MSG_DONTWAIT)
        return
    elif stat.S_ISCHR(mode) and os.isatty(descriptor):
        # O_NONBLOCK of the descriptor itself would hold for all that share it, such as the shell.
        own = os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            os.write(own, piece)
        finally:
            os.close(own)
        return
    os.write(descriptor, piece)
