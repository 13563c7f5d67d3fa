"""Decoding through the inputs of captured graphs gives what steps put together anew give."""

import random
from itertools import pairwise

import pytest
import torch
from tiny_models import VOCAB

from vllm import LLM, SamplingParams
from vllm.worker.cuda_graph import CudaGraphs, bucket_sizes

MAX_SEQS = 8  # graphs of 1, 2, 4 and 8
MAX_LEN = 96


class Recorded:
    """In place of a CUDA graph: replaying it computes anew, from what is at the same addresses."""

    def __init__(self, compute, size: int):
        self._compute, self._size = compute, size
        self.logits = compute(size)
        self.num_replays = 0

    def replay(self) -> None:
        self.logits.copy_(self._compute(self._size))
        self.num_replays += 1


class GraphsOnCpu(CudaGraphs):
    def __init__(self, compute, max_batch: int):
        self.recorded = {size: Recorded(compute, size) for size in bucket_sizes(max_batch)}
        self._graphs = {size: (entry, entry.logits) for size, entry in self.recorded.items()}
        self._sizes = sorted(self._graphs)


def load(folder, runs_ahead: bool, **options) -> LLM:
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=64,
        **options,
    )
    core = llm.llm_engine.core
    core.executor.runs_ahead = core.runner.runs_ahead = runs_ahead
    return llm


def capture(llm: LLM) -> GraphsOnCpu:
    """From now on `llm` decodes through graphs, as an engine on a GPU does."""
    runner = llm.llm_engine.core.runner
    with torch.inference_mode():
        runner._inputs._make_decode_buffers(MAX_SEQS)
        runner._graphs = GraphsOnCpu(runner._decode_once, MAX_SEQS)
    return runner._graphs


def requests(count: int):
    """Of lengths that differ, so that they end in different steps; some with seeds of their own."""
    rng = random.Random(3)
    prompts, params = [], []
    for _ in range(count):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))]
        prompts.append({"prompt_token_ids": prompt})
        params.append(
            SamplingParams(
                temperature=rng.choice([0, 1.0]),
                seed=rng.randrange(1000),
                max_tokens=rng.randint(3, MAX_LEN - len(prompt)),
                logprobs=rng.choice([None, 2]),
                ignore_eos=rng.random() < 0.7,
                min_tokens=rng.choice([0, 0, 3]),
                logit_bias=rng.choice([None, {7: 2.5, 9: -100.0}]),
                frequency_penalty=rng.choice([0, 0, 0, 0.5]),
            )
        )
    return prompts, params


def run(llm: LLM, count: int = 40):
    """Tokens and logprobs of each request."""
    found = []
    for output in llm.generate(*requests(count), use_tqdm=False):
        choice = output.outputs[0]
        logprobs = [
            {token: entry.logprob for token, entry in position.items()}
            for position in choice.logprobs or []
        ]
        found.append((choice.token_ids, logprobs))
    llm.llm_engine.core.check_idle()
    return found


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3_moe", "qwen3_5"])
def test_captured_steps_give_what_eager_ones_give(checkpoint, name, runs_ahead):
    folder = checkpoint(name)
    wanted = run(load(folder, runs_ahead=False))
    # All running requests at their longest would need 48 blocks.
    tight = load(folder, runs_ahead, num_gpu_blocks_override=20)
    graphs = capture(tight)
    assert run(tight) == wanted
    assert tight.llm_engine.core.scheduler.num_preemptions > 1
    replays = {size: entry.num_replays for size, entry in graphs.recorded.items()}
    assert all(count > 1 for count in replays.values()), replays


def test_a_step_begins_with_the_longest_requests_and_fills_up_with_empty_ones(checkpoint):
    llm = load(checkpoint("llama"), runs_ahead=True)
    graphs, seen = capture(llm), []
    inputs = llm.llm_engine.core.runner._inputs
    replay = graphs.replay

    def look(size: int):
        batch = inputs.decode_batch(size).attention
        used = int((batch.slot_mapping >= 0).sum())
        seen.append((size, used, batch.seq_lens.tolist(), batch.state_slots.tolist()))
        return replay(size)

    graphs.replay = look
    run(llm)
    for size, used, lens, slots in seen:
        assert lens[:used] == sorted(lens[:used], reverse=True) and lens[used - 1] > 0
        assert lens[used:] == slots[used:] == [0] * (size - used)
        assert len({*slots[:used]}) == used, "each request has a slot of its own"
    assert any(used < size for size, used, _, _ in seen)
    assert any(len({*lens[:used]}) > 3 for _, used, lens, _ in seen)


def test_block_tables_are_sent_again_only_when_they_have_changed(checkpoint):
    llm = load(checkpoint("llama"), runs_ahead=True)
    graphs, sent = capture(llm), []
    inputs, replay = llm.llm_engine.core.runner._inputs, graphs.replay

    def look(size: int):
        sent.append(inputs._sent_tables.ctypes.data)
        return replay(size)

    graphs.replay = look
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    llm.generate({"prompt_token_ids": list(range(5, 15))}, params, use_tqdm=False)
    changes = sum(before != after for before, after in pairwise(sent))
    assert len(sent) == 69 and changes == 80 // 16 - 1, "one for each block that begins"


@pytest.mark.parametrize(
    ("options", "holds_back"),
    [
        ({"logit_bias": {7: 1.0}}, False),
        ({"min_tokens": 4}, False),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_only_what_depends_on_the_last_token_holds_back_the_next_step(
    checkpoint, options, holds_back
):
    llm = load(checkpoint("llama"), runs_ahead=True)
    core, are_ahead = llm.llm_engine.core, []
    launch = core.executor.launch

    def look(*given):
        are_ahead.append(core._running is not None)
        return launch(*given)

    core.executor.launch = look
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **options)
    llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)
    assert are_ahead == [False] + [not holds_back] * 7
