"""Decoding through the inputs of captured graphs gives what steps put together anew give."""

import dataclasses
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from slow import quick
from tiny_models import VOCAB

from vllm import LLM, SamplingParams
from vllm.core.request import EngineRequest
from vllm.worker import cuda_graph
from vllm.worker.cuda_graph import MOST_VERIFIED, CudaGraphs, bucket_sizes, step_shapes

MAX_SEQS = 8  # graphs of 1, 2, 4 and 8
MAX_LEN = 96


class Recorded:
    """In place of a CUDA graph: replaying it computes anew, from what is at the same addresses."""

    def __init__(self, compute, shape):
        self._compute, self._shape = compute, shape
        self.result = compute(shape)
        self.num_replays = 0

    def replay(self) -> None:
        self.result.copy_(self._compute(self._shape))
        self.num_replays += 1


class GraphsOnCpu(CudaGraphs):
    def __init__(self, compute, shapes, prepare=lambda shape: None):
        self.recorded = {}
        for shape in shapes:
            prepare(shape)
            self.recorded[shape] = Recorded(compute, shape)
        self._graphs = {shape: (entry, entry.result) for shape, entry in self.recorded.items()}
        self.shapes = sorted(self._graphs)

    @property
    def num_replays(self) -> dict:
        return {shape: entry.num_replays for shape, entry in self.recorded.items()}


def load(folder, async_scheduling: bool, **options) -> LLM:
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=64,
        **options,
    )
    core = llm.llm_engine.core
    core.executor.async_scheduling = core.runner.async_scheduling = async_scheduling
    return llm


def capture(llm: LLM) -> GraphsOnCpu:
    """From now on `llm` decodes through graphs, as an engine on a GPU does."""
    runner = llm.llm_engine.core.runner
    with torch.inference_mode():
        runner._inputs._make_decode_buffers(MAX_SEQS)
        runner._graphs = GraphsOnCpu(runner._decode_once, bucket_sizes(MAX_SEQS))
    return runner._graphs


def capture_prompts(llm: LLM, max_tokens: int) -> GraphsOnCpu:
    """Steps with prompts too."""
    runner = llm.llm_engine.core.runner
    with torch.inference_mode():
        shapes = step_shapes(runner.config, max_tokens)
        prepare = runner._inputs.pad_prompts
        runner._prompt_graphs = GraphsOnCpu(runner._prompts_once, shapes, prepare)
    return runner._prompt_graphs


def capture_drafts(llm: LLM, max_tokens: int) -> GraphsOnCpu:
    """What a layer or a head drafts after steps that verify."""
    runner = llm.llm_engine.core.runner
    drafter, shapes = runner._drafter, step_shapes(runner.config, max_tokens)
    few = [shape for shape in shapes if shape.longest <= MOST_VERIFIED]
    with torch.inference_mode():
        drafter.inputs._make_decode_buffers(MAX_SEQS)
        drafter._reserve(few)
        drafter._graphs = GraphsOnCpu(drafter._first_once, few, drafter.inputs.pad_prompts)
        drafter._fill_graphs = GraphsOnCpu(drafter._fill_once, few, drafter.inputs.pad_prompts)
    return drafter._graphs


def has_preempted(llm: LLM) -> bool:
    """More than once; with windows requests hardly grow."""
    scheduler = llm.llm_engine.core.scheduler
    return scheduler.num_preemptions > 1 or len(scheduler.blocks.sizes) > 1


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


@pytest.mark.parametrize("async_scheduling", quick([False, True], [True]))
@pytest.mark.parametrize(
    "name",
    quick(
        ["llama", "qwen2-window", "gpt_oss", "gemma3", "qwen3_moe", "qwen3_5"],
        ["llama", "gemma3", "qwen3_5"],
    ),
)
def test_captured_steps_give_what_eager_ones_give(checkpoint, name, async_scheduling):
    folder = checkpoint(name)
    wanted = run(load(folder, async_scheduling=False))
    # All running requests at their longest would need 48 blocks.
    tight = load(folder, async_scheduling, num_gpu_blocks_override=20)
    graphs = capture(tight)
    assert run(tight) == wanted
    assert has_preempted(tight)
    assert all(count > 1 for count in graphs.num_replays.values()), graphs.num_replays


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    "name",
    quick(
        ["llama", "qwen2-window", "gpt_oss", "gemma3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"],
        ["gemma3", "qwen3_5"],
    ),
)
def test_captured_steps_with_prompts_give_what_eager_ones_give(
    checkpoint, monkeypatch, name, async_scheduling
):
    monkeypatch.setattr(cuda_graph, "_FEW_SEQS", 6)
    folder = checkpoint(name)
    wanted = run(load(folder, async_scheduling=False))
    tight = load(folder, async_scheduling, num_gpu_blocks_override=20)
    decoding, prompts = capture(tight), capture_prompts(tight, 64)
    assert list(prompts.recorded) == [(32, 32, 6), (32, 32, 9), (64, 64, 6), (64, 64, 9)]
    assert run(tight) == wanted
    assert has_preempted(tight)
    for graphs in (decoding, prompts):
        assert all(graphs.num_replays.values()), graphs.num_replays


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_counts_with_the_size_of_its_graph(checkpoint, async_scheduling):
    llm = load(checkpoint("llama"), async_scheduling)
    decoding, prompts = capture(llm), capture_prompts(llm, 64)
    run(llm)
    calls, replays = llm.llm_engine.core.stats().calls, Counter(decoding.num_replays)
    for shape, count in prompts.num_replays.items():
        replays[shape.tokens] += count
    assert calls["linear"] == +replays and {1, 8, 32, 64} <= calls["linear"].keys()
    heads = calls["lm_head"]  # of the rows that are sampled
    assert heads.keys() == {1, 2, 4, 8}
    assert sum(decoding.num_replays.values()) < sum(heads.values()) <= sum(replays.values())


def test_an_eager_step_counts_with_its_tokens(checkpoint):
    llm = load(checkpoint("llama"), async_scheduling=False)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate({"prompt_token_ids": [5] * 70}, params, use_tqdm=False)
    calls = llm.llm_engine.core.stats().calls
    assert calls["linear"] == {64: 1, 8: 1, 1: 3}, "64 and 6 tokens of the prompt, and decoding"
    assert calls["lm_head"] == {1: 4}


def test_graphs_that_are_dropped_are_not_replayed(checkpoint):
    llm = load(checkpoint("llama"), async_scheduling=True)
    graphs = capture(llm), capture_prompts(llm, 64)
    llm.llm_engine.core.runner.drop_graphs()
    run(llm, 3)
    assert not any(any(own.num_replays.values()) for own in graphs)


def test_a_prompt_between_decoding_steps_leaves_others_their_blocks(checkpoint):
    def tokens(llm):
        core, found = llm.llm_engine.core, {}
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        core.add(EngineRequest("short", list(range(5, 10)), params, 0, [], 8))
        core.add(EngineRequest("long", list(range(9, 43)), params, 0, [], 8))
        for number in range(9):
            if number == 4:
                core.add(EngineRequest("one", [3, 4], params, 0, [], 1))
            for output in core.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
        assert not core.has_work
        return found

    wanted = tokens(load(checkpoint("llama"), async_scheduling=False))
    llm = load(checkpoint("llama"), async_scheduling=False)
    capture(llm)
    capture_prompts(llm, 64)
    assert tokens(llm) == wanted


def test_steps_with_more_tokens_than_were_captured_run_eagerly(checkpoint):
    folder = checkpoint("llama")
    wanted = run(load(folder, async_scheduling=False))
    llm = load(folder, async_scheduling=True)
    capture(llm)
    prompts = capture_prompts(llm, 40)
    runner, eager = llm.llm_engine.core.runner, []
    model = runner.model
    runner.model = lambda batch: eager.append(len(batch.input_ids)) or model(batch)
    runner.model.compute_logits = model.compute_logits
    assert run(llm) == wanted
    assert list(prompts.recorded) == [(32, 32, 8), (32, 32, 9), (40, 40, 8), (40, 40, 9)]
    assert sum(prompts.num_replays.values()) > 3 and any(count > 40 for count in eager)


def test_logprobs_of_prompts_come_from_captured_steps_too(checkpoint):
    folder, params = checkpoint("qwen3_5"), SamplingParams(max_tokens=3, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (40, 7, 23)]

    def found(llm):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [
            [None if e is None else {t: p.logprob for t, p in e.items()} for e in o.prompt_logprobs]
            for o in outputs
        ]

    wanted = found(load(folder, async_scheduling=False))
    llm = load(folder, async_scheduling=True)
    capture(llm)
    graphs = capture_prompts(llm, 64)
    assert found(llm) == wanted and sum(graphs.num_replays.values()) > 0


def test_a_step_begins_with_the_longest_requests_and_fills_up_with_empty_ones(checkpoint):
    llm = load(checkpoint("llama"), async_scheduling=True)
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
    llm = load(checkpoint("llama"), async_scheduling=True)
    graphs, sent = capture(llm), []
    inputs, replay = llm.llm_engine.core.runner._inputs, graphs.replay

    def look(size: int):
        sent.append(inputs._tables[0]._sent.ctypes.data)
        return replay(size)

    graphs.replay = look
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    llm.generate({"prompt_token_ids": list(range(5, 15))}, params, use_tqdm=False)
    changes = sum(before != after for before, after in pairwise(sent))
    assert len(sent) == 69 and changes == 80 // 16 - 1, "one for each block that begins"


def noted_launches(llm: LLM) -> list[bool]:
    """Of each step from now on, whether the one before was not over when it was launched."""
    core, are_ahead = llm.llm_engine.core, []
    launch = core.executor.execute_model

    def look(*given):
        are_ahead.append(core._running is not None)
        return launch(*given)

    core.executor.execute_model = look
    return are_ahead


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
    llm = load(checkpoint("llama"), async_scheduling=True)
    are_ahead = noted_launches(llm)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **options)
    llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)
    assert are_ahead == [False] + [not holds_back] * 7


def test_who_held_back_steps_holds_back_none_after_its_end(checkpoint):
    llm = load(checkpoint("llama"), async_scheduling=True)
    are_ahead = noted_launches(llm)
    for penalty in (1.1, 1.0):
        are_ahead.clear()
        params = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=penalty
        )
        llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)
    assert are_ahead == [False] + [True] * 7


def test_an_aborted_prompt_keeps_no_step_from_its_graph(checkpoint):
    llm = load(checkpoint("llama"), async_scheduling=False)
    graphs, engine = capture(llm), llm.llm_engine
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    engine.add_request("gone", {"prompt_token_ids": [5] * 90}, params)
    engine.step()
    engine.abort("gone")
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)
    assert sum(graphs.num_replays.values()) == 4


def test_a_request_that_a_step_leaves_out_goes_on_with_its_own_token(checkpoint):
    llm = load(checkpoint("llama"), async_scheduling=True)
    core, found = llm.llm_engine.core, []
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    s, count = core.scheduler, core.scheduler._num_tokens_now
    s._num_tokens_now = lambda r, budget, *behind, **waiting: min(
        count(r, budget, *behind, **waiting), 20 if r.request_id == "long" else 99
    )
    core.add(EngineRequest("long", list(range(9, 49)), params, 0, [], 6))
    core.add(EngineRequest("short", [5, 6, 7], params, 0, [], 6))
    whole = s.config
    for budget in (64, 20):  # the second step ends the long prompt, and has no room for the other
        s.config = dataclasses.replace(whole, max_num_batched_tokens=budget)
        found += core.step()
    s.config = whole
    while core.has_work:
        found += core.step()
    tokens = [token for o in found if o.request_id == "short" for token in o.token_ids]
    assert tokens == alone[0].outputs[0].token_ids


def test_the_time_in_the_queue_ends_with_the_first_admission(checkpoint):
    llm = load(checkpoint("llama"), async_scheduling=False, num_gpu_blocks_override=8)
    core, seconds = llm.llm_engine.core, {}
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for name in "abc":
        core.add(EngineRequest(name, list(range(9, 39)), params, 0, [], 60))
    while core.has_work:
        for output in core.step():
            seconds.setdefault(output.request_id, set()).add(output.queue_seconds)
    assert core.scheduler.num_preemptions > 0
    assert [len(told) for told in seconds.values()] == [1, 1, 1]


def test_what_is_held_back_for_the_next_step_is_work(checkpoint):
    llm = load(checkpoint("llama"), async_scheduling=True)
    core = llm.llm_engine.core
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    core.add(EngineRequest("other", [3, 4], params, 0, [], 1))
    reused = EngineRequest("reused", [5, 6, 7], params, 0, [], 6)
    core.add(reused)
    assert core.step() == []
    core.abort(["reused"])
    core.add(reused)
    core.abort(["reused"])
    assert core.has_work
    assert [(o.request_id, o.finish_reason) for o in core.step()] == [("other", "length")]
    assert not core.has_work
