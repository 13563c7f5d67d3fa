"""Writes the manifest beside the library, with a build id for each kernel and one of all sources.

    python build_ids.py MANIFEST KERNELS FOLDER

MANIFEST: as configured. KERNELS: a line `name|flags|source|source...` for each kernel. The id is
a hash of the flags, the sources and what those include of this tree, so that it changes with the
code of the kernel and with nothing else: not with comments, spaces, the architectures, the compiler
or the folder of a build. It runs after every build, because a source may change between two
configurations.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

_NUM_DIGITS = 8
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_COMMENT = re.compile(rb"//[^\n]*|/\*.*?\*/", re.DOTALL)


def with_includes(sources: Iterable[Path]) -> list[Path]:
    """The sources and every file that they include in quotes, and so on; sorted."""
    waiting = [path.resolve() for path in sources]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        included = (path.parent / name.decode() for name in _INCLUDE.findall(path.read_bytes()))
        waiting += [file.resolve() for file in included if file.exists()]
    return sorted(found)


def build_id(flags: str, sources: Iterable[Path]) -> str:
    """Of one kernel. Files count by name and content, wherever the tree lies."""
    digest = hashlib.sha256(flags.encode())
    for path in with_includes(sources):
        words = _COMMENT.sub(b" ", path.read_bytes()).split()
        digest.update(b"\0".join((path.name.encode(), b" ".join(words), b"")))
    return digest.hexdigest()[:_NUM_DIGITS]


def sources_id(root: Path) -> str:
    """Of all that CMake reads of the tree at `root`: equal ones make equal libraries, of the same
    options and compiler."""
    digest = hashlib.sha256()
    files = [path for folder in ("csrc", "cmake") for path in (root / folder).rglob("*")]
    for path in sorted([root / "CMakeLists.txt", *files]):
        if path.is_file() and path.suffix != ".pyc":
            name = path.relative_to(root).as_posix()
            digest.update(b"\0".join((name.encode(), path.read_bytes(), b"")))
    return digest.hexdigest()[: 2 * _NUM_DIGITS]


def main(manifest: Path, kernels: Path, folder: Path) -> None:
    content = json.loads(manifest.read_text())
    rows = (line.split("|") for line in kernels.read_text().splitlines() if line)
    content["builds"] = {
        name: build_id(flags, map(Path, sources)) for name, flags, *sources in rows
    }
    content["sources"] = sources_id(Path(__file__).resolve().parents[1])
    written = folder / manifest.name
    text = json.dumps(content, indent=2) + "\n"
    if written.exists() and written.read_text() == text:
        return
    partial = written.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(written)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
