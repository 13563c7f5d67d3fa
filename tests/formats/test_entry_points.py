"""Formats and readers of other packages are found by their entry points."""

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = """
from vllm.formats.description import OF_TEXT, FormatDescription, StoredTensor
from vllm.formats.readers.base import QuantizationConfig, StoredLayer
from vllm.formats.weight_format import WeightFormat

FORMAT = FormatDescription(
    element="int6", scale="group",
    tensors=(StoredTensor("weight", "uint8", "code"), StoredTensor("scales", "float32", "scale")),
    per_scale=(1, OF_TEXT),
)

class Reader(QuantizationConfig):
    name = "sixes"
    is_checkpoint_quantized = True

    @classmethod
    def from_checkpoint(cls, config):
        return cls()

    def stored_layer(self, names):
        return StoredLayer(WeightFormat.of("int6-group", (1, 64)), FORMAT.act)
"""
PROGRAM = """
from vllm.formats.readers.registry import resolve_quantization
from vllm.formats.registry import formats
from vllm.formats.weight_format import WeightFormat
assert "int6-group" in formats()
assert str(WeightFormat.parse("int6-group[64]")) == "int6-group[64]"
config = resolve_quantization({"quant_method": "sixes"}, None, "model")
weight, act = config.layer_format(["model.layers.0.mlp.up_proj"])
print(weight, weight.shapes((8,), 128)["scales"])
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "sixes.py").write_text(PACKAGE)
    info = tmp_path / "sixes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sixes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.formats]\nint6 = sixes:FORMAT\n[vllm.quantization_readers]\nsixes = sixes:Reader\n"
    )
    return tmp_path


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_a_format_and_its_reader_are_found(package):
    result = run(PROGRAM, package)
    assert result.stdout == "int6-group[64] (8, 2)\n", result.stderr


def test_one_that_cannot_be_loaded_is_an_error_that_names_its_package(package):
    (package / "sixes.py").write_text("raise RuntimeError('broken on purpose')\n")
    result = run(PROGRAM, package)
    assert result.returncode != 0
    assert "sixes" in result.stderr and "broken on purpose" in result.stderr


def test_formats_and_readers_need_no_torch():
    program = "import sys; sys.modules['torch'] = None\nfrom vllm.formats.readers import registry"
    result = run(f"{program}\nprint(*registry.quantization_methods())", Path("/nowhere"))
    assert {"fp8", "mxfp4", "quark"} <= set(result.stdout.split()), result.stderr
