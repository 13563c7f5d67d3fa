"""`vllm kernels tune` on the CPU: from a measurement to the choice it makes, and interruptions."""

import argparse
import json
import signal
import subprocess
import time

import pytest
from entrypoints.serving import COMMAND, environment, run_cli

from vllm.architectures.registry import builtin_config
from vllm.entrypoints.cli.kernels_tune import add_tune
from vllm.entrypoints.cli.main import main
from vllm.kernels.evidence.quarantine import Failure, write_failures

SMALL = ("--layer", "fp8-block:256x256", "--tokens", "1,256")


@pytest.fixture
def vllm(tmp_path):
    """vllm(*words) -> (exit code, stdout, stderr), with a cache of its own."""

    def run(*words: str) -> tuple[int, str, str]:
        done = run_cli("kernels", *words, timeout=120, VLLM_CACHE_ROOT=str(tmp_path))
        return done.returncode, done.stdout, done.stderr

    return run


def tables(folder):
    return sorted((folder / "kernel_tables").glob("cpu*.json"))


def test_what_is_measured_is_what_explain_chooses_by(vllm, tmp_path):
    code, out, err = vllm("tune", *SMALL)
    assert code == 0, err
    (path,) = tables(tmp_path)
    row = json.loads(path.read_text())["rows"][
        "fp8-block[128x128]:256x256 fp32 dynamic-group128,none"
    ]
    assert set(row) == {"cpu", "torch"} and set(row["cpu"]["us"]) == {"1", "256"}
    assert "checked" in out and "relative error" in out
    code, out, _ = vllm("explain", "--layer", "fp8-block:256x256", "--json")
    (decision,) = json.loads(out)["decisions"]
    assert decision["origin"]["rank"] == 6 and str(path) in decision["origin"]["text"]
    assert decision["expected"]["worst_regret"] <= 0.03
    code, out, _ = vllm("explain", "--layer", "fp8-block:256x256", "--linear-backend", "torch")
    assert "over the fastest measured" in out and "cpu for M =" in out


@pytest.mark.slow
def test_a_second_run_has_nothing_left_to_do_and_again_does_it(vllm, tmp_path):
    assert vllm("tune", *SMALL)[0] == 0
    before = tables(tmp_path)[0].read_text()
    assert "0 kernels to measure, 2 are in" in vllm("tune", *SMALL)[1]
    assert tables(tmp_path)[0].read_text() == before
    assert "2 kernels to measure" in vllm("tune", *SMALL, "--again", "--plan")[1]


def test_a_backend_that_cannot_run_here_is_told(vllm):
    out = vllm("tune", *SMALL, "--backend", "deep_gemm", "--plan")[1]
    assert "no kernel that was asked for can run on cpu" in out


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["checked", "timed"])
def test_an_interrupt_keeps_what_was_measured_and_the_same_command_goes_on(vllm, tmp_path, moment):
    words = ("tune", "--layer", "fp8-block:256x256", "--layer", "fp8-block:512x256",
             "--layer", "fp8-block:768x256", "--tokens", "1,8,64")  # fmt: skip
    process = subprocess.Popen(
        [*COMMAND, "kernels", *words], env=environment(VLLM_CACHE_ROOT=str(tmp_path)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    for line in process.stdout:
        if f"  {moment}  " in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "the same command goes on" in out, err
    assert "Traceback" not in err
    found = [json.loads(path.read_text())["rows"] for path in tables(tmp_path)]
    done = sum(len(row) for rows in found for row in rows.values())
    assert (moment == "timed") == bool(done) and done < 6
    assert not (tmp_path / "kernel_tables" / "quarantine.json").exists()
    code, out, err = vllm(*words)
    assert code == 0 and f"{6 - done} kernels to measure, {done} are in" in out, err


@pytest.mark.slow
def test_a_model_is_measured_by_its_layers_and_a_total_limit_stops_in_time(vllm):
    start = time.monotonic()
    code, out, err = vllm("tune", "Qwen3-8B-FP8", "--tp", "8", "--budget", "0.001s")
    assert code == 0 and "for want of time" in out, err
    assert time.monotonic() - start < 30
    out = vllm("tune", "Qwen3-8B-FP8", "--tp", "8", "--plan")[1]
    assert "fp8-block[128x128]:768x4096 fp32" in out
    out = vllm("tune", "Qwen3-8B-FP8", "--tp", "1,8", "--plan")[1]
    assert all(f"fp8-block[128x128]:{n}x4096 fp32" in out for n in (768, 6144))


def test_a_model_whose_quantisation_is_not_read_is_refused(capsys, tmp_path):
    config = builtin_config("Qwen3-8B-FP8") | {"quantization_config": {"quant_method": "hqq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["kernels", "tune", str(tmp_path), "--plan"]) == 2
    assert "quant_method 'hqq' is not supported; it takes fp8" in capsys.readouterr().err


def test_a_model_is_read_as_vllm_serve_reads_it(capsys, tmp_path):
    config = builtin_config("Qwen3-8B-FP8")
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["kernels", "tune", str(tmp_path), "--plan"]
    assert main([*words, "--quantization", "fp8"]) == 0
    assert "fp8-block[128x128]:24576x4096" in capsys.readouterr().out
    assert main([*words, "--hf-overrides", '{"intermediate_size": 6144}']) == 0
    out = capsys.readouterr().out
    assert "bf16:12288x4096" in out and "24576" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a MODEL, --layer or --from"),
        (("--layer", "fp8-block:8x8", "--tokens", "0"), "--tokens '0'"),
        (("Qwen3-8B-FP8", "--tp", "two"), "--tp 'two'"),
        (("--layer", "fp8-block:8x8", "--backend", "cpus"), "did you mean cpu?"),
        (("--layer", "fp8-block:8x8", "--timeout", "0"), "--timeout 0.0"),
        (("Qwen3-8B-FP8", "--ep", "0"), "--ep '0'"),
        (("Qwen9",), "Qwen9"),
        (("Qwen3-8B-FP8", "--quantization", "fp9"), "fp9"),
        (("--layer", "fp8-block:8x8", "--quantization", "fp8"), "not --layer"),
        (("--from", "http://localhost:1", "--quantization", "fp8"), "leave out --quantization"),
    ],
)
def test_what_cannot_be_meant_is_refused(capsys, words, message):
    assert main(["kernels", "tune", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", ["0", "10 m", "m", "1d", "-3s"])
def test_a_budget_that_is_no_time_is_refused(capsys, given):
    with pytest.raises(SystemExit) as exit_:
        main(["kernels", "tune", "--layer", "fp8-block:8x8", f"--budget={given}"])
    assert exit_.value.code == 2 and "as 90s, 10m or 1h" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200)]
)
def test_a_budget_is_a_time(given, seconds):
    parser = argparse.ArgumentParser()
    add_tune(parser)
    assert parser.parse_args(["--budget", given]).budget == seconds


@pytest.mark.slow
def test_a_table_of_another_build_is_measured_again_and_that_is_told(vllm, tmp_path):
    assert vllm("tune", *SMALL)[0] == 0
    (path,) = tables(tmp_path)
    content = json.loads(path.read_text())
    for row in content["rows"].values():
        row["torch"]["version"] = "torch 1.0"
    path.write_text(json.dumps(content))
    out = vllm("tune", *SMALL, "--plan")[1]
    assert "measured again: torch: the table's times are of torch 1.0, and torch 2" in out
    assert "1 kernels to measure, 1 are in" in out


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_ends_the_run_with_its_name(vllm, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = vllm("tune", *SMALL, "--output", str(tmp_path / "file" / "t.json"))
    assert code == 2 and "t.json cannot be written" in err and "Traceback" not in err


def test_failures_are_listed_and_lifted(vllm, tmp_path, monkeypatch):
    assert "no kernel has failed" in vllm("quarantine")[1]
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    write_failures(
        Failure(name, "native 0.1.0", "cpu", "bf16:8x8 fp32", "library", "hung", "2026-11-22")
        for name in ("cpu", "torch", "rotary")
    )
    assert "hung" in vllm("quarantine")[1]
    shown = vllm("quarantine", "--backend", "Rotary")[1]
    assert "rotary" in shown and "torch" not in shown
    assert "1 forgotten" in vllm("quarantine", "--clear", "--backend", "rotary")[1]
    code, _, err = vllm("quarantine", "--clear", "--backend", "rotari")
    assert code == 2 and "did you mean rotary?" in err
    assert "1 forgotten" in vllm("quarantine", "--clear", "--backend", "cpu")[1]
    assert [f["backend"] for f in json.loads(
        (tmp_path / "kernel_tables" / "quarantine.json").read_text())] == ["torch"]  # fmt: skip
