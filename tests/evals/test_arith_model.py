"""The arithmetic model's problems, tokenizer, training code and checkpoint."""

import hashlib
import json
import re
from itertools import islice

import pytest
import torch
from evals.arith import delta_rule, problems, texts, tokenizer, train
from safetensors import safe_open

from vllm.evals import gsm8k_data

# Of tests/evals/arith/problems.py's output: what is held out must never change under a model that
# was trained on the rest.
SHA256 = {
    "test": "c431e5ea3b2d7515482a5d077b838bc32aa1f844ec64a26922537b3d6891d5b4",
    "train": "aed1c54aed051b0464f98e08acf5fbf064836e3ec4a86313c477c03bf7895715",
}
KEPT_WHOLE = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "shared_expert_gate", "conv1d",
              "A_log", "dt_bias")  # fmt: skip


def test_the_written_problems_are_the_same_in_every_python(tmp_path):
    problems.write(tmp_path)
    for split, digest in SHA256.items():
        data = (tmp_path / f"{split}.jsonl").read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, split


def test_the_harness_reads_them_as_gsm8k(tmp_path):
    problems.write(tmp_path)
    items = gsm8k_data.load(tmp_path, "test", is_checked=False)
    assert len(items) == len({item.question for item in items}) == 1319
    assert all(1 <= item.label <= 9999 for item in items)


@pytest.mark.slow
def test_no_training_stream_has_a_held_out_problem():
    questions = {problem.question for problem in problems.held_out()}
    for seed in range(3):
        trained = {problem.question for problem in islice(problems.stream(seed), 4000)}
        assert len(trained) > 3900
        assert not trained & questions


@pytest.mark.parametrize("stretch", [1, 1.7])
def test_every_calculation_in_an_answer_is_right(stretch):
    for problem in islice(problems.stream(5, stretch=stretch), 500):
        steps = re.findall(r"(\S+)=<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)", problem.answer)
        assert 2 <= len(steps) <= 4
        for text, a, operation, b, result, shown in steps:
            exact = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
            value = exact[operation] if operation in exact else int(a) / int(b)
            assert value == int(result) == int(shown) and text == f"{a}{operation}{b}"
        assert problem.answer.endswith(f"#### {steps[-1][-1]}")


def test_every_number_of_a_question_is_needed_and_told():
    """Each number that is not computed stands in the question and in a calculation."""
    for problem in islice(problems.stream(6), 300):
        told = set(re.findall(r"\d+", problem.question))
        used = {n for pair in re.findall(r"<<(\d+)[-+*/](\d+)=", problem.answer) for n in pair}
        assert told <= used


@pytest.mark.slow
def test_the_tokenizer_of_the_model_is_the_one_that_the_code_learns():
    learnt, stored = tokenizer.build(), texts.load_tokenizer()
    assert stored.get_vocab() == learnt.get_vocab()
    sample = "Question: Anna has 1234 apples.\nAnswer: naïve 漢字 <<12*34=408>>408\n#### 408\n\n"
    ids = stored(sample)["input_ids"]
    assert ids == learnt(sample)["input_ids"]
    assert stored.decode(ids) == sample
    assert [stored.decode(i) for i in stored("5071")["input_ids"]] == ["5", "0", "7", "1"]


@pytest.mark.slow
def test_a_row_of_training_data_marks_answers_alone(monkeypatch):
    monkeypatch.setattr(train, "ROWS_PER_SHARD", 2)
    ids, is_answer = train.shard(3)
    encoding = texts.load_tokenizer()
    assert ids.shape == is_answer.shape == (2, train.ROW_TOKENS + 1)
    marked = encoding.decode(ids[0][is_answer[0]].tolist())
    asked = encoding.decode(ids[0][~is_answer[0]].tolist())
    assert "Question" not in marked and "####" in marked
    assert asked.startswith("Question:") and "<<" not in asked


def test_the_model_that_is_trained_is_that_of_transformers(monkeypatch):
    """Experts computed densely and the delta rule in chunks give the logits of the library's."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

    patched = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    for name in patched:
        monkeypatch.setattr(modeling, name, getattr(modeling, name))
    block = modeling.Qwen3_5MoeSparseMoeBlock
    monkeypatch.setattr(block, "forward", block.forward)
    originals = [getattr(modeling, name) for name in patched], block.forward
    model = train.make_model(seed=4, device="cpu").eval()
    ids = torch.randint(0, tokenizer.VOCAB_SIZE, (2, 200))
    with torch.no_grad():
        ours = train.logits_of(model, ids)
        for name, original in zip(patched, originals[0]):
            setattr(modeling, name, original)
        block.forward = originals[1]
        theirs = model(input_ids=ids, use_cache=False).logits
    assert (ours - theirs).norm() / theirs.norm() < 1e-4


@pytest.mark.parametrize("size", [16, 64])
def test_the_inverse_of_a_unit_triangle_is_one(size):
    torch.manual_seed(0)
    a = torch.rand(3, size, size).tril(-1)
    eye = torch.eye(size)
    product = (a + eye) @ delta_rule.unit_lower_inverse(a)
    assert (product - eye).abs().max() < 1e-3


def test_the_checkpoint_is_small_and_its_quantised_sizes_are_whole_blocks():
    config = json.loads((texts.MODEL / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_moe_text"
    assert sum(file.stat().st_size for file in texts.MODEL.iterdir()) < 10_000_000
    with safe_open(texts.MODEL / "model.safetensors", "pt") as weights:
        for name in sorted(weights.keys()):
            shape = weights.get_slice(name).get_shape()
            is_kept = any(part in name for part in KEPT_WHOLE)
            is_gate = ".in_proj_a." in name or ".in_proj_b." in name  # one row for each head
            if name.endswith("weight_scale_inv") or is_kept:
                continue
            assert weights.get_tensor(name).dtype == torch.float8_e4m3fn, name
            assert shape[1] % 128 == 0 and (is_gate or shape[0] % 128 == 0), name


def test_the_training_log_says_what_the_checkpoint_reached():
    log = json.loads((texts.MODEL / "training.json").read_text())
    assert log["questions"] == 1319
    assert log["accuracy_bf16"] >= 0.9
    assert log["training_s"] < 15 * 60
