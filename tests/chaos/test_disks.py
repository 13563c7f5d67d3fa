"""Disks that are full, slow, or cannot be written."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from entrypoints.serving import COMMAND, RunningServer, environment

from .harness import Fault, answers, tokens, wait_for

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


_DELAY_S = 0.3


def _slow_disk(folder: Path) -> dict[str, str]:
    """Variables of a process to which `folder` is slow."""
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler of C")
    source, library = Path(__file__).with_name("slow_disk.c"), folder / "slow.so"
    delay = f"-DDELAY_US={int(_DELAY_S * 1e6)}"
    command = [compiler, "-x", "c", "-D_GNU_SOURCE", delay, "-shared", "-fPIC", "-o"]
    subprocess.run([*command, str(library), str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "SLOW_FOLDER": str(folder / "disk")}


def test_disk_slow(fault: Fault, server: RunningServer, tiny_model: Path, tmp_path: Path) -> None:
    """Model and caches lie on a disk whose every call takes 0.3 s."""
    disk, variables = tmp_path / "disk", _slow_disk(tmp_path)
    shutil.copytree(tiny_model, disk / "model")
    variables["VLLM_CACHE_ROOT"] = str(disk / "cache")
    began = os.times().elapsed
    probe = ["cat", str(disk / "model" / "config.json")]
    subprocess.run(probe, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, check=True)
    assert os.times().elapsed - began > _DELAY_S, "the disk is not slow"
    fault.begins()
    with fault.server(disk / "model", tmp_path / "log", **variables) as slow:
        fault.recovered()
        assert tokens(slow) == tokens(server)
        grammar = slow.complete(prompt="ban", guided_regex="[a-c]{3}", max_tokens=8)
        assert len(grammar["choices"][0]["text"]) == 3
        wait_for(lambda: any((disk / "cache").rglob("*.json")), 30)
