"""Reads GGUF files: metadata, and tensors of the types that the demo model has.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian.
"""

import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm.errors import CheckpointError
from vllm.utils.dataclasses import dataclass

# Of metadata, by type: struct's letters. 8 is a text, 9 a list.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_TEXT, _LIST = 8, 9
# Of tensors, by type: values and bytes of a block.
_BLOCKS = {0: (1, 4), 3: (32, 20), 8: (32, 34)}
_F32, _Q4_1, _Q8_0 = _BLOCKS
_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """kind: number of its type. shape: as torch has it, the fastest dimension last. data: uint8."""

    kind: int
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def values(self) -> NDArray[np.float32]:
        """float32 of its shape."""
        if self.kind == _F32:
            return self.data.view("<f4").reshape(self.shape)
        blocks = self.data.reshape(-1, _BLOCKS[self.kind][1])
        scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
        if self.kind == _Q8_0:
            return (scale * blocks[:, 2:].view(np.int8)).reshape(self.shape)
        low = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
        packed = blocks[:, 4:]
        nibbles = np.concatenate((packed & 15, packed >> 4), axis=1)
        return (scale * nibbles + low).reshape(self.shape)


@dataclass(frozen=True)
class Gguf:
    """metadata: by key; tensors: by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> Gguf:
    """CheckpointError for a file that is cut off, of another format, or has tensors of a type that
    is not read."""
    try:
        return _read(np.memmap(path, dtype=np.uint8, mode="r"))
    except (struct.error, UnicodeDecodeError, ValueError, KeyError) as error:
        text = str(error) if isinstance(error, CheckpointError) else "it is cut off or damaged"
        raise CheckpointError(f"{path}: {text}") from error


def _read(data: NDArray[np.uint8]) -> Gguf:
    reader = _Reader(data.data)
    magic, version, num_tensors, num_keys = reader.numbers("4sIQQ")
    if magic != b"GGUF" or version != 3:
        raise CheckpointError(f"it is no GGUF file of version 3 (it begins with {magic!r})")
    metadata = {}
    for _ in range(num_keys):
        key = reader.text()
        metadata[key] = reader.value(*reader.numbers("I"))
    listed = []
    for _ in range(num_tensors):
        name, (num_dimensions,) = reader.text(), reader.numbers("I")
        shape = reader.numbers(f"{num_dimensions}Q")[::-1]
        listed.append((name, shape, *reader.numbers("IQ")))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    start = -(-reader.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in listed:
        if kind not in _BLOCKS:
            raise CheckpointError(f"{name} has the type {kind}; F32, Q4_1 and Q8_0 are read")
        values, size = _BLOCKS[kind]
        begin, num_bytes = start + offset, prod(shape) // values * size
        if begin + num_bytes > data.size:
            raise ValueError
        tensors[name] = GgufTensor(kind, shape, data[begin : begin + num_bytes])
    return Gguf(metadata, tensors)


class _Reader:
    def __init__(self, data: memoryview):
        self._data, self.position = data, 0

    def numbers(self, letters: str) -> tuple[Any, ...]:
        """As struct names them."""
        found = struct.unpack_from(f"<{letters}", self._data, self.position)
        self.position += struct.calcsize(f"<{letters}")
        return found

    def text(self) -> str:
        (length,) = self.numbers("Q")
        begin, self.position = self.position, self.position + length
        if self.position > len(self._data):
            raise ValueError
        return bytes(self._data[begin : self.position]).decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.numbers(_SCALARS[kind])[0]
        of, count = self.numbers("IQ")
        if of in _SCALARS:
            return list(self.numbers(f"{count}{_SCALARS[of]}"))
        return [self.value(of) for _ in range(count)]
