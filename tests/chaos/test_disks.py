"""Disks that are full, or cannot be written.

A slow disk is not among the cases: nothing slows one down for one process without a driver.
"""

import subprocess
from pathlib import Path

import pytest
from entrypoints.serving import COMMAND, environment

from .harness import Fault, answers

pytestmark = pytest.mark.chaos

_OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


def _with_tmpfs(folder: Path, options: str, command: str) -> "subprocess.CompletedProcess[str]":
    script = f"mount -t tmpfs -o {options} none {folder} && {command}"
    return subprocess.run([*_OWN_MOUNTS, "sh", "-c", script], capture_output=True, text=True,
                          timeout=280, env=environment(VLLM_CACHE_ROOT=str(folder)))  # fmt: skip


def _skip_without_mounts(folder: Path) -> None:
    if _with_tmpfs(folder, "size=64k", "true").returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")


def test_disk_full(fault: Fault, tmp_path: Path) -> None:
    """The disk of the cache is full when the demo model is to be written."""
    _skip_without_mounts(tmp_path)
    fault.begins()
    done = _with_tmpfs(tmp_path, "size=20m", " ".join([*COMMAND, "serve", "--port", "0"]))
    fault.noticed()
    assert done.returncode == 2, done.stderr
    assert "No space left" in done.stderr and "VLLM_CACHE_ROOT" in done.stderr
    assert "Traceback" not in done.stderr


def test_cache_cannot_be_written(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """No file of the cache can be written: a model that is there is served."""
    (tmp_path / "in-the-way").write_text("")
    variables = {"VLLM_CACHE_ROOT": str(tmp_path / "in-the-way" / "cache")}
    with fault.server(tiny_model, tmp_path / "log", **variables) as server:
        assert answers(server)
        fault.recovered()
