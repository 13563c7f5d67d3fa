"""benchmarks/on_gpu.py: scripts take the commands it gives them, and a part spares the next."""

import math
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from slowness import slowness

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from on_gpu import PARTS, Part, pack, run, words_of  # noqa: E402

from vllm.entrypoints.cli.main import make_parser  # noqa: E402

SHARED = {"vllm.kernels.jit.flashinfer": ROOT / "vllm/kernels/jit/flashinfer.py"}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_script_of_a_part_exists_and_declares_its_flags(part: Part, tmp_path: Path) -> None:
    words = words_of(part, tmp_path)
    if words[:2] == ["-m", "vllm.entrypoints.cli.main"]:
        assert make_parser().parse_known_args(words[2:])[1] == []
        return
    script = SHARED[words[1]] if words[0] == "-m" else ROOT / words[0]
    source = script.read_text()
    flags = {word for word in words if word.startswith("--")}
    assert not {flag for flag in flags if f'"{flag}"' not in source}


def test_a_part_that_takes_long_is_run_by_its_name_alone() -> None:
    def listed(*names: str) -> set[str]:
        words = [sys.executable, ROOT / "benchmarks/on_gpu.py", *names, "--list", "--out", "/tmp"]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return {line.split()[0] for line in lines.splitlines()}

    assert listed("fused_moe", "moe") == {"fused_moe", "moe"}
    assert listed() == {part.name for part in PARTS} - {"fused_moe"}


def test_models_that_are_measured_are_known_by_name() -> None:
    from vllm.architectures.registry import builtin_config

    scripts = [part.command.split() for part in PARTS if "serving/" in part.command]
    steps = [part.command.split() for part in PARTS if "bench steps" in part.command]
    assert len(scripts) > 5 and len(steps) == 3
    models = [words[1] for words in scripts] + [words[4] for words in steps]
    assert all(map(builtin_config, models))


def outcome(tmp_path: Path, code: str, seconds: int = 5, left: float = 100.0) -> str:
    part = Part("one", seconds, f"-c {code!r}")
    (tmp_path / "logs").mkdir(exist_ok=True)
    return run(part, tmp_path, time.monotonic() + left)


def test_a_part_that_fails_is_told_with_its_log(tmp_path: Path) -> None:
    said = outcome(tmp_path, "print(7); raise SystemExit(3)")
    assert re.match(r"failed with 3 after \d+ s, see ", said)
    assert (tmp_path / "logs" / "one.txt").read_text().splitlines()[-1] == "7"
    assert outcome(tmp_path, "pass").startswith("ok, ")


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '99']).pid, flush=True); "
    seconds = math.ceil(2 * slowness())  # until Python has started
    said = outcome(tmp_path, f"{child} time.sleep(99)", seconds)
    assert said.startswith("ended after ")
    pid = (tmp_path / "logs" / "one.txt").read_text().splitlines()[-1]
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z")


def test_a_part_that_would_not_end_in_time_is_not_begun(tmp_path: Path) -> None:
    assert outcome(tmp_path, "pass", seconds=5, left=4.0).startswith("not begun: takes 5 s, and 4")
    assert not list((tmp_path / "logs").iterdir())


def test_the_archive_has_the_folder_of_results(tmp_path: Path) -> None:
    results = tmp_path / "h100"
    results.mkdir()
    (results / "a.json").write_text("{}")
    pack(results, tmp_path / "all.tar.gz")
    with tarfile.open(tmp_path / "all.tar.gz") as packed:
        assert packed.getnames() == ["h100", "h100/a.json"]
