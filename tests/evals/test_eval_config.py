"""The files that say which model is served how, and what it should score."""

import pytest
from evals.gsm8k.eval_config import FOLDER, EvalConfig, read_config, read_list

from vllm.errors import ConfigError

GOOD = "model_name: org/model\naccuracy_threshold: null\n"
LISTS = sorted(FOLDER.parent.glob("models-*.txt"))


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
        (GOOD + "server_args: [--port, 80]\n", "server_args takes list of texts"),
        (GOOD + "server_args: --port\n", "server_args takes list of texts"),
        (GOOD + "env: {VLLM_USE_DEEP_GEMM: 0}\n", "env takes dict of texts"),
        (GOOD + "tolerance: 0.02\n", "go together"),
        ("model_name: m\naccuracy_threshold: 0.8\n", "go together"),
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
