"""GGUF files, written here by the letter of their format."""

import struct

import numpy as np
import pytest

from vllm.errors import CheckpointError
from vllm.utils.gguf import read_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def file_of(tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3) -> bytes:
    """tensors: type, dimensions (the fastest first) and data by name."""
    metadata = [
        text("general.name") + struct.pack("<I", 8) + text("naïve"),
        text("llama.rope.freq_base") + struct.pack("<If", 6, 0.5),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("Ġb"),
        text("kinds") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3),
        text("bos") + struct.pack("<I?", 7, True),
    ]
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    head += b"".join(metadata)
    body = b""
    for name, (kind, dimensions, data) in tensors.items():
        body += bytes(-len(body) % 32)
        head += text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        head += struct.pack("<IQ", kind, len(body))
        body += data
    return head + bytes(-len(head) % 32) + body


def plain(*values: float) -> tuple[int, tuple[int, ...], bytes]:
    return 0, (len(values),), struct.pack(f"<{len(values)}f", *values)


def test_metadata_and_plain_tensors_are_read(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of({
        "one": plain(1.5, -2.0, 3.25),
        "two": (0, (3, 2), np.arange(6, dtype="<f4").tobytes()),
    }))  # fmt: skip
    read = read_gguf(path)
    assert read.metadata == {"general.name": "naïve", "llama.rope.freq_base": 0.5, "bos": True,
                             "tokens": ["a", "Ġb"], "kinds": [1, -2, 3]}  # fmt: skip
    assert read.tensors["one"].values().tolist() == [1.5, -2.0, 3.25]
    assert read.tensors["two"].values().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_q8_0_is_a_scale_for_32_bytes(tmp_path):
    path = tmp_path / "m.gguf"
    quants = np.arange(-32, 32, dtype=np.int8)
    data = b"".join(np.float16(s).tobytes() + q.tobytes()
                    for s, q in zip((0.5, 2.0), quants.reshape(2, 32)))  # fmt: skip
    path.write_bytes(file_of({"w": (8, (32, 2), data)}))
    wanted = quants.reshape(2, 32) * np.array([[0.5], [2.0]])
    assert read_gguf(path).tensors["w"].values().tolist() == wanted.tolist()


def test_q4_1_is_a_scale_and_a_least_value_for_32_nibbles(tmp_path):
    """The low nibbles of 16 bytes are the first half of a block."""
    path = tmp_path / "m.gguf"
    nibbles = np.array([(7 * i + i // 16) % 16 for i in range(64)], np.uint8).reshape(2, 32)
    packed = nibbles[:, :16] | nibbles[:, 16:] << 4
    rows = [(0.25, -1.0), (2.0, 3.0)]
    data = b"".join(np.float16(pair).tobytes() + row.tobytes() for pair, row in zip(rows, packed))
    path.write_bytes(file_of({"w": (3, (64, 1), data)}))
    wanted = [float(s * q + low) for (s, low), row in zip(rows, nibbles) for q in row]
    assert read_gguf(path).tensors["w"].values().tolist() == [wanted]


def test_what_is_no_such_file_is_refused_with_its_path(tmp_path):
    path = tmp_path / "m.gguf"
    whole = file_of({"w": plain(1.0, 2.0)})
    for content in (whole[:-4], whole[:60], whole[:10], b"GGUF"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"m\.gguf: it is cut off or damaged"):
            read_gguf(path)
    path.write_bytes(b"PK" + whole[2:])
    with pytest.raises(CheckpointError, match="no GGUF file of version 3"):
        read_gguf(path)
    path.write_bytes(file_of({"w": plain(1.0)}, version=2))
    with pytest.raises(CheckpointError, match="no GGUF file of version 3"):
        read_gguf(path)
    path.write_bytes(file_of({"w": (12, (256,), bytes(144))}))
    with pytest.raises(CheckpointError, match="w has the type 12; F32, Q4_1 and Q8_0 are read"):
        read_gguf(path)
