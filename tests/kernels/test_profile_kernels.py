"""What benchmarks/kernels/profile_kernels.py makes of ncu's output, and of its absence."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels" / "profile_kernels.py"
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
OUTPUT = "\n".join([
    "==PROF== Connected to process 1",
    '"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread","{}","{}","{}"'
    .format(*map(STALLED.format, ("long_scoreboard", "barrier", "selected"))),
    '"","","ns","register/thread","inst","inst","inst"',
    '"0","a_kernel","12,345","168","1.5","2.5","9"',
])  # fmt: skip


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("profile_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["profile_kernels"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["profile_kernels"]


def shown(script, values):
    lines = [line.split(None, 1) for line in script.report_of(values)]
    return {words[0]: words[1] for words in lines if len(words) == 2}


def test_the_metrics_of_a_launch_are_shown_in_plain_units(script):
    (values,) = script.launches_of(OUTPUT)
    lines = shown(script, values)
    assert lines["duration"].split() == ["12.35", "us"]
    assert lines["registers"].split() == ["168", "a", "thread"]
    assert lines["L2"] == "not given"


def test_the_worst_stalls_come_first_and_issuing_is_none(script):
    (values,) = script.launches_of(OUTPUT)
    assert shown(script, values)["stalls"].startswith("barrier 2.50, long_scoreboard 1.50 (")


def test_without_figures_there_is_no_launch(script):
    assert script.launches_of("==ERROR== ERR_NVGPUCTRPERM") == []


def run_with(script, monkeypatch, tmp_path, *words):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words, "--out", str(tmp_path / "out")])
    return script.main()


def test_without_ncu_it_says_so(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_with(script, monkeypatch, tmp_path, "skinny") == 1
    assert "ncu is not on PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (1, "==ERROR== ERR_NVGPUCTRPERM", "may not read the GPU's counters"),
        (0, "==WARNING== No kernels were profiled.", "no figures (exit code 0): ==WARNING== No"),
    ],
)
def test_what_ncu_refuses_is_told(script, tmp_path, status, text, message):
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
    ncu.chmod(0o755)
    with pytest.raises(script.CannotProfileError) as error:
        script.profile(str(ncu), "skinny", "skinny", (16, 4096, 4096))
    assert message in str(error.value)


@pytest.mark.parametrize("size", ["4096", "0x16", "16x4096"])
def test_sizes_of_another_kind_are_refused(script, monkeypatch, tmp_path, size):
    with pytest.raises(SystemExit):
        run_with(script, monkeypatch, tmp_path, "skinny", "--sizes", size)
