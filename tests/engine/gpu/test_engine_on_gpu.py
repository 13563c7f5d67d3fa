"""The whole engine on a GPU: the numbers of transformers, FP8 beside its emulation, seeds."""

import gc

import pytest
import torch
from tiny_models import build_model

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1024,
}  # fmt: skip
PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 17, 64, 200)]
# Of a log probability, on average; on the CPU it is 0.076.
MOST_OF_FP8_CACHE = 0.12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build_model("qwen3", **SIZES).to(torch.bfloat16).save_pretrained(path)
    return str(path)


def engine(folder, **options) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    options = {"num_gpu_blocks_override": 600} | options
    return LLM(folder, skip_tokenizer_init=True, max_num_seqs=16, max_model_len=512, **options)


def prompt_logprobs(llm: LLM) -> list[torch.Tensor]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return [
        torch.tensor([entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], p[1:])])
        for o, p in zip(outputs, PROMPTS)
    ]


def largest_gap(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b) if len(x))


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.1), ("float32", 1e-3)])
def test_prompt_logprobs_equal_those_of_transformers(folder, dtype, most):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    expected = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = torch.tensor([prompt], device="cuda")
            logprobs = reference(ids).logits[0].float().log_softmax(-1)
            expected.append(logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu())
    share = {"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.1}
    llm = engine(folder, dtype=dtype, **share)
    assert largest_gap(prompt_logprobs(llm), expected) < most


def mean_gap(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return float(torch.cat([x - y for x, y in zip(a, b)]).abs().mean())


def test_fp8_kernels_lose_no_more_than_their_emulation_does(folder):
    exact = prompt_logprobs(engine(folder))
    fast = prompt_logprobs(engine(folder, quantization="fp8"))
    slow = prompt_logprobs(engine(folder, quantization="fp8", linear_backend="emulation"))
    assert mean_gap(fast, exact) < 1.2 * mean_gap(slow, exact)
    assert mean_gap(fast, slow) < mean_gap(slow, exact)


@pytest.mark.parametrize("is_eager", [True, False])
def test_an_fp8_cache_loses_what_rounding_keys_and_values_does(folder, is_eager):
    """In chunks, which read what those before them wrote."""
    options = {"max_num_batched_tokens": 48, "enforce_eager": is_eager}
    exact = prompt_logprobs(engine(folder, **options))
    rounded = prompt_logprobs(engine(folder, kv_cache_dtype="fp8", **options))
    assert 0 < mean_gap(rounded, exact) < MOST_OF_FP8_CACHE


def test_sampling_with_a_seed_gives_one_text(folder):
    llm = engine(folder, enable_prefix_caching=False)  # which would round the prompt otherwise
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=7, max_tokens=16,
                            ignore_eos=True, detokenize=False)  # fmt: skip
    prompts = [{"prompt_token_ids": PROMPTS[2]}]
    once = llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids
    again = llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids
    assert once == again
