"""`vllm bench steps`: tables, JSON, limits without a run, and what it refuses."""

import json
from pathlib import Path

import pytest

from entrypoints.serving import run_cli
from vllm.entrypoints.cli.main import main
from vllm.kernels.report.question import GPUS, device_of, published_bandwidth

LIMITS = ["bench", "steps", "Qwen3-8B-FP8", "--roofline", "--no-run", "--device", "h200"]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["bench", "steps", *words]) == 2
    return capsys.readouterr().err


def test_limits_need_neither_weights_nor_a_gpu(capsys, tmp_path):
    file = tmp_path / "limits.json"
    out = answer(capsys, *LIMITS, "--batch", "1,64", "--context", "2048", "--json", str(file))
    result = json.loads(file.read_text())
    assert result["model"] == "Qwen3-8B-FP8" and "device" not in result
    rate = result["memory_gb_per_s"]
    assert (rate, result["memory_gb_per_s_source"]) == (4814, "published for h200")
    one, many = result["steps"]
    weights = 6_945_767_424 + 1_695_744 + 1_244_659_712
    for step in (one, many):
        assert sum(row["weight_bytes"] for row in step["rows"]) == weights
        cache = 36 * 4096 * 2049 * step["batch"]
        assert sum(row["cache_bytes"] for row in step["rows"]) == cache
        assert step["limit_us"] == pytest.approx((weights + cache) / rate / 1e3, rel=1e-4)
        assert step["limit_us"] == pytest.approx(sum(r["limit_us"] for r in step["rows"]), abs=0.1)
        assert "step_us" not in step
    assert "1 request, 2,048 keys each: limit 1.764 ms, at most 567 tokens/s" in out
    assert "lm_head" in out and "1,244.7" in out


def test_a_bandwidth_of_your_own_and_ranks(capsys):
    words = ["bench", "steps", "Qwen3-8B-FP8", "--roofline", "--no-run", "--batch", "1"]
    out = answer(capsys, *words, "--bandwidth", "1000", "--device", "cpu")
    assert "memory: 1,000 GB/s (--bandwidth)" in out
    # On the CPU the cache is float32.
    assert "limit 8.494 ms" in out
    out = answer(capsys, *words, "--device", "h100", "--tensor-parallel-size", "2")
    assert "limit 1.245 ms" in out


@pytest.mark.parametrize(
    ("asked", "name", "rate"),
    [("NVIDIA H200", "h200", 4814), ("sm_100", "b200", 8000), ("RTX 5090", "5090", 1792),
     ("a100", "a100", 2039), ("sm_121", "gb10", 273), ("h20", "h20", 4000)],
)  # fmt: skip
def test_published_bandwidths(asked, name, rate):
    assert published_bandwidth(asked, device_of(asked)) == (name, rate)


def test_every_gpu_that_is_told_apart_has_one():
    for name, chip in GPUS.items():
        found, rate = published_bandwidth(name, chip.device)
        assert found == name and rate == (chip.memory_gb_per_s or rate) > 200


def test_a_run_gives_a_table_and_json(tiny_model: Path, tmp_path: Path):
    file = tmp_path / "steps.json"
    done = run_cli("bench", "steps", str(tiny_model), "--roofline", "--batch", "1,3", "--context",
                   "32", "--steps", "4", "--json", str(file))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "between kernels" in done.stdout and "measured, reading" in done.stdout
    result = json.loads(file.read_text())
    assert result["memory_gb_per_s"] > 0.1 and result["device"]
    assert [step["batch"] for step in result["steps"]] == [1, 3]
    for step in result["steps"]:
        times = sum(row["us"] for row in step["rows"]) + step["between_us"]
        assert times == pytest.approx(step["step_us"], abs=0.05)
        rows = {row["name"]: row for row in step["rows"]}
        assert rows["mlp.down_proj"]["weight_bytes"] == 2 * 2 * 64 * 128
        assert rows["lm_head"]["weight_bytes"] == 2 * 512 * 64  # tied
        assert rows["mlp.down_proj"]["kernel"] == "cpu"


def test_without_the_roofline_there_is_a_line_for_each_batch(tiny_model: Path):
    done = run_cli("bench", "steps", str(tiny_model), "--batch", "2", "--context", "8", "--steps",
                   "2", "--load-format", "dummy")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("2 requests"))
    assert " ms (" in line and "tokens/s" in line and "lm_head" not in done.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["no_such_model", "--roofline", "--no-run", "--device", "h200"], "'no_such_model' is"),
        (["Qwen3-8B-FP8", "--batch", "0"], "--batch '0': it takes numbers of requests, 1 or more"),
        (["Qwen3-8B-FP8", "--batch", "1,x"], "--batch '1,x': it takes"),
        (["Qwen3-8B-FP8", "--batch", "300"], "--batch 300: more than --max-num-seqs 256"),
        (["Qwen3-8B-FP8", "--context", "0"], "--context 0: it takes 1 or more"),
        (["Qwen3-8B-FP8", "--steps", "0"], "--steps 0: it takes 1 or more"),
        (["Qwen3-8B-FP8", "--no-run"], "--no-run prints the limits of --roofline: give both"),
        (["Qwen3-8B-FP8", "--device", "h200"], "--device is for --no-run"),
        (["Qwen3-8B-FP8", "--roofline", "--bandwidth", "80"], "--bandwidth is for --no-run"),
        (["Qwen3-8B-FP8", "--json", "/nowhere/x"], "--json /nowhere/x: it takes a file in a fold"),
        (["Qwen3-8B-FP8", "--speculative-config", '{"method": "ngram"}'], "without draft tokens"),
        ([*LIMITS[2:], "--context", "40000"], "--context 40000: the model takes at most 32768"),
        ([*LIMITS[2:], "--bandwidth", "inf"], "--bandwidth inf: it takes a number above 0"),
        ([*LIMITS[2:], "--pipeline-parallel-size", "2"], "leave --pipeline-parallel-size and"),
        ([*LIMITS[2:], "--tensor-parallel-size", "3"], "num_attention_heads = 32 is not a"),
        ([*LIMITS[2:], "--bandwidth", "0"], "--bandwidth 0.0: it takes a number above 0"),
        ([*LIMITS[2:-1], "h201"], "--device 'h201': unknown chip"),
        ([*LIMITS[2:-1], "cpu"], "no memory bandwidth is published for it; give --bandwidth"),
        (LIMITS[2:-2], "--no-run: there is no GPU here; name one, as in --device h200"),
        (["Qwen3-8B-FP8", "--load-format", "dummy", "--context", "32768"],
         "it is more than the 32768 of --max-model-len"),
        (["Qwen3-8B-FP8", "--load-format", "dummy", "--tensor-parallel-size", "2"],
         "bench steps times one rank"),
    ],
)  # fmt: skip
def test_what_it_refuses(words, reason, capsys):
    assert reason in refused(capsys, *words)
