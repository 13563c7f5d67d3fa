"""What the headers of safetensors files say, and single tensors' bytes, without torch.

Format: 8 bytes, the length of a JSON object in little-endian; that object; the tensors' bytes, at
the offsets it gives from its end (https://github.com/huggingface/safetensors, "Format").
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm.errors import CheckpointError
from vllm.utils.dataclasses import dataclass

_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # the widest first
_MAX_HEADER = 100_000_000  # as the library has it


class TensorShape(NamedTuple):
    """As headers have it. dtype: as the format calls it, such as F8_E4M3; shape: of packed codes
    that of the bytes or numbers they are packed into."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """dtype: as the format calls it, such as F8_E4M3. start, stop: of its bytes in `file`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> bytes:
        """CheckpointError where the file ends before."""
        try:
            with self.file.open("rb") as opened:
                opened.seek(self.start)
                content = opened.read(self.stop - self.start)
        except OSError as error:
            raise _unreadable(self.file, str(error)) from error
        if len(content) != self.stop - self.start:
            raise _unreadable(self.file, f"it ends within {self.name}")
        return content


def float_weight_dtype(tensors: Iterable[tuple[str, TensorShape]]) -> str | None:
    """The widest type, as torch calls it, of weights that are not quantised: what they must be kept
    in; None where there are none."""
    found = {
        stored.dtype
        for name, stored in tensors
        if len(stored.shape) == 2 and name.endswith(".weight") and stored.dtype in _FLOATS
    }
    return next((name for kind, name in _FLOATS.items() if kind in found), None)


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Of every *.safetensors file in `folder`, in the order of files and headers."""
    for file in sorted(folder.glob("*.safetensors")):
        # "consolidated" files hold the same weights again under Mistral's own names.
        if file.is_file() and "consolidated" not in file.name:
            yield from _of_file(file)


def _of_file(file: Path) -> Iterator[StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            is_possible = size >= 8 and length <= min(_MAX_HEADER, size - 8)
            header = json.loads(opened.read(length)) if is_possible else None
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(file, str(error)) from error
    if not is_possible:
        raise _unreadable(file, f"its header is said to have {length} bytes")
    if not isinstance(header, dict):
        raise _unreadable(file, "its header is no JSON object")
    for name, entry in header.items():
        if name != "__metadata__":
            yield _tensor(file, name, entry, 8 + length, size)


def _tensor(file: Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_right = type(dtype) is str and all(type(n) is int and n >= 0 for n in (*shape, start))
        is_right = is_right and type(stop) is int and start <= stop <= size - base
    except (KeyError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise _unreadable(file, f"its header is wrong about {name!r}")
    return StoredTensor(file, name, dtype, tuple(shape), base + start, base + stop)


def _unreadable(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is truncated or corrupt: {why}; fetch the checkpoint again")
