"""A caching front of nvcc, for libraries that compile at run time and accept another compiler.

Runs once for each kernel, so it imports the standard library and `utils.files` only. Objects are
keyed by a hash of the source (which, in DeepGEMM, names a hash of all headers it includes), the
options and the compiler. Entries are written atomically, begin with the SHA-256 of the rest, and
are compiled once however many processes ask, where the file system has locks.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vllm.utils.files import locked, write_atomically

_DIGEST_BYTES = 32
# Options with a folder in them: the path of headers is not part of the key.
_FOLDER_OPTIONS = ("-I", "--include-path", "-isystem")


class Request(NamedTuple):
    """A compilation to one object. key: of its cache entry."""

    source: Path
    output: Path
    key: str


class CompileError(Exception):
    """The compiler failed; its output."""


def parse(arguments: Sequence[str], source: bytes | None, compiler: str) -> Request | None:
    """None for a command line that compiles no object, such as `--version`. compiler: its version.

    source: the text to compile; None reads the file.
    """
    files = [argument for argument in arguments if argument.endswith(".cu")]
    if "-cubin" not in arguments or len(files) != 1 or "-o" not in arguments:
        return None
    output = arguments[list(arguments).index("-o") + 1]
    text = Path(files[0]).read_bytes() if source is None else source
    options = [
        argument
        for argument in arguments
        if argument not in (files[0], output) and not argument.startswith(_FOLDER_OPTIONS)
    ]
    made_of = json.dumps([compiler, sorted(options), hashlib.sha256(text).hexdigest()])
    return Request(Path(files[0]), Path(output), hashlib.sha256(made_of.encode()).hexdigest())


def kernel_name(source: str) -> str:
    """`sm90_fp8_gemm_1d2d_impl<0, 4096, ...>` of a source that instantiates one kernel."""
    match = re.search(r"&\s*([\w:]+<[^;]*>)", source)
    return " ".join(match[1].split()) if match else "a kernel"


# ---------------------------------------------------------------- what was compiled


def read_entry(store: Path, key: str) -> bytes | None:
    """None for a missing or damaged entry."""
    try:
        content = (store / key).read_bytes()
    except OSError:
        return None
    digest, made = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return made if hashlib.sha256(made).digest() == digest else None


def compiled(
    real: str, arguments: Sequence[str], request: Request, store: Path, folder: Path | None = None
) -> tuple[bytes, float]:
    """The object and the seconds spent on compiling it, 0 for a cache hit.

    On a miss `real` compiles it in `folder` and it is added to `store`. CompileError if that fails.
    """
    made = read_entry(store, request.key)
    if made is not None:
        return made, 0.0
    with locked(store / request.key):
        made = read_entry(store, request.key)
        if made is not None:
            return made, 0.0
        begin = time.monotonic()
        result = subprocess.run([real, *arguments], cwd=folder, capture_output=True, text=True)
        if result.returncode:
            raise CompileError(f"{result.stdout}{result.stderr}".strip())
        made = (folder or Path()).joinpath(request.output).read_bytes()
        write_atomically(store / request.key, hashlib.sha256(made).digest() + made)
        return made, time.monotonic() - begin


def main() -> int:
    """arguments: REAL VERSION STORE LOG ARGUMENTS_OF_NVCC...

    LOG gets a line of JSON for each kernel that had to be compiled.
    """
    real, compiler, store, log, *arguments = sys.argv[1:]
    request = parse(arguments, None, compiler)
    if request is None:
        os.execv(real, [real, *arguments])
    try:
        made, seconds = compiled(real, arguments, request, Path(store))
    except CompileError as error:
        print(error)
        return 1
    except OSError:  # the store is full or read-only: compile without it
        os.execv(real, [real, *arguments])
    request.output.write_bytes(made)
    if seconds:
        name = kernel_name(request.source.read_text(errors="replace"))
        line = json.dumps({"kernel": name, "seconds": round(seconds, 2), "end": time.time()}) + "\n"
        # The folder may have been removed by a cleaner of temporary files: not a failure.
        with contextlib.suppress(OSError), Path(log).open("a") as file:
            file.write(line)
    return 0
