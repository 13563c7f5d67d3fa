"""Programs that run CUDA kernels thread by thread on the CPU (emulated_cuda), and calls of them.

A call is a file: a header of 64-bit fields, then the tensors, each at the offset that its field
holds. The program writes into it.
"""

import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent


def compiled(source: Path, folder: Path, *flags: str) -> Path:
    """The program; skips the test where there is no nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    program = folder / "emulated"
    # The host's compiler, which nvcc tells where CUDA's headers are.
    words = ["-std=c++20", "-O1", ",".join(["-Xcompiler=-pthread", *flags])]
    include = ["-I", HERE / "emulated_cuda"]
    subprocess.run([nvcc, *words, *include, source, "-o", program], check=True)
    return program


def call(
    program: Path,
    fields: Sequence[str],
    values: Mapping[str, int],
    tensors: Mapping[str, Tensor | None],
    result: str,
) -> Tensor:
    """What becomes of tensor `result`. Fields without a value or a tensor are 0. Raises
    CalledProcessError with CUDA's error as exit code."""
    header = dict.fromkeys(fields, 0) | values
    data = bytearray(8 * len(fields))
    for name, tensor in tensors.items():
        if tensor is not None:
            data += bytes(-len(data) % 64)
            header[name] = len(data)
            data += tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert header.keys() == set(fields), header.keys() ^ set(fields)
    struct.pack_into(f"{len(fields)}q", data, 0, *(header[name] for name in fields))
    path = program.parent / "call"
    path.write_bytes(data)
    subprocess.run([program, path], check=True)
    like = tensors[result]
    assert like is not None
    written = bytearray(path.read_bytes()[header[result] :][: like.nbytes])
    return torch.frombuffer(written, dtype=like.dtype).view(like.shape)
