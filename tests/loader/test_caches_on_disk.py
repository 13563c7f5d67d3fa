"""What is kept on disk is written once whoever asks at the same time, and again when it broke."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from full_disk import full_disk

from vllm.entrypoints import demo
from vllm.errors import ConfigError
from vllm.utils.files import RECORD, damage, locked, published_folder

REPOSITORY = Path(__file__).parents[2]


def at_once(count: int, code: str, *words: str, **variables: str) -> list[str]:
    """What `count` processes print that run `code` at the same time; none may fail."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", **variables}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, *words, str(number)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for number in range(count)
    ]  # fmt: skip
    said = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0] * count, said
    return [out for out, _ in said]


PUBLISH = """
import sys, time
from pathlib import Path
from vllm.utils.files import published_folder
def write(folder):
    print("written", flush=True)
    folder.mkdir()
    for name in "abc":
        (folder / name).write_text(name * 100000)
        time.sleep(0.05)
folder = published_folder(Path(sys.argv[1]), write)
for name in "abc":
    assert (folder / name).read_text() == name * 100000
"""


def test_six_processes_write_a_folder_once(tmp_path):
    said = at_once(6, PUBLISH, str(tmp_path / "folder"))
    assert sorted(said) == [""] * 5 + ["written\n"]
    assert {path.name for path in tmp_path.iterdir()} == {"folder", ".folder.lock"}


def filled(folder: Path) -> None:
    folder.mkdir()
    for name in ("model", "config"):
        (folder / name).write_text(name * 1000)


def truncate(folder: Path) -> None:
    os.truncate(folder / "model", 10)


def flip_a_byte(folder: Path) -> None:
    (folder / "model").write_text("M" + ("model" * 1000)[1:])


def lose_a_file(folder: Path) -> None:
    (folder / "config").unlink()


def put_a_pipe(folder: Path) -> None:
    (folder / "config").unlink()
    os.mkfifo(folder / "config")


def break_the_record(folder: Path) -> None:
    (folder / RECORD).write_text("{")


def put_a_file(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("in the way")


@pytest.mark.parametrize(
    "broken",
    [truncate, flip_a_byte, lose_a_file, put_a_pipe, break_the_record, put_a_file],
    ids=lambda broken: broken.__name__,
)
@pytest.mark.usefixtures("ends_soon")
def test_a_broken_folder_is_written_again_with_a_line_in_the_log(
    broken, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    target = published_folder(tmp_path / "folder", filled)
    assert damage(target) is None
    broken(target)
    assert published_folder(target, filled) == target
    assert (target / "model").read_text() == "model" * 1000
    assert f"{target} is broken" in caplog.text and "written again" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"folder", ".folder.lock"}


def test_a_whole_folder_is_neither_written_nor_read_again(tmp_path, monkeypatch):
    target = published_folder(tmp_path / "folder", filled)
    monkeypatch.setattr("vllm.utils.files._digest", None)
    assert published_folder(target, None) == target


def test_a_copied_folder_is_compared_by_its_content(tmp_path):
    target = published_folder(tmp_path / "folder", filled)
    os.utime(target / "model")
    assert damage(target) is None


def test_a_lock_ends_with_the_process_that_held_it(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from vllm.utils.files import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "x")],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(BlockingIOError), locked(tmp_path / "x", waits=False):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    begin = time.monotonic()
    with locked(tmp_path / "x"):
        assert time.monotonic() - begin < 1


# ---------------------------------------------------------------- single files


def test_what_six_processes_add_to_a_file_at_once_is_all_there(tmp_path):
    code = """
import sys
from vllm.kernels.evidence.passed import add_passed
from vllm.kernels.evidence.quarantine import Failure, add_failure
from vllm.platforms.libraries import remember_trial
for i in range(10):
    name = f"{sys.argv[1]} {i}"
    add_passed([name])
    remember_trial(name)
    add_failure(Failure("cpu", "1", "cpu", name, "library", "it failed", "today"))
"""
    at_once(6, code, VLLM_CACHE_ROOT=str(tmp_path))
    every = {f"{process} {i}" for process in range(6) for i in range(10)}
    tables = tmp_path / "kernel_tables"
    assert set(json.loads((tables / "passed_probes.json").read_text())) == every
    assert {f["size_key"] for f in json.loads((tables / "quarantine.json").read_text())} == every
    assert set(json.loads((tmp_path / "library_trials.json").read_text())) == every


# ---------------------------------------------------------------- the demo model


@pytest.mark.slow
def test_six_starts_at_once_write_the_demo_model_once_and_a_broken_one_heals(tmp_path):
    code = (
        "from vllm.entrypoints.demo import demo_model_path; import vllm.entrypoints.demo as demo\n"
        "make = demo._make\n"
        "def once(folder): print('made'); make(folder)\n"
        "demo._make = once; path = demo_model_path()"
    )
    said = at_once(6, code, VLLM_CACHE_ROOT=str(tmp_path))
    assert sorted(said) == [""] * 5 + ["made\n"]
    weights = tmp_path / "models" / demo.DEMO_NAME / "model.safetensors"
    whole = weights.read_bytes()
    os.truncate(weights, len(whole) // 2)
    assert at_once(1, code, VLLM_CACHE_ROOT=str(tmp_path)) == ["made\n"]
    assert weights.read_bytes() == whole
    assert not [p for p in weights.parents[1].iterdir() if p.name.startswith(f".{demo.DEMO_NAME}-")]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "model").write_bytes(bytes(1 << 20))

    monkeypatch.setattr(demo, "_make", make)
    with pytest.raises(ConfigError, match="set VLLM_CACHE_ROOT"), full_disk():
        demo.demo_model_path()
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{demo.DEMO_NAME}.lock"]


def test_a_whole_demo_model_is_served_from_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(demo, "_make", filled)
    made = demo.demo_model_path()

    def refuse(path: Path, waits: bool = True) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr("vllm.utils.files.locked", refuse)  # root may write what is read-only
    assert demo.demo_model_path() == made
    truncate(made)
    with pytest.raises(ConfigError, match=r"Read-only.*set VLLM_CACHE_ROOT"):
        demo.demo_model_path()
