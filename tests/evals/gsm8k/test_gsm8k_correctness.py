"""Models score on GSM8K what they are known to score, through `vllm serve`.

    pytest tests/evals/gsm8k/test_gsm8k_correctness.py -s \\
        --config-list-file=tests/evals/gsm8k/configs/models-cpu.txt --gsm8k-data-dir=DIR
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from entrypoints.serving import COMMAND, environment
from evals.gsm8k.eval_config import EvalConfig, read_config

from vllm.evals import gsm8k, gsm8k_data

_SHUTDOWN_S = 150


@pytest.fixture
def data_dir(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--gsm8k-data-dir", default=None)
    folder = folder or gsm8k_data.default_folder()
    if not (folder / "test.jsonl").exists():
        pytest.skip(
            f"no GSM8K data in {folder}: give --gsm8k-data-dir=DIR, or fetch it with "
            f"`vllm eval gsm8k --download` (it needs a running server to go on)"
        )
    return folder


@contextmanager
def served(config: EvalConfig, log: Path) -> Iterator[str]:
    """The address of `vllm serve` with the config's flags, once it is ready."""
    words = [config.model_name] if config.model_name else []
    command = [*COMMAND, "serve", *words, "--port", "0", *config.flags]
    variables = environment(**config.env)
    if "HF_HUB_OFFLINE" not in os.environ:
        del variables["HF_HUB_OFFLINE"]  # models of these lists may come from the hub
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)
    try:
        yield wait_for_address(process, log, config.startup_max_wait_seconds)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_address(process: "subprocess.Popen[bytes]", log: Path, seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if match := re.search(r"Serving \S+ at (https?://[^/]+)/v1", log.read_text()):
            return match[1]
        time.sleep(0.2)
    raise AssertionError(f"the server did not become ready:\n{log.read_text()[-4000:]}")


def test_a_model_scores_what_it_is_known_to_score(config_file, data_dir, tmp_path):
    config = read_config(config_file)
    items = gsm8k.questions_and_shots(data_dir, config.num_questions, config.num_fewshot, None)
    with served(config, tmp_path / "log") as address:
        result = gsm8k.evaluate(gsm8k.Server(address), *items, max_tokens=config.max_tokens)
    gsm8k.save(result, tmp_path / "results.json")
    print(f"\n{gsm8k.summary(result)}\n{tmp_path / 'results.json'}")
    assert result["error"] is None
    if config.accuracy_threshold is None:
        print("not judged: the config has no accuracy_threshold")
    assert (problem := config.judge(result["accuracy_upstream"])) is None, problem
