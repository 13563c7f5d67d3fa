"""Files and folders that appear whole or not at all, whoever else writes them, and that are
written again when they are broken. Standard library only: the nvcc front imports this."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Of a published folder: the size, time of change (ns) and SHA-256 of each of its files.
RECORD = ".files.json"


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Writes a temporary file beside `path` and renames it, whoever else writes `path`.

    Its name has no process id: machines and containers that share a folder count their processes
    alike.
    """
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(".partial", f"{path.name}.", path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.chmod(partial, mode)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)  # it may be what fills the disk
        raise


@contextmanager
def locked(path: Path, waits: bool = True) -> Iterator[None]:
    """One process at a time, where the file system has locks (Lustre and NFS may have none). The
    lock is a file beside `path`, and released when its process dies. OSError where it cannot be
    written; BlockingIOError where another holds it and waits=False."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield


def is_regular(path: Path) -> bool:
    """Whether `path`, or what it links to, is a file that can be read to its end: to open a FIFO
    waits for a writer, and a device may never end. False for what is not there."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def kind_of(path: Path) -> str:
    """What lies at `path` that is no regular file, for messages."""
    import stat

    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(path.stat().st_mode), "a device")


def set_aside(path: Path, why: object) -> None:
    """Takes a broken file of a cache away, with a warning; it is kept as `NAME.broken`."""
    from vllm.logger import get_logger

    kept = path.with_name(f"{path.name}.broken")
    with suppress(OSError):  # read-only: it is broken at the next start too
        os.replace(path, kept)
    get_logger(__name__).warning("%s is broken (%s): it is not used, and kept as %s",
                                 path, why, kept.name)  # fmt: skip


# ---------------------------------------------------------------- folders


def published_folder(target: Path, write: Callable[[Path], None]) -> Path:
    """`target` as `write(folder)` filled it, in this process or in another, at any time before. One
    that lacks a file, or has one that is not what was written, is written again. write: gets a name
    that does not exist yet. OSError where the folder is to be written and cannot be."""
    import shutil
    import tempfile

    if (wrong := damage(target)) is None:
        return target
    with locked(target):
        wrong = damage(target)  # another process may have written it meanwhile
        if wrong is None:
            return target
        if os.path.lexists(target):
            _tell_damage(target, wrong)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            made = staging / target.name
            write(made)
            _record(made)
            if os.path.lexists(target):
                os.rename(target, staging / "broken")
            os.rename(made, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def damage(folder: Path) -> str | None:
    """What is wrong with a published folder; None for one that is whole. A file is read only where
    its time is not the recorded one: it was copied, or changed."""
    import json

    try:
        recorded = json.loads((folder / RECORD).read_text())
        for name, (size, changed, digest) in recorded.items():
            found = (folder / name).stat()
            if found.st_size != size:
                return f"{name} has {found.st_size} bytes, not {size}"
            if found.st_mtime_ns != changed and _digest(folder / name) != digest:
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{RECORD} cannot be read: {error}"
    return None


def _record(folder: Path) -> None:
    """Records the files of `folder`, and waits until the disk has them: power may fail between the
    rename and their content."""
    import json

    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        state = path.stat()
        name = str(path.relative_to(folder))
        found[name] = (state.st_size, state.st_mtime_ns, _digest(path))
    write_atomically(folder / RECORD, json.dumps(found, indent=1).encode())


def _digest(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tell_damage(target: Path, wrong: str) -> None:
    from vllm.logger import get_logger

    get_logger(__name__).warning("%s is broken (%s): it is written again", target, wrong)
