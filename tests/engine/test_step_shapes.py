"""Which shapes of steps are captured in CUDA graphs, and which steps they hold."""

import numpy as np
import pytest
import torch

from tests.engine.test_captured_steps import capture, capture_prompts, load
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.machine import Device
from vllm.worker import cuda_graph
from vllm.worker.cuda_graph import (
    PromptShape,
    pays_off,
    prompt_shapes,
    step_shapes,
    verification_shapes,
)


def test_shapes_for_prompts_have_a_place_for_padding_and_at_most_half_more_tokens():
    shapes = prompt_shapes(512, 256)
    assert sorted({s.tokens for s in shapes}) == [32, 64, 128, 192, 256, 384, 512]
    assert {s.seqs for s in shapes if s.tokens == 512} == {8, 257}
    assert {s.seqs for s in shapes if s.tokens == 32} == {8, 31}
    assert {s.seqs for s in shapes if s.tokens == 256} == {8, 255}
    assert {s.seqs for s in prompt_shapes(512, 4)} == {5}
    assert prompt_shapes(20, 256) == [(20, 20, 8), (20, 20, 19)]
    assert prompt_shapes(2, 256) == [(2, 2, 1)] and not prompt_shapes(1, 256)
    assert all(s.tokens > s.seqs for n in range(2, 700, 9) for s in prompt_shapes(n, 256))
    assert all(s.longest == s.tokens for s in shapes)


def test_long_prompts_are_captured_where_the_host_is_slower_than_the_device():
    shapes = [shape for shape in prompt_shapes(4096, 256) if shape.tokens >= 2048]
    assert [s.tokens for s in shapes] == [2048, 2048, 2560, 3072, 3584, 4096]
    assert {s.seqs for s in shapes[2:]} == {8}
    assert all(pays_off(shape, 0.095, 0.1) for shape in shapes)
    assert [pays_off(shape, 0.08, 0.1) for shape in shapes] == [True] * 2 + [False] * 4


def test_a_shape_holds_steps_whose_padding_it_has_requests_for():
    shape = PromptShape(8, 8, 4)
    assert all(shape.holds(*step) for step in [(8, 5, 4), (8, 6, 3), (5, 3, 3), (2, 2, 1)])
    assert not any(shape.holds(*step) for step in [(7, 4, 4), (9, 7, 3), (8, 4, 5), (9, 6, 4)])
    shape = PromptShape(8, 2, 7)
    assert all(shape.holds(*step) for step in [(8, 2, 7), (8, 2, 4), (7, 2, 6), (2, 2, 1)])
    assert not any(shape.holds(*step) for step in [(7, 1, 7), (8, 3, 4), (9, 2, 5), (8, 2, 8)])


def test_steps_with_drafts_have_shapes_of_as_few_tokens_of_a_request():
    shapes = verification_shapes(2048, 256, 1)
    assert [s.tokens for s in shapes] == [2, 4, 8, 16, 32, 64, 128, 192, 256, 384]
    assert {s.longest for s in shapes} == {2}
    assert shapes[3] == (16, 2, 15) and shapes[-1] == (384, 2, 320)
    assert verification_shapes(2048, 8, 2) == [
        (2, 2, 1), (4, 3, 3), (8, 3, 7), (16, 3, 11), (24, 3, 13)
    ]  # fmt: skip
    assert verification_shapes(10, 256, 2)[-1] == (10, 3, 9)
    assert {s.longest for s in verification_shapes(2048, 8, 32)} == {2, 4, 8}
    assert not verification_shapes(1, 256, 4)


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 7, 32])
@pytest.mark.parametrize("max_seqs", [1, 2, 3, 8, 37, 256])
def test_a_step_with_drafts_finds_the_next_size(max_seqs, num_drafts):
    """Whatever its requests, with a request for all of its padding in buffers of that size."""
    shapes = verification_shapes(2048, max_seqs, num_drafts)
    longest = min(num_drafts + 1, 8)
    assert all(s.tokens > s.seqs and s.seqs <= max(2, 2 * max_seqs) for s in shapes)
    assert all(s.holds(0, 0, 0) for s in shapes), "captured with padding alone"
    for num_seqs in range(1, max_seqs + 1, 1 + max_seqs // 40):
        for tokens in range(num_seqs + 1, min(num_seqs * longest, shapes[-1].tokens) + 1):
            of_one = min(longest, tokens - num_seqs + 1)
            shape = next(s for s in shapes if s.holds(tokens, of_one, num_seqs))
            assert shape.tokens == min(s.tokens for s in shapes if s.tokens >= tokens)


@pytest.mark.parametrize("counts", [[2], [2, 2, 1], [1, 2, 2, 2], [2] * 8, [1] * 7 + [2]], ids=str)
def test_padding_of_a_step_with_drafts_lies_in_requests_of_as_few_tokens(checkpoint, counts):
    drafts = {"method": "ngram", "num_speculative_tokens": 1}
    llm = load(checkpoint("llama"), async_scheduling=False, speculative_config=drafts)
    capture(llm)
    graphs, runner = capture_prompts(llm, 64), llm.llm_engine.core.runner
    step = sum(counts), max(counts), len(counts)
    shapes, rows = [s for s in graphs.shapes if s.holds(*step)], np.arange(len(counts))
    assert len(shapes) > 1
    for shape in shapes:
        with torch.inference_mode():
            runner._inputs.fill(runner.batch, rows, np.array(counts), 10 * rows, shape=shape)
        batch = runner._inputs.prompt_batch(shape).attention
        lengths, own = batch.query_start_loc.diff(), len(counts)
        assert lengths[:own].tolist() == counts and lengths.sum() == shape.tokens
        assert len(lengths) == shape.seqs and lengths.max() <= batch.max_query_len == shape.longest
        assert batch.seq_lens[:own].tolist() == (10 * rows + counts).tolist()
        assert not batch.seq_lens[own:].any() and not batch.state_slots[own:].any()
        assert (batch.slot_mapping[sum(counts) :] == -1).all()


def test_a_size_has_the_shape_of_fewest_tokens_of_a_request_first(checkpoint):
    drafts = {"method": "ngram", "num_speculative_tokens": 16, "disable_by_batch_size": 4}
    args = EngineArgs.from_keywords(model=checkpoint("qwen3_moe"), speculative_config=drafts)
    shapes = step_shapes(args.create_engine_config(), 64)
    small = [(2, 2, 1), (4, 4, 3), (8, 8, 5), (16, 8, 6), (16, 16, 8), (16, 16, 15)]
    prompts = [(64, 64, 8), (64, 64, 63)]
    assert shapes == [*small, (32, 8, 8), (32, 32, 8), (32, 32, 31), *prompts]
    assert next(s for s in shapes if s.holds(15, 8, 2)) == (16, 8, 6)
    assert next(s for s in shapes if s.holds(15, 9, 2)) == (16, 16, 8)
    assert next(s for s in shapes if s.holds(30, 8, 20)) == (32, 32, 31)


def test_what_keeps_prompts_from_being_captured_is_told(checkpoint, caplog):
    def captured(is_eager=False, is_planned=False, **options) -> list:
        keywords = {"model": checkpoint("qwen3_moe"), "max_prompt_graph_tokens": 64} | options
        config = EngineArgs.from_keywords(**keywords).create_engine_config()
        return cuda_graph.captured_prompts(config, is_eager, is_planned)

    caplog.set_level("INFO", "vllm.worker.cuda_graph")
    assert captured() == prompt_shapes(64, 256) and not captured(max_prompt_graph_tokens=0)
    long = {"max_num_batched_tokens": 8192, "max_prompt_graph_tokens": 4096}
    assert captured(**long)[-1].tokens == 4096
    # Ranks that time a size would not agree.
    assert captured(**long, tensor_parallel_size=2)[-1].tokens == 2048
    assert not caplog.text
    lock_step = {"data_parallel_size": 2, "enable_expert_parallel": True}
    for given, words in (
        ({"is_eager": True}, "all steps are eager"),
        ({"is_planned": True}, "planned on the host"),
        (lock_step, "ranks in lock-step"),
    ):
        caplog.clear()
        assert captured(**given) == [] and words in caplog.text


@pytest.mark.parametrize(
    ("device", "options", "count"),
    [
        ("sm_90", {}, 4096),
        ("sm_90", {"max_num_batched_tokens": 512}, 512),
        ("sm_90", {"max_num_batched_tokens": 16384}, 4096),
        ("sm_90", {"max_prompt_graph_tokens": 2048}, 2048),
        ("sm_90", {"max_prompt_graph_tokens": 0}, 0),
        ("sm_90", {"enforce_eager": True}, 0),
        ("sm_90", {"debug_numerics": True}, 0),
        ("sm_90", {"tensor_parallel_size": 2}, 4096),
        ("sm_90", {"data_parallel_size": 2}, 4096),
        ("sm_90", {"data_parallel_size": 2, "enable_expert_parallel": True}, 0),
        ("cpu", {}, 0),
        ("cpu", {"max_prompt_graph_tokens": 64}, 64),
    ],
)
def test_prompts_of_up_to_4096_tokens_are_captured_where_steps_are(
    checkpoint, monkeypatch, device, options, count
):
    monkeypatch.setattr(arg_utils, "installed_device", lambda: Device.parse(device))
    args = EngineArgs.from_keywords(model=checkpoint("qwen3_moe"), **options)
    assert args.create_engine_config().scheduler_config.max_prompt_graph_tokens == count


def test_a_step_in_which_the_host_waits_captures_no_prompts(checkpoint, monkeypatch):
    monkeypatch.setattr(arg_utils, "installed_device", lambda: Device.parse("sm_90"))
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "naive")
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    args = EngineArgs.from_keywords(model=checkpoint("qwen3_moe"), **options)
    assert args.create_engine_config().scheduler_config.max_prompt_graph_tokens == 0


@pytest.mark.parametrize("count", [-1, 2049])
def test_prompts_that_no_step_holds_are_not_captured(checkpoint, count):
    options = {"max_num_batched_tokens": 2048, "max_prompt_graph_tokens": count}
    words = f"--max-prompt-graph-tokens {count} is out of range: it takes 0 to .*, 2048"
    with pytest.raises(ConfigError, match=words):
        EngineArgs.from_keywords(model=checkpoint("llama"), **options).create_engine_config()
