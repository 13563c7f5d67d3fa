"""Walks of docs/architecture.md, and which functions a program really calls."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

from doc_pages import REPOSITORY, text_of

TRACING = Path(__file__).parent / "tracing"
_NAME = re.compile(r"`([\w.]+:[\w.]+)`")


def walk(heading: str) -> list[str]:
    """The functions that the section names in its numbered steps, in order."""
    section = text_of("docs/architecture.md").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. .*?(?=^\d+\. |\n\n)", section + "\n\n", re.MULTILINE | re.DOTALL)
    return [name for step in steps for name in _NAME.findall(step)]


def environment(folder: Path, names: Iterable[str], *packages: Path) -> dict[str, str]:
    """For a process whose calls are written to `folder`."""
    folder.mkdir(exist_ok=True)
    return {
        "FOLLOW_FOLDER": str(folder),
        "FOLLOW_NAMES": " ".join(names),
        "PYTHONPATH": os.pathsep.join(map(str, (TRACING, *packages))),
    }


def calls(folder: Path, after: float = 0) -> list[str]:
    """Each function once, in the order of first calls from `after` on (seconds of the monotonic
    clock), over all processes."""
    lines = [line.split() for file in folder.iterdir() for line in file.read_text().splitlines()]
    timed = sorted((float(seconds), name) for seconds, name in lines if float(seconds) >= after)
    return list(dict.fromkeys(name for _, name in timed))


def run_followed(
    script: str, folder: Path, names: Iterable[str], *packages: Path, cwd: Path, **variables: str
) -> str:
    """Runs Python code and returns what it printed."""
    traced = environment(folder, names, *packages)
    traced["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=cwd,
        env={**kept, **traced, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def has_function(holder: object, path: str) -> bool:
    """Whether `A.b.c` is there: an attribute, or a function inside a function."""
    for part in path.split("."):
        code = getattr(getattr(holder, "__wrapped__", holder), "__code__", None)
        inner = [c for c in code.co_consts if isinstance(c, CodeType)] if code else []
        found = getattr(holder, part, None)
        if found is None and part not in [c.co_name for c in inner]:
            return False
        holder = found
    return True
