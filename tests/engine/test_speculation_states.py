"""Draft tokens of models with recurrent states: a state after each token that is verified, of which
that after the last accepted one goes on. Tokens and log-probabilities are those without drafts."""

from itertools import chain

import pytest
from slow import quick

from tests.engine.test_captured_steps import capture, capture_prompts, load
from tests.engine.test_memory import Short
from tests.engine.test_speculation import FEW, NGRAM, Counts, ask, check, run, sampling
from vllm import LLM
from vllm.core import speculation
from vllm.core.request import EngineRequest, Request
from vllm.worker.input_batch import InputBatch

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "nemotron_h-moe"]
NAMES = quick(FAMILIES, ["qwen3_5", "nemotron_h"])
OPTIONS = {"max_model_len": 128, "skip_tokenizer_init": True}
MIXED = {
    "greedy": {"temperature": 0, "allowed_token_ids": None, "logprobs": 2},
    "greedy among few": {"temperature": 0, "logprobs": 1},
    "seeds": {"seed": 11, "logprobs": 3},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "logprobs": 1},
    "prompt logprobs": {"prompt_logprobs": 1},
    "choices": {"n": 2},
    "stop ids": {"stop_token_ids": [6], "min_tokens": 11, "ignore_eos": True},
}


def prompts_of(count: int, length: int = 20) -> list[dict]:
    return [
        {"prompt_token_ids": ([10 + i, *FEW, 11, 12] * length)[: length + 3 * i]}
        for i in range(count)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_all_ways_to_sample_in_one_batch_with_prompts_in_chunks(checkpoint, name):
    """Each step is of some rows with drafts, of others without, and of a chunk of a prompt."""
    params = [sampling(**options) for options in MIXED.values()]
    prompts, options = prompts_of(len(params)), {"max_num_batched_tokens": 24, **OPTIONS}
    plain, _ = run(checkpoint(name), prompts, params, **options)
    llm = LLM(checkpoint(name), max_num_seqs=8, speculative_config=NGRAM, **options)
    core, kinds = llm.llm_engine.core, set()

    def note(step) -> None:
        drafts = step.scheduled_spec_decode_tokens
        kinds.add(
            frozenset(
                "drafts" if i in drafts else "one token" if count == 1 else "prompt"
                for i, count in step.num_scheduled_tokens.items()
            )
        )

    core.on_scheduled = note
    assert ask(llm, prompts, params) == plain
    counts = Counts(llm)
    assert counts.num_accepted > 10 and counts.num_rejected > 10
    assert frozenset({"drafts", "one token", "prompt"}) in kinds
    assert {frozenset({"drafts", "one token"}), frozenset({"drafts"})} & kinds
    check_slots(llm)


def check_slots(llm: LLM) -> None:
    """Every slot is a request's, a draft token's of a step without a result, or free."""
    batch, config = llm.llm_engine.core.runner.batch, llm.llm_engine.core.runner.config
    count = config.scheduler_config.max_num_seqs + config.num_draft_states
    used = [*map(batch.state_slot, batch.row_of), *chain(*batch._draft_slots.values())]
    assert sorted([*used, *batch._free_state_slots]) == list(range(1, count + 1))


@pytest.mark.parametrize("name", NAMES)
def test_preempted_requests_go_on_with_the_same_tokens(checkpoint, name):
    params = [sampling(seed=seed, max_tokens=70, logprobs=1) for seed in range(6)]
    options = {**OPTIONS, "num_gpu_blocks_override": 16}
    counts = check(checkpoint(name), prompts_of(6), params, **options)
    assert counts.stats.num_preemptions > 0


@pytest.mark.parametrize("name", NAMES)
def test_states_of_prompts_that_are_kept_go_on_with_drafts(checkpoint, name):
    """Turns of conversations with one beginning, in a cache that is too small."""
    options = {
        "max_model_len": 512, "skip_tokenizer_init": True, "max_num_seqs": 3,
        "max_num_batched_tokens": 100,
    }  # fmt: skip
    system = [(7 * i + 3) % 90 + 3 for i in range(150)]
    params = sampling(max_tokens=14, logprobs=2)
    plain = LLM(checkpoint(name), **options)
    kept = LLM(
        checkpoint(name), enable_prefix_caching=True, num_state_snapshots=6,
        num_gpu_blocks_override=70, speculative_config=NGRAM, **options,
    )  # fmt: skip
    texts = [[*system, *tail] for tail in ([5, 6, 7] * 5, [8, 5] * 20, [9], [6, 7] * 35)]
    for _ in range(3):
        inputs = [{"prompt_token_ids": text} for text in texts]
        found = ask(kept, inputs, params)
        assert found == ask(plain, inputs, params)
        texts = [[*text, *answer[0], 5, 6] for text, answer in zip(texts, found)]
    counts = Counts(kept)
    assert counts.num_accepted > 10 and counts.num_rejected > 10
    assert counts.stats.prefix_cache_hits > 1000


def test_no_token_is_computed_twice(checkpoint):
    """Those of a draft that was refused are the only ones beyond the tokens without drafts."""
    num_tokens = {}
    for drafts in (None, NGRAM):
        llm = LLM(checkpoint("qwen3_5"), max_num_seqs=8, speculative_config=drafts, **OPTIONS)
        sizes: list[int] = []
        llm.llm_engine.core.on_scheduled = lambda step, sizes=sizes: sizes.append(
            sum(step.num_scheduled_tokens.values())
        )
        ask(llm, prompts_of(5), [sampling(seed=seed) for seed in range(5)])
        num_tokens[drafts is None] = sum(sizes)
    num_rejected = Counts(llm).num_rejected
    assert num_rejected > 0 and num_tokens[False] == num_tokens[True] + num_rejected


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
@pytest.mark.parametrize("is_switching", [False, True])
def test_steps_that_overlap_and_are_captured_read_the_slots_of_now(
    checkpoint, monkeypatch, name, is_switching
):
    """As on a GPU; with drafts all the time, or on and off every few steps."""
    if is_switching:
        for constant in ("_FIRST_STEPS", "_PLAIN_STEPS", "_HELD", "_MOST_HELD"):
            monkeypatch.setattr(speculation, constant, 3)
    else:
        monkeypatch.setattr(speculation, "_FIRST_STEPS", 1000)
    prompts = [{"prompt_token_ids": [10 + i, *FEW, 11] * 3} for i in range(12)]
    params = [sampling(seed=i, max_tokens=20 + 4 * i, logprobs=i % 2) for i in range(12)]
    wanted = ask(load(checkpoint(name), async_scheduling=False), prompts, params)
    llm = load(
        checkpoint(name), async_scheduling=True, num_gpu_blocks_override=12,
        speculative_config=NGRAM,
    )  # fmt: skip
    decoding, graphs = capture(llm), capture_prompts(llm, 64)
    assert ask(llm, prompts, params) == wanted
    counts = Counts(llm)
    assert counts.num_accepted > 10 and counts.num_rejected > 10
    assert counts.stats.num_preemptions > 0
    replays = graphs.num_replays.items()
    assert sum(n for shape, n in replays if shape.longest < shape.tokens) > 5
    assert not is_switching or sum(decoding.num_replays.values()) > 5
    check_slots(llm)


def test_requests_of_a_step_that_lacks_memory_end_and_leave_their_slots(checkpoint):
    """Their states may have advanced."""
    llm = LLM(checkpoint("qwen3_5"), max_num_seqs=4, speculative_config=NGRAM, **OPTIONS)
    core, outputs = llm.llm_engine.core, []
    short = Short(core.runner, most=1000)
    for index, prompt in enumerate(prompts_of(3)):
        tokens = prompt["prompt_token_ids"]
        core.add(EngineRequest(str(index), tokens, sampling(seed=index), index, [], 60))
    while core.has_work:
        if any(request.spec_token_ids for request in core.scheduler.running):
            short.most = 3  # a token of each request
        outputs += core.step()
    failed = [output for output in outputs if output.error]
    assert len(failed) == 3 and all("out of memory" in output.error for output in failed)
    check_slots(llm)
    short.most = 1000
    wanted, _ = run(checkpoint("qwen3_5"), prompts_of(3), sampling(), **OPTIONS)
    assert ask(llm, prompts_of(3), sampling()) == wanted


def test_an_aborted_request_leaves_its_slots_to_others(checkpoint):
    llm = LLM(checkpoint("qwen3_5"), max_num_seqs=2, speculative_config=NGRAM, **OPTIONS)
    core = llm.llm_engine.core
    for name in ("a", "b"):
        core.add(EngineRequest(name, [10, 11] * 8, sampling(), 1, [], 60))
    while not core.scheduler.requests["a"].spec_token_ids:
        core.step()
    core.abort(["a"])
    while core.has_work:
        core.step()
    core.check_idle()
    check_slots(llm)
    wanted, _ = run(checkpoint("qwen3_5"), prompts_of(4), sampling(), **OPTIONS)
    assert ask(llm, prompts_of(4), sampling()) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "nemotron_h"])
def test_ranks_accept_the_same_tokens(checkpoint, name, ranks):
    params = [sampling(temperature=0), sampling(), sampling(seed=5, presence_penalty=0.5)]
    check(checkpoint(name), prompts_of(3), params, **OPTIONS, **{ranks: 2})


# ---------------------------------------------------------------- slots


def batch_of(*names: str, num_draft_states: int) -> InputBatch:
    batch = InputBatch(4, 64, 16, 100, num_draft_states=num_draft_states)
    for name in names:
        wire = EngineRequest(name, [3, 4, 5], sampling(allowed_token_ids=None), 0, [], 9)
        batch.add(Request.of(wire), 2)
    return batch


def test_a_request_goes_on_in_the_slot_of_its_last_accepted_token():
    batch = batch_of("a", "b", "c", num_draft_states=5)
    before = {name: batch.state_slot(name) for name in "abc"}
    batch.put_drafts({"a": [7, 8, 9], "b": [7, 8]})
    slots = {name: list(batch.draft_slots_of(batch.row_of[name])) for name in "ab"}
    everything = [*before.values(), *slots["a"], *slots["b"]]
    assert len({*everything}) == 8 and 0 not in everything
    batch.append_tokens(["a", "b", "c"], [[7, 8, 50], [50], [50]])
    assert batch.state_slot("a") == slots["a"][1]
    assert (batch.state_slot("b"), batch.state_slot("c")) == (before["b"], before["c"])
    assert sorted([*batch._free_state_slots, *map(batch.state_slot, "abc")]) == [*range(1, 10)]


def test_slots_of_a_step_without_a_result_are_free_again():
    batch = batch_of("a", num_draft_states=2)
    for _ in range(5):
        batch.put_drafts({"a": [7, 8]})
    batch.put_drafts({})
    assert sorted([*batch._free_state_slots, batch.state_slot("a")]) == [*range(1, 7)]


def test_models_without_states_keep_no_slots_of_drafts():
    batch = batch_of("a", num_draft_states=0)
    for _ in range(9):
        batch.put_drafts({"a": [7] * 16})
    assert sorted([*batch._free_state_slots, batch.state_slot("a")]) == [*range(1, 5)]
