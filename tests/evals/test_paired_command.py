"""`vllm eval paired` from the outside, on a tiny model."""

import json
import shutil

import pytest
from entrypoints.serving import run_cli

from vllm.entrypoints.cli.main import main

TEXTS = ("the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text(f"{TEXTS[0]}\n\n{TEXTS[1]}\n")
    return path


def run_paired(a: str, b: str, *words: str):
    return run_cli("eval", "paired", "--a", a, "--b", b, *words, timeout=120)


@pytest.mark.slow
def test_a_model_agrees_with_itself_whatever_its_folder_is_called(
    text_checkpoint, prompts, tmp_path
):
    """The second text begins with a flag and has an underscore in its path, which is no flag's."""
    other = shutil.copytree(text_checkpoint, tmp_path / "my_model")
    done = run_paired(
        str(text_checkpoint),
        f"--max-model-len 256 {other}",
        *("--prompts", str(prompts), "--max-kl", "0", "--min-top1", "1", "--json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["kl"], result["top1"], result["logprob_difference"]) == (0, 1, 0)
    assert result["num_positions"] > 10
    assert result["over_budget"] == []


@pytest.mark.slow
def test_another_model_is_over_budget_and_exits_with_1(text_checkpoint, prompts):
    done = run_paired(
        str(text_checkpoint),
        f"{text_checkpoint} --load-format dummy",
        *("--prompts", str(prompts), "--max-kl", "1e-9", "--min-top1", "0.999"),
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("OVER BUDGET") == 2


@pytest.mark.slow
def test_answers_are_compared_by_mcnemar(text_checkpoint, tmp_path):
    """A random model answers nothing right; the test then has nothing against it."""
    item = json.dumps({"question": "What is 1?", "answer": "It is 1.\n#### 123456789"})
    for split in ("test", "train"):
        (tmp_path / f"{split}.jsonl").write_text(f"{item}\n" * 6)
    words = ("--gsm8k", str(tmp_path), "--no-checksum", "--answers", "--max-tokens", "4")
    model = f"{text_checkpoint} --max-model-len 1024"
    done = run_paired(model, model, *words, "--min-p", "0.05", "--json")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)["answers"]
    assert answers == {
        "num_questions": 6, "num_correct_a": 0, "num_correct_b": 0,
        "num_only_a": 0, "num_only_b": 0, "p": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("b", "words", "message"),
    [
        ("--linear-backnd emulation", (), "--b: `vllm serve` does not take --linear-backnd; did"),
        ("VLLM_USE_DEEP_GEM=0", (), "unknown environment variable VLLM_USE_DEEP_GEM; did you mean"),
        ("'", (), '--b "\'": No closing quotation'),
        ("", ("--top-k", "0"), "--top-k 0: it takes 1 to"),
        ("", ("--answers",), "--answers needs questions that have answers"),
        ("", ("--min-p", "0.05"), "--min-p judges answers"),
    ],
)
def test_a_mistake_is_named_before_anything_is_loaded(text_checkpoint, prompts, b, words, message):
    done = run_paired(str(text_checkpoint), b, "--prompts", str(prompts), *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "message"), [("", "is empty"), ("\n \n", "is empty"), (None, "cannot be read")]
)
def test_prompts_that_are_none_are_named(text_checkpoint, tmp_path, capsys, text, message):
    path = tmp_path / "prompts.txt"
    if text is not None:
        path.write_text(text)
    model = str(text_checkpoint)
    assert main(["eval", "paired", "--a", model, "--b", model, "--prompts", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_side_that_does_not_load_ends_with_its_own_message(text_checkpoint, prompts):
    done = run_paired(
        str(text_checkpoint),
        f"{text_checkpoint} --linear-backend marlin",
        *("--prompts", str(prompts)),
    )
    assert done.returncode == 2
    assert "marlin" in done.stderr
