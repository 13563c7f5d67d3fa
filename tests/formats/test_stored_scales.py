"""What is read of a checkpoint's files without torch: headers, and whether scales are exact."""

import json
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from vllm.errors import CheckpointError
from vllm.formats.readers.fp8 import Fp8Config
from vllm.formats.stored_scales import with_stored_scales
from vllm.utils.safetensors_files import stored_tensors

NAME = "model.layers.0.mlp.down_proj.weight_scale_inv"


def write(path, header: object, data: bytes = b"", length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + data)
    return path.parent


def entry(**changes) -> dict:
    return {NAME: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def is_exact(folder) -> bool:
    quant = Fp8Config(True, weight_block_size=[128, 128])
    found = with_stored_scales(quant, folder)
    assert not quant.exact_scales  # the given one is not changed
    return bool(found.exact_scales)


def test_tensors_are_those_of_the_files_in_order(tmp_path):
    tensors = {"b": torch.ones(2, 3), "a": torch.arange(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    save_file({"d": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    found = {one.name: one for one in stored_tensors(tmp_path)}
    assert sorted(found) == ["a", "b", "c"] and list(found)[-1] == "c"
    assert (found["b"].dtype, found["b"].shape) == ("F32", (2, 3))
    assert found["a"].read() == tensors["a"].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (entry(), 1 << 40),
        (entry(), 10_000),
        (b"{", None),
        (b"\xff\xfe", None),
        ([], None),
        ({NAME: 3}, None),
        (entry(dtype=3), None),
        (entry(shape="two"), None),
        (entry(shape=[-2]), None),
        (entry(data_offsets=[0]), None),
        (entry(data_offsets=[8, 0]), None),
        (entry(data_offsets=[-8, 8]), None),
        (entry(data_offsets=[0, 9]), None),
        (entry(data_offsets=[0, 1 << 60]), None),
    ],
)
def test_a_header_that_cannot_be_is_refused_with_its_file(tmp_path, header, length):
    folder = write(tmp_path / "m.safetensors", header, bytes(8), length)
    with pytest.raises(CheckpointError, match=r"m\.safetensors is truncated or corrupt"):
        list(stored_tensors(folder))


def test_an_empty_file_and_one_that_shrank_are_refused(tmp_path):
    file = tmp_path / "m.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated"):
        list(stored_tensors(tmp_path))
    (one,) = stored_tensors(write(file, entry(), bytes(8)))
    write(file, entry(), bytes(4))
    with pytest.raises(CheckpointError, match=f"it ends within {NAME}"):
        one.read()


def test_every_power_of_two_of_float32_is_exact_and_its_neighbours_are_not(tmp_path):
    exponents = torch.arange(1, 255, dtype=torch.int32)
    powers = (exponents << 23).view(torch.float32)
    save_file({NAME: powers}, tmp_path / "m.safetensors")
    assert is_exact(tmp_path)
    for bit in (0, 7, 8, 15, 16, 22, 31):
        wrong = powers.view(torch.int32).clone()
        wrong[100] ^= 1 << bit if bit < 31 else -(1 << 31)
        save_file({NAME: wrong.view(torch.float32)}, tmp_path / "m.safetensors")
        assert not is_exact(tmp_path), bit


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8])
def test_scales_of_another_type_are_not_taken_to_be_exact(tmp_path, dtype):
    save_file({NAME: torch.ones(4, dtype=dtype)}, tmp_path / "m.safetensors")
    assert not is_exact(tmp_path)


def test_exponent_bytes_are_exact(tmp_path):
    assert is_exact(write(tmp_path / "m.safetensors", entry(dtype="F8_E8M0", shape=[8]), bytes(8)))


def test_without_scale_tensors_the_config_is_believed(tmp_path):
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "m.safetensors")
    for stated, expected in ((None, ""), ("ue8m0", "scale_fmt of config.json is ue8m0")):
        config = {"weight_block_size": [128, 128], "scale_fmt": stated}
        quant = Fp8Config.from_checkpoint(config)
        assert with_stored_scales(quant, tmp_path).exact_scales == expected


def test_no_torch_is_needed(tmp_path):
    save_file({NAME: torch.ones(4)}, tmp_path / "m.safetensors")
    code = (
        "import sys; from pathlib import Path\n"
        "from vllm.formats.readers.fp8 import Fp8Config\n"
        "from vllm.formats.stored_scales import with_stored_scales\n"
        "quant = Fp8Config(True, weight_block_size=[128, 128])\n"
        f"assert with_stored_scales(quant, Path({str(tmp_path)!r})).exact_scales\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
