"""In the last layer only tokens whose hidden state somebody reads are computed to the end."""

import random
from itertools import accumulate

import pytest
import torch
from slow import quick
from tiny_models import ARCHITECTURES, VOCAB

from vllm import LLM, SamplingParams

LENGTHS = (1, 7, 33, 100)
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def load(folder, **options) -> LLM:
    defaults = {"skip_tokenizer_init": True, "max_num_seqs": 8, "enable_prefix_caching": False}
    return LLM(folder, **defaults | options)


def prompts() -> list[dict[str, list[int]]]:
    rng = random.Random(5)
    return [{"prompt_token_ids": [rng.randrange(3, VOCAB) for _ in range(n)]} for n in LENGTHS]


class Seen:
    """What passes through the model of `llm`: rows of logits, and by step how many rows the first
    and the last feed-forward part got."""

    def __init__(self, llm: LLM, reads_all: bool = False):
        self.logits, self.first, self.last = [], [], []
        model = llm.llm_engine.core.runner.model
        model.lm_head.register_forward_hook(lambda _m, _i, out: self.logits.append(out.clone()))
        layers = [layer for layer in model.model.layers if layer.mlp is not None]
        for layer, counts in ((layers[0], self.first), (layers[-1], self.last)):
            layer.mlp.register_forward_pre_hook(
                lambda _m, inputs, counts=counts: counts.append(inputs[0].shape[0])
            )
        if reads_all:
            model.register_forward_pre_hook(self._read_all)

    @staticmethod
    def _read_all(_module, inputs) -> None:
        inputs[0].read_rows = None


def run(folder, params=GREEDY, reads_all: bool = False, **options):
    llm = load(folder, **options)
    seen = Seen(llm, reads_all)
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    return seen, [output.outputs[0].token_ids for output in outputs]


CASES = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "llama in bfloat16": ("llama", {"dtype": "bfloat16"}),
    "qwen3_moe in bfloat16": ("qwen3_moe", {"dtype": "bfloat16"}),
    "llama in fp8": ("llama", {"quantization": "fp8"}),
}


@pytest.mark.parametrize("case", quick(CASES, [*CASES][::4]))
def test_logits_are_the_same_bits_as_when_all_tokens_are(checkpoint, case):
    name, options = CASES[case]
    folder = checkpoint(name)
    seen, tokens = run(folder, **options)
    every, wanted = run(folder, reads_all=True, **options)
    assert tokens == wanted
    assert torch.equal(torch.cat(seen.logits), torch.cat(every.logits))
    assert seen.first == every.first == every.last
    assert seen.last == [len(logits) for logits in seen.logits]
    assert sum(LENGTHS) in seen.first, "one step must hold all prompts"


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_a_chunk_that_samples_nothing_computes_one_token_to_the_end(checkpoint, name):
    folder, options = checkpoint(name), {"max_num_batched_tokens": 16}
    seen, tokens = run(folder, **options)
    every, wanted = run(folder, reads_all=True, **options)
    assert tokens == wanted
    assert torch.equal(torch.cat(seen.logits), torch.cat(every.logits))
    assert seen.last.count(1) > 3 and len(seen.last) > len(seen.logits)


def test_prompt_logprobs_need_all_tokens_of_the_steps_that_compute_them(checkpoint):
    asking = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=0)
    options = {"max_num_batched_tokens": 40}
    seen, tokens = run(checkpoint("llama"), [GREEDY, asking, GREEDY, GREEDY], **options)
    assert tokens == run(checkpoint("llama"), **options)[1]
    # The second prompt ends in the first step.
    assert seen.last[0] == seen.first[0] == 40
    assert max(seen.last[1:]) <= len(LENGTHS)
    assert list(accumulate(seen.first))[-1] > sum(LENGTHS)
