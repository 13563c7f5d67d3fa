"""The demo model itself: the logits and tokens transformers gives for the same FP8 weights."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_fp8 import dequantise
from transformers import AutoConfig, AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.entrypoints.demo import demo_model_path
from vllm.utils.files import damage, published_folder

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old fisherman who " * 8,
]


def int8_head(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    groups = stored["lm_head.weight"].double().unflatten(1, (-1, 32))
    return (groups * stored["lm_head.weight_scale"].double().unsqueeze(2)).flatten(1)


@pytest.fixture(scope="module")
def folder():
    return demo_model_path()


@pytest.fixture(scope="module")
def reference(folder):
    """transformers in float64 (its float32 is itself off by 2e-4), with the weights we serve."""
    stored = load_file(folder / "model.safetensors")
    weights = {n: t.double() for n, t in stored.items() if t.dtype == torch.bfloat16}
    weights["lm_head.weight"] = int8_head(stored)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    missing = model.load_state_dict(weights | dequantise(stored), strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys
    return model


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_model_len=1024, max_num_seqs=8)


@pytest.mark.slow
def test_a_folder_of_another_version_is_made_again(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))

    def older(made: Path) -> None:
        shutil.copytree(folder, made, ignore=shutil.ignore_patterns(".files.json"))
        (made / "README.md").write_text("Other weights.")

    other = published_folder(tmp_path / "models" / folder.name, older)
    assert damage(other) is None
    assert demo_model_path() == other
    assert (other / "README.md").read_text() == (folder / "README.md").read_text()


def test_logits_match(llm, reference):
    captured = []
    head = llm.llm_engine.core.runner.model.lm_head
    hook = head.register_forward_hook(lambda _m, _i, out: captured.append(out.clone()))
    for prompt in PROMPTS:
        captured.clear()
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        with torch.inference_mode():
            wanted = reference(torch.tensor([output.prompt_token_ids])).logits[0]
        assert (torch.cat(captured) - wanted).abs().max() < 1e-4
    hook.remove()


@pytest.mark.slow
def test_greedy_tokens_match_over_64_steps(llm, reference):
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        num_prompt, generated = len(output.prompt_token_ids), output.outputs[0].token_ids
        tokens = torch.tensor([output.prompt_token_ids + generated])
        with torch.inference_mode():
            likeliest = reference(tokens).logits[0].argmax(-1)
        assert generated == likeliest[num_prompt - 1 : -1].tolist()
