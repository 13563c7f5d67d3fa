"""An engine that sleeps gives the memory of its GPU back."""

import pytest
import torch

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu


def test_sleep_frees_weights_and_cache_and_wake_up_brings_the_same_answers(checkpoint):
    folder = checkpoint("llama")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    llm = LLM(folder, skip_tokenizer_init=True, gpu_memory_utilization=0.3, max_num_seqs=4)

    def answer():
        return llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0]

    before, held = answer().outputs[0].token_ids, torch.cuda.memory_reserved()
    llm.sleep()
    assert torch.cuda.memory_reserved() < 0.1 * held
    llm.wake_up()
    assert answer().outputs[0].token_ids == before
