"""What a terminal takes: control sequences, and styles among them."""

from typing import IO

from vllm import envs


def takes_controls(stream: IO[str]) -> bool:
    """Whether a line on it can be written again."""
    return stream.isatty() and envs.foreign("TERM") != "dumb"


def takes_styles(stream: IO[str]) -> bool:
    """Whether text on it may be bold, dim or coloured; NO_COLOR says no."""
    return takes_controls(stream) and envs.foreign("NO_COLOR") is None
