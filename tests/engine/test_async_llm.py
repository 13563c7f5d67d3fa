"""The engine in a process of its own: how many requests it takes, and whether it lives."""

import asyncio
import os
import signal
import time

import pytest

from vllm import LLM, SamplingParams
from vllm.core.request import EngineRequest
from vllm.engine import supervision
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.engine.async_llm import AsyncLLM
from vllm.engine.input_processor import is_quick
from vllm.engine.output_processor import RequestState
from vllm.errors import RequestError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams


def args(folder, **options):
    return EngineArgs.from_keywords(model=folder, skip_tokenizer_init=True, **options)


def test_two_requests_have_no_id_together_and_an_engine_is_free_again(checkpoint):
    async def ask(llm, n, name="one"):
        params = SamplingParams(n=n, max_tokens=3, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [5, 6]}
        return [output async for output in llm.generate(prompt, params, name)][-1]

    async def run() -> None:
        llm = AsyncLLM(args(checkpoint("llama"), max_num_seqs=2))
        try:
            await llm.wait_ready()
            assert len((await ask(llm, 3)).outputs) == 3
            assert [engine.num_in_flight for engine in llm._engines] == [0]
            first = asyncio.create_task(ask(llm, 1, "same"))
            second = asyncio.create_task(ask(llm, 1, "same"))
            found = await asyncio.gather(first, second, return_exceptions=True)
            assert sum(isinstance(one, RequestError) and "in use" in str(one) for one in found) == 1
        finally:
            await llm.shutdown()

    asyncio.run(run())


def served(checkpoint, body) -> None:
    """Runs `await body(llm)` on an engine that is ready."""

    async def run() -> None:
        llm = AsyncLLM(args(checkpoint("llama"), max_num_seqs=2))
        try:
            await llm.wait_ready()
            await body(llm)
        finally:
            await llm.shutdown()

    asyncio.run(run())


def test_only_a_few_token_ids_are_read_in_the_event_loop():
    few, many = [5] * 100, [5] * 100_000
    assert is_quick(few, SamplingParams(temperature=0.5, max_tokens=9, logprobs=2, stop=["a"]))
    assert is_quick({"prompt_token_ids": few, "cache_salt": "a"}, SamplingParams())
    for prompt in ("text", {"prompt": "text"}, many, {"prompt_token_ids": many}, (5, 6)):
        assert not is_quick(prompt, SamplingParams()), prompt
    for given in (
        {"n": 2},
        {"bad_words": ["a"]},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
        {"allowed_token_ids": many},
        {"logit_bias": {5: 1.0}},
        {"stop_token_ids": many},
    ):
        assert not is_quick(few, SamplingParams(**given)), given


def test_what_is_told_at_once_is_not_yielded_and_all_else_is(checkpoint):
    """tell: takes every second time, and never the end."""
    told: list[int] = []
    asked = 0

    def tell(state: RequestState) -> bool:
        nonlocal asked
        asked += 1
        news = state.take_text() if asked % 2 else None
        told.extend([] if news is None else [news[1]])
        return news is not None

    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, temperature=0,
                                output_kind=RequestOutputKind.DELTA)  # fmt: skip
        prompt = {"prompt_token_ids": [5, 6, 7]}
        yielded = [output async for output in llm.generate(prompt, params, "one", tell=tell)]
        tokens = [len(output.outputs[0].token_ids) for output in yielded]
        assert len(told) > 5 and len(yielded) > 5 and min(told + tokens) > 0
        assert sum(told) + sum(tokens) == 40
        assert [output.finished for output in yielded].index(True) == len(yielded) - 1
        expected = [output async for output in llm.generate(prompt, params, "two")]
        ids = [token for output in expected for token in output.outputs[0].token_ids]
        assert yielded[-1].outputs[0].token_ids == ids[-tokens[-1] :]

    served(checkpoint, body)


def test_what_tell_raises_ends_its_request_alone(checkpoint):
    def tell(state: RequestState) -> bool:
        raise KeyError("arguments")

    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, temperature=0,
                                output_kind=RequestOutputKind.DELTA)  # fmt: skip
        prompt = {"prompt_token_ids": [5, 6, 7]}

        async def number(name: str) -> int:
            outputs = [output async for output in llm.generate(prompt, params, name)]
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        other = asyncio.create_task(number("other"))
        with pytest.raises(KeyError, match="arguments"):
            [output async for output in llm.generate(prompt, params, "one", tell=tell)]
        assert await other == 40 and not llm.errored and not llm.trouble

    served(checkpoint, body)


KINDS = (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA)


def test_a_request_that_ends_while_its_prompt_is_read_is_answered_once(checkpoint, monkeypatch):
    read = RequestState.read_prompt

    def slowly(self) -> None:
        if self.has_unread_prompt:
            time.sleep(0.5)
        read(self)

    monkeypatch.setattr(RequestState, "read_prompt", slowly)

    async def body(llm: AsyncLLM) -> None:
        for kind in KINDS:
            params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False,
                                    prompt_logprobs=1, output_kind=kind)  # fmt: skip
            prompt = {"prompt_token_ids": [5, 6, 7]}
            outputs = [output async for output in llm.generate(prompt, params, str(kind))]
            assert [output.finished for output in outputs].count(True) == 1
            tokens = [len(output.outputs[0].token_ids) for output in outputs]
            assert (sum(tokens) if kind == RequestOutputKind.DELTA else tokens[-1]) == 3
            assert len(outputs[-1].prompt_logprobs) == 3

    served(checkpoint, body)


@pytest.mark.slow
def test_a_machine_that_was_frozen_goes_on(checkpoint, monkeypatch):
    monkeypatch.setattr(supervision, "_NOTICE_SECONDS", 1.5)
    monkeypatch.setattr(supervision, "_MAX_TICK_SECONDS", 1.0)

    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)
        outputs = llm.generate({"prompt_token_ids": [5, 6]}, params, "one")
        whole = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0.05)
        os.kill(llm._engines[0].process.pid, signal.SIGSTOP)
        time.sleep(3.0)  # this process too
        os.kill(llm._engines[0].process.pid, signal.SIGCONT)
        await whole
        async for _ in outputs:
            assert not llm.trouble
        assert not llm.is_dead

    served(checkpoint, body)


def test_the_first_request_waits_for_the_model_and_an_engine_sleeps_and_wakes(checkpoint):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(3, 40))}

    async def ask(llm, name):
        return [output async for output in llm.generate(prompt, params, name)][-1]

    async def run() -> None:
        own = args(checkpoint("llama"), max_num_seqs=2)
        given = AsyncEngineArgs(**vars(own), enable_log_requests=True)
        llm = AsyncLLM.from_engine_args(given, usage_context=None)
        try:
            first, second = await asyncio.gather(ask(llm, "a"), ask(llm, "b"))
            assert first.outputs[0].token_ids == second.outputs[0].token_ids
            assert (await ask(llm, "c")).num_cached_tokens == 32
            assert await llm.reset_prefix_cache()
            assert (await ask(llm, "d")).num_cached_tokens == 0
            await llm.sleep()
            asleep = 'sleep_state="discard_all"} 1.0'
            assert asleep in llm.metrics.render().decode()
            with pytest.raises(RequestError, match="sleeps"):
                await ask(llm, "e")
            await llm.wake_up()
            assert asleep not in llm.metrics.render().decode()
            assert (await ask(llm, "f")).outputs[0].token_ids == first.outputs[0].token_ids
            with pytest.raises(RequestError, match="VLLM_TORCH_PROFILER_DIR"):
                await llm.start_profile()
            assert llm.is_running and not llm.errored
        finally:
            await llm.shutdown()
        assert llm.is_stopped and not llm.errored

    asyncio.run(run())


def test_what_an_engine_has_not_read_is_waiting_and_an_abort_ends_it(checkpoint):
    def gauge(llm, name) -> float:
        text = llm.metrics.render().decode()
        (line,) = (line for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))
        return float(line.split()[-1])

    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(n=2, max_tokens=400, ignore_eos=True, detokenize=False)
        pid = llm._engines[0].process.pid
        os.kill(pid, signal.SIGSTOP)  # as within a step that takes long
        try:
            outputs = llm.generate({"prompt_token_ids": [5, 6]}, params, "one")
            whole = asyncio.create_task(anext(outputs))
            while not llm._in_flight:
                await asyncio.sleep(0.01)
            assert gauge(llm, "num_requests_waiting") == 2
            assert gauge(llm, "num_requests_running") == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        while gauge(llm, "num_requests_running") != 2:
            await asyncio.sleep(0.01)
        await whole
        await llm.abort("one")
        last = [output async for output in outputs][-1]
        assert [choice.finish_reason for choice in last.outputs] == ["abort", "abort"]
        assert gauge(llm, "num_requests_running") == gauge(llm, "num_requests_waiting") == 0
        assert 'vllm:cache_config_info{block_size="16",cache_dtype="auto"' in (
            llm.metrics.render().decode()
        )

    served(checkpoint, body)


def test_requests_run_from_before_their_step_is_computed(text_checkpoint):
    core = LLM(text_checkpoint, max_model_len=64).llm_engine.core
    told = []
    core.on_scheduled = lambda scheduled: told.append(core.stats())
    sampling = SamplingParams(max_tokens=1)
    core.add(EngineRequest("a#0", [5, 6, 7], sampling, 0, [], 1))
    core.step()
    assert [(stats.num_running, stats.num_waiting) for stats in told] == [(1, 0)]
    assert core.stats().step_tokens == {} and told[0].step_tokens == {3: 1}
