"""Finding and loading the native library."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.kernels.conftest import LINEAR_ISAS
from vllm.platforms import native


@pytest.fixture
def empty_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which the library is looked for."""
    monkeypatch.setattr(native, "LIBRARY_DIR", tmp_path)
    native._load.cache_clear()
    native.manifest.cache_clear()
    yield tmp_path
    native._load.cache_clear()
    native.manifest.cache_clear()


def test_a_built_library_is_present_and_names_its_instruction_set():
    status = native.status()
    assert status.state == "present", status.text
    assert status.text.endswith(native.load().cpu_isa())


def test_the_manifest_lists_what_every_kernel_was_built_for():
    kernels = native.manifest()["kernels"]
    assert {"cpu_linear", "cpu_attention", "cpu_layers", "cpu_cache_write"} <= kernels.keys()
    gpu_archs = native.gpu_archs()
    for name, built_for in kernels.items():
        assert built_for
        assert name in gpu_archs or set(built_for) <= set(LINEAR_ISAS)


def test_gpu_kernels_are_listed_with_the_suffix_they_were_built_with(empty_dir):
    kernels = {"cpu_linear": ["avx2", "portable"], "fp8_quant": ["90a", "121a", "compute_120"]}
    content = {"version": "1", "compiler": "c", "cuda": "13.0", "kernels": kernels}
    (empty_dir / native.MANIFEST_NAME).write_text(json.dumps(content))
    assert native.gpu_archs() == {"fp8_quant": ("90a", "121a", "compute_120")}


def test_the_library_is_loaded_once():
    assert native.load() is native.load()


def test_a_missing_library_is_absent_and_says_how_to_build_it(empty_dir):
    status = native.status()
    assert status.state == "absent"
    assert "make build" in status.text
    with pytest.raises(native.NativeLibraryError, match=r"is not built.*make build"):
        native.load()
    with pytest.raises(native.NativeLibraryError, match="cannot read"):
        native.manifest()


def test_a_file_that_is_no_library_is_broken(empty_dir):
    real_manifest = Path(native.__file__).parents[1] / "lib" / native.MANIFEST_NAME
    shutil.copy(real_manifest, empty_dir)
    (empty_dir / native.LIBRARY_NAME).write_text("not ELF")
    status = native.status()
    assert status.state == "broken"
    assert "does not load" in status.text
    with pytest.raises(native.NativeLibraryError, match="does not load"):
        native.load()


@pytest.mark.parametrize("content", ("{", "[]", json.dumps({"version": "1"})))
def test_a_damaged_manifest_is_broken(empty_dir, content):
    (empty_dir / native.LIBRARY_NAME).touch()
    (empty_dir / native.MANIFEST_NAME).write_text(content)
    assert native.status().state == "broken"


def test_an_unknown_instruction_set_is_refused_with_the_accepted_ones():
    default = native.load().cpu_isa()
    with pytest.raises(ValueError, match=r"given 'sse9'; accepted: one of .*portable"):
        native.load("sse9")
    assert native.load().cpu_isa() == default


def test_each_instruction_set_can_be_chosen(linear_isa):
    assert native.load().cpu_isa() == linear_isa


def test_the_number_of_threads_starts_as_torchs_and_is_its_own(num_threads):
    library = native.load()
    assert library.cpu_num_threads() >= 1
    library.cpu_set_num_threads(3)
    torch_threads = torch.get_num_threads()
    assert library.cpu_num_threads() == 3
    assert torch.get_num_threads() == torch_threads
    for wrong in (0, -1, 257):
        with pytest.raises(ValueError, match=f"count: given {wrong}; accepted: 1 to 256"):
            library.cpu_set_num_threads(wrong)
