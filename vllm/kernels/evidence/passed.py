"""Comparisons with the reference that kernels passed on this machine: a file of their names.

A start repeats none of them. A file that cannot be read or written is no error: they run again.
"""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from vllm.kernels.evidence.tables import user_folder
from vllm.utils.files import locked, write_atomically

FILE_NAME = "passed_probes.json"
_MAX_REMEMBERED = 1000


def path_of_passed() -> Path:
    return user_folder() / FILE_NAME


def read_passed() -> list[str]:
    """Names, the oldest first; [] for a file that is not what `add_passed` wrote."""
    try:
        found = json.loads(path_of_passed().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def add_passed(names: Iterable[str]) -> None:
    """Beside those that others add at the same time."""
    with contextlib.suppress(OSError), locked(path_of_passed()):
        every = dict.fromkeys((*read_passed(), *names))
        text = json.dumps(list(every)[-_MAX_REMEMBERED:], indent=0)
        write_atomically(path_of_passed(), f"{text}\n".encode())
