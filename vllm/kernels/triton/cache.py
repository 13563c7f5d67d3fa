"""Triton's cache of compiled kernels, compared with its own hashes when it is read.

Triton takes whatever lies there. After a crash of the machine that may be an empty file, and an
empty list of a kernel's files ends every start from then on.
"""

import hashlib
import json
import os
from pathlib import Path

from triton.runtime.cache import FileCacheManager

DIGEST = ".sha256"
_GROUP = "__grp__"


class VerifiedCache(FileCacheManager):
    """Beside each file lies its hash. What is not what was written counts as missing, and is
    compiled again; what has no hash too, but in a folder that takes none. The files of a kernel are
    looked for where their list is, so that a folder may be moved. Files that are to override
    Triton's are taken as they are."""

    def __init__(self, key: str, override: bool = False, dump: bool = False):
        super().__init__(key, override, dump)
        self._overrides = override

    def get_file(self, filename: str) -> str | None:
        path: str = os.path.join(self.cache_dir, filename)
        if self._overrides:
            return path if os.path.exists(path) else None
        return path if _is_whole(Path(path)) else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        try:
            content = Path(self.cache_dir, _GROUP + filename).read_bytes()
            names = [os.path.basename(name) for name in json.loads(content)["child_paths"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        found = {name: path for name in names if (path := self.get_file(name)) is not None}
        return found if len(found) == len(names) else None

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        content = data if isinstance(data, bytes) else str(data).encode()
        path: str = super().put(content, filename)
        if not filename.startswith(_GROUP):
            super().put(hashlib.sha256(content).hexdigest().encode(), filename + DIGEST)
        return path


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
        digest = Path(f"{path}{DIGEST}").read_bytes()
    except FileNotFoundError:
        # Somebody else's, who did not write hashes; there is no writing what would take its place.
        return path.exists() and bool(content) and not os.access(path.parent, os.W_OK)
    except OSError:
        return False
    return digest == hashlib.sha256(content).hexdigest().encode()
