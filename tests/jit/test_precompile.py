"""`vllm kernels precompile`: refused without a GPU; a bundle replaces another whole."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.entrypoints.cli.kernels_precompile import _alone, _check_out, _model_folder, publish
from vllm.errors import ConfigError
from vllm.kernels.jit.caches import read_manifest, write_manifest

ROOT = Path(__file__).parents[2]


def staged(tmp_path, content: bytes) -> Path:
    folder = tmp_path / "staging"
    (folder / "triton").mkdir(parents=True)
    (folder / "triton" / "kernel").write_bytes(content)
    write_manifest(folder, {"device": "cuda:sm_90"})
    return folder


def test_a_machine_without_a_gpu_is_told_where_to_run_it(tmp_path):
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "kernels", "precompile",
             "Qwen3-8B-FP8", "--out", str(tmp_path / "b")]  # fmt: skip
    env = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 2 and "the GPU that it runs on" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "b").exists()


def test_a_bundle_is_new_or_replaces_one(tmp_path):
    out = tmp_path / "bundles" / "h100"
    out.parent.mkdir()
    for content in (b"first", b"second"):
        _check_out(out)
        publish(staged(tmp_path, content), out)
        assert (out / "triton" / "kernel").read_bytes() == content
        assert read_manifest(out)["made_for"] == {"device": "cuda:sm_90"}
    assert [path.name for path in out.parent.iterdir()] == ["h100"]


@pytest.mark.parametrize("kind", ["a file", "a folder of something else"])
def test_nothing_else_is_replaced(tmp_path, kind):
    out = tmp_path / "out"
    if kind == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="neither new nor a bundle"):
        _check_out(out)


def test_two_that_write_one_bundle_do_not_meet(tmp_path):
    out = tmp_path / "out"
    with (tmp_path / ".out.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="by another process"), _alone(out):
            pass
    with _alone(out):
        pass


def test_a_model_is_a_folder_or_a_name(tmp_path):
    named = tmp_path / "named"
    named.mkdir()
    assert _model_folder("Qwen3-8B-FP8", named) == str(named)
    assert json.loads((named / "config.json").read_text())["num_hidden_layers"] == 36
    assert _model_folder(str(named), tmp_path / "unused") == str(named)
    with pytest.raises(ConfigError, match="neither a folder"):
        _model_folder("Qwen3-8B-FP9", named)
