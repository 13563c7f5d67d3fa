"""The arithmetic model through `vllm serve`: its score, and the gate on DeepGEMM's UE8M0 scales.

On an emulated B200 (sm_100) the default settings must give the numbers of float32 scales, because
the model is of type qwen3_5_moe_text. Two ways of breaking that rule must fail the same gate.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from entrypoints.serving import (
    REPOSITORY,
    RunningServer,
    environment,
    started_server,
    wait_until,
)
from evals.arith import problems, texts

from vllm.evals import served
from vllm.evals.gsm8k import Server
from vllm.evals.paired import Budget, Position, compare

HARNESS = Path(__file__).parent / "gsm8k" / "gsm8k_eval.py"
# In the same arithmetic nothing differs but the batches a float32 product is computed in; UE8M0
# scales in the dense layers alone make it 0.0003.
BUDGET = Budget(max_kl=1e-5)
# 11,000 tokens; enough to see a broken rule by, in `make test`, are those of a few.
NUM_TEXTS, FEW = 90, 9
BREAK_THE_RULE = """
from vllm.utils import deep_gemm

deep_gemm.excluded_model_types = frozenset
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("arith")
    problems.write(folder)
    return folder


@contextmanager
def emulated(numbers: str, log: Path, **variables: str) -> Iterator[RunningServer]:
    flags = ("--linear-backend", numbers, "--moe-backend", numbers)
    with started_server(texts.MODEL, log, *flags, **variables) as server:
        yield server


def score(server: RunningServer, data: Path, results: Path, num_questions: int) -> float:
    """The accuracy that the GSM8K script reports, with one worked example."""
    command = [
        *(sys.executable, str(HARNESS), "--port", str(server.port), "--data-dir", str(data)),
        *("--no-checksum", "--num-shots", "1", "--num-questions", str(num_questions)),
        *("--save-results", str(results)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(results.read_text())
    assert result["num_answered"] == num_questions
    return float(result["accuracy"])


def thoughts(server: RunningServer, num_texts: int) -> list[Position]:
    return served.positions(Server(server.url), texts.token_ids(num_texts))


@cache
def thoughts_with_float32_scales(folder: Path, num_texts: int) -> list[Position]:
    with emulated("emulate:cutlass@sm_100", folder / "reference.log") as server:
        return thoughts(server, num_texts)


def gate(server: RunningServer, folder: Path, num_texts: int = NUM_TEXTS) -> list[str]:
    """What is wrong with the numbers of a server that must compute as with float32 scales."""
    reference = thoughts_with_float32_scales(folder, num_texts)
    assert len(reference) >= 112 * num_texts
    return compare(reference, thoughts(server, num_texts)).over_budget(BUDGET)


def fp8_choices(server: RunningServer, family: str) -> dict[str, set[int]]:
    """Backends chosen for the FP8 layers of a family, with the ranks of who decided."""
    found: dict[str, set[int]] = {}
    for decision in server.get("/kernels").json["decisions"]:
        problem = decision["problem"]
        if problem["family"] == family and "fp8" in problem["text"]:
            found.setdefault(decision["chosen"], set()).add(decision["origin"]["rank"])
    return found


@pytest.mark.slow
def test_all_held_out_problems_are_answered_as_well_as_after_training(data, tmp_path):
    with started_server(texts.MODEL, tmp_path / "log") as server:
        accuracy = score(server, data, tmp_path / "results.json", problems.NUM_HELD_OUT)
    trained = json.loads((texts.MODEL / "training.json").read_text())["accuracy_bf16"]
    assert accuracy >= trained - 0.01  # measured: 0.9955 after 0.9970


@pytest.mark.slow
def test_on_sm_100_the_model_rule_keeps_the_numbers_of_float32_scales(
    data, tmp_path, tmp_path_factory
):
    with emulated("emulate:sm_100", tmp_path / "log") as server:
        assert fp8_choices(server, "linear") == {"cutlass": {5}}
        assert "deep_gemm" not in fp8_choices(server, "moe")
        assert score(server, data, tmp_path / "results.json", 150) >= 0.97
        assert gate(server, tmp_path_factory.getbasetemp()) == []


@pytest.mark.slow
def test_the_gate_fails_where_a_variable_overrides_the_rule(tmp_path, tmp_path_factory):
    with emulated("emulate:sm_100", tmp_path / "log", VLLM_USE_DEEP_GEMM="1") as server:
        assert fp8_choices(server, "linear") == {"deep_gemm": {3}}
        assert len(gate(server, tmp_path_factory.getbasetemp())) == 1


def test_the_gate_fails_where_the_rule_forgets_the_model_type(tmp_path, tmp_path_factory):
    """Python runs `sitecustomize` in the server and in the engine's process alike."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(BREAK_THE_RULE)
    path = f"{broken}:{REPOSITORY}"
    with emulated("emulate:sm_100", tmp_path / "log", PYTHONPATH=path) as server:
        assert fp8_choices(server, "linear") == {"deep_gemm": {7}}
        assert len(gate(server, tmp_path_factory.getbasetemp(), FEW)) == 1


@pytest.mark.slow
def test_answers_until_the_server_is_killed_are_saved(data, tmp_path):
    results = tmp_path / "results.json"
    command = [
        *(sys.executable, str(HARNESS), "--data-dir", str(data), "--no-checksum"),
        *("--num-shots", "1", "--concurrency", "4", "--save-results", str(results)),
    ]
    with started_server(texts.MODEL, tmp_path / "log") as server:
        command += ["--port", str(server.port)]
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        # Of those that the server has counted, 4 may not have reached the asker: its concurrency.
        wait_until(lambda: server.metric("vllm:request_success_total") >= 12)
        server.process.kill()
        output, _ = asking.communicate(timeout=180)
    assert asking.returncode == 1
    assert "STOPPED EARLY" in output
    saved = json.loads(results.read_text())
    assert saved["error"]
    assert 8 <= saved["num_answered"] == len(saved["answers"]) < problems.NUM_HELD_OUT
