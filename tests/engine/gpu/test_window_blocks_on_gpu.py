"""Window layers on a GPU keep their window's blocks alone: the tokens are those with all blocks."""

import pytest
import torch
from tiny_models import build_model

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "sliding_window": 40,
    "max_position_embeddings": 1024,
}  # fmt: skip
# A window of half the layers, with sinks; of two thirds; of every layer.
MODELS = {"gpt_oss": {}, "gemma3": {}, "mistral": {}}
PROMPTS = [list(range(3, 3 + n)) for n in (1, 30, 40, 41, 100, 333)]
GREEDY = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", params=MODELS)
def folder(tmp_path_factory, request) -> str:
    path = tmp_path_factory.mktemp("model")
    sizes = SIZES | MODELS[request.param]
    build_model(request.param, **sizes).to(torch.bfloat16).save_pretrained(path)
    return str(path)


def answers(folder: str, **options) -> tuple[list[list[int]], list[list[float]], LLM]:
    """Of all prompts, in chunks, and of one again, whose beginning is cached."""
    llm = LLM(folder, skip_tokenizer_init=True, max_num_seqs=8, max_model_len=512,
              max_num_batched_tokens=96, num_gpu_blocks_override=400, **options)  # fmt: skip
    params = [GREEDY] * len(PROMPTS)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [*llm.generate(prompts, params, use_tqdm=False)]
    outputs += llm.generate(prompts[-1:], params[-1:], use_tqdm=False)
    tokens = [list(one.outputs[0].token_ids) for one in outputs]
    logprobs = [
        [
            entry[token].logprob
            for token, entry in zip(one.outputs[0].token_ids, one.outputs[0].logprobs)
        ]
        for one in outputs
    ]
    return tokens, logprobs, llm


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("is_eager", [True, False])
def test_tokens_and_their_bits_are_those_with_all_blocks(folder, kv_cache_dtype, is_eager):
    options = {"kv_cache_dtype": kv_cache_dtype, "enforce_eager": is_eager}
    wanted = answers(folder, disable_hybrid_kv_cache_manager=True, **options)
    tokens, logprobs, llm = answers(folder, disable_hybrid_kv_cache_manager=False, **options)
    groups = llm.llm_engine.config.cache_groups
    assert any(group.window for group in groups)
    assert tokens == wanted[0]
    assert logprobs == wanted[1]
