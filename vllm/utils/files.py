"""Files that appear whole or not at all. Standard library only: the nvcc front imports this."""

import os
from pathlib import Path


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
