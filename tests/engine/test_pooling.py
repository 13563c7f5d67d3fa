"""Vectors instead of tokens: the last hidden state of a prompt, beside requests that generate."""

import math

import pytest
import torch
from transformers import AutoModel

from vllm import LLM, PoolingParams, SamplingParams
from vllm.errors import NumericsError, RequestError

PROMPTS = [[5, 6, 7], [9], list(range(20, 60))]
RAW = PoolingParams(normalize=False)


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("llama")


@pytest.fixture(scope="module")
def llm(folder):
    # 16 tokens a step: the longest prompt takes three.
    return LLM(folder, skip_tokenizer_init=True, max_num_batched_tokens=16, max_num_seqs=8)


def given(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def test_vectors_are_the_last_hidden_states_of_the_model(folder, llm):
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, llm.encode(given(PROMPTS), RAW, use_tqdm=False)):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).last_hidden_state[0, -1]
        assert output.prompt_token_ids == prompt and output.finished
        torch.testing.assert_close(torch.tensor(output.outputs), wanted, rtol=2e-3, atol=2e-3)


def test_vectors_have_length_one_unless_they_are_wanted_as_they_are(llm):
    raw = llm.encode(given(PROMPTS), RAW, use_tqdm=False)
    for output, unscaled in zip(llm.encode(given(PROMPTS), use_tqdm=False), raw):
        norm = math.hypot(*unscaled.outputs)
        assert math.isclose(math.hypot(*output.outputs), 1.0, rel_tol=1e-5) and norm > 1.5
        assert output.outputs == pytest.approx([x / norm for x in unscaled.outputs], abs=1e-6)


def test_requests_for_vectors_and_for_tokens_share_steps(llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tokens = [o.outputs[0].token_ids for o in llm.generate(given(PROMPTS), params, use_tqdm=False)]
    vectors = [o.outputs for o in llm.encode(given(PROMPTS), RAW, use_tqdm=False)]
    engine, found = llm.llm_engine, {}
    for index, prompt in enumerate(given(PROMPTS)):
        engine.add_request(f"vector {index}", prompt, RAW)
        engine.add_request(f"tokens {index}", prompt, params)
    while engine.has_unfinished:
        for output in engine.step():
            found[output.request_id] = output
    for index in range(len(PROMPTS)):
        got = torch.tensor(found[f"vector {index}"].outputs)
        torch.testing.assert_close(got, torch.tensor(vectors[index]), rtol=1e-4, atol=1e-4)
        assert found[f"tokens {index}"].outputs[0].token_ids == tokens[index]
    assert not engine.core.has_work
    engine.core.check_idle()


def test_a_prompt_that_is_known_takes_its_blocks_from_the_prefix_cache(llm):
    prompt = list(range(50, 90))
    first = llm.encode(given([prompt]), use_tqdm=False)[0]
    again = llm.encode(given([prompt]), use_tqdm=False)[0]
    assert first.num_cached_tokens == 0 and again.num_cached_tokens == 32
    torch.testing.assert_close(torch.tensor(again.outputs), torch.tensor(first.outputs))


def test_a_vector_that_is_not_finite_is_an_error(llm):
    norm = llm.llm_engine.core.runner.model.model.norm.weight
    before = norm.data.clone()
    norm.data.fill_(float("nan"))
    with pytest.raises(NumericsError, match="NaN or infinite"):
        llm.encode(given([[50, 51]]), use_tqdm=False)
    norm.data.copy_(before)
    assert llm.encode(given([[50, 51]]), use_tqdm=False)[0].finished


@pytest.mark.parametrize("prompt", [[], [10**9]])
def test_a_prompt_that_cannot_be_computed_is_refused(llm, prompt):
    with pytest.raises(RequestError):
        llm.encode(given([prompt]), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished


def test_normalize_is_true_or_false():
    with pytest.raises(RequestError, match="normalize must be True or False"):
        PoolingParams(normalize="yes")
