"""The files that say which model is served how, and what it should score."""

import argparse
from pathlib import Path

import pytest
from evals.gsm8k.eval_config import FOLDER, EvalConfig, read_config, read_list

from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError

GOOD = "model_name: org/model\naccuracy_threshold: null\n"
LISTS = sorted(FOLDER.glob("models-*.txt"))
BLACKWELL = FOLDER / "models-qwen35-blackwell.txt"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_committed_config_is_valid_and_explains_itself(path):
    config = read_config(path)
    assert config.num_questions == 1319
    assert config.num_fewshot == 5
    assert path.read_text().startswith("# ")


def test_every_committed_config_is_in_a_list():
    listed = {config for path in LISTS for config in read_list(path)}
    assert listed == set(FOLDER.glob("*.yaml"))


def test_the_tolerance_of_the_e8m0_model_sees_the_published_loss():
    config = read_config(FOLDER / "Qwen3.5-35B-A3B-FP8-DEP2.yaml")
    assert all(config.judge(x) is None for x in (0.7847, 0.7832, 0.7794, 0.7885))
    assert all(config.judge(x) for x in (0.7301, 0.7566, 0.7324))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "acuracy: 1\n", "unknown key acuracy"),
        (GOOD + "num_question: 5\n", "did you mean num_questions?"),
        (GOOD + "num_questions: many\n", "num_questions takes int, not 'many'"),
        (GOOD + "num_questions: true\n", "num_questions takes int, not True"),
        (GOOD + "num_question: 5\n", "known keys: model_name, accuracy_threshold, tolerance"),
        (GOOD + "server_args: [--port, 80]\n", "server_args takes list or str of texts"),
        (GOOD + "server_args: 5\n", "server_args takes list or str of texts"),
        (GOOD + "server_args: --name 'a\n", "server_args cannot be split into words"),
        (GOOD + "max_model_len: 4k\n", "max_model_len takes int"),
        (GOOD + "max_model_len: 64\nserver_args: --max-model-len 32\n", "give one"),
        (GOOD + "env: {VLLM_USE_DEEP_GEMM: 0}\n", "env takes dict of texts"),
        (GOOD + "tolerance: 0.02\n", "a tolerance needs an accuracy_threshold"),
        ("model_name: m\naccuracy_threshold: 78.0\ntolerance: 0.02\n", "a share from 0 to 1"),
        ("model_name: m\n", "lacks accuracy_threshold"),
        ("accuracy_threshold: null\n", "lacks model_name"),
        ("", "must hold keys and values"),
        ("- a\n- b\n", "must hold keys and values"),
        ("model_name: [", "is not readable YAML"),
        ("model_name: !!python/object/apply:os.getcwd []\n", "is not readable YAML"),
    ],
)
def test_a_bad_config_is_named_with_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"model\.yaml") as error:
        read_config(path)
    assert message in str(error.value)


def test_a_config_of_upstream_is_read_as_it_is(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(
        'model_name: "org/model"\naccuracy_threshold: 0.92\nnum_questions: 1319\nnum_fewshot: 5\n'
        "max_model_len: 4096\nstartup_max_wait_seconds: 2400\n"
        "server_args: >-\n  --enforce-eager -tp 2\n  --hf-overrides '{\"a\": 1}'\n"
        'env:\n  VLLM_USE_DEEP_GEMM: "0"\n'
    )
    config = read_config(path)
    assert config.flags == [
        *("--max-model-len", "4096", "--enforce-eager", "-tp", "2"),
        *("--hf-overrides", '{"a": 1}'),
    ]
    assert config.env == {"VLLM_USE_DEEP_GEMM": "0"}
    assert config.startup_max_wait_seconds == 2400
    assert config.judge(0.841) is None and config.judge(0.839)  # its default tolerance is 0.08


def test_the_list_of_b200_judges_every_model_by_what_was_published():
    configs = [read_config(path) for path in read_list(BLACKWELL)]
    assert {c.model_name: (c.accuracy_threshold, c.tolerance) for c in configs} == {
        "Qwen/Qwen3.5-35B-A3B": (0.84, 0.03),
        "Qwen/Qwen3.5-35B-A3B-FP8": (0.78, 0.02),
        "nvidia/Qwen3.5-397B-A17B-NVFP4": (0.88, 0.03),
    }
    assert all("Not run on hardware." in path.read_text() for path in read_list(BLACKWELL))


def test_the_flags_of_every_config_are_those_of_vllm_serve():
    parser = argparse.ArgumentParser(exit_on_error=False)
    EngineArgs.add_cli_args(parser)
    for path in FOLDER.glob("*.yaml"):
        parser.parse_args(read_config(path).flags)


def test_a_list_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_list(Path("configs/models-qwen35-blackwell.txt")) == read_list(BLACKWELL)


def test_a_config_without_threshold_judges_nothing():
    assert EvalConfig(model_name=None, accuracy_threshold=None).judge(0.0) is None


def test_a_score_is_judged_by_the_config_s_own_tolerance():
    config = EvalConfig(model_name=None, accuracy_threshold=0.5, tolerance=0.125)
    assert config.judge(0.375) is None
    assert "below 0.3750" in config.judge(0.374)


@pytest.mark.parametrize(
    ("text", "message"),
    [("# nothing\n\n", "names no config"), ("Nobody.yaml\n", "names Nobody.yaml")],
)
def test_a_bad_list_is_named(tmp_path, text, message):
    path = tmp_path / "models.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_list(path)
