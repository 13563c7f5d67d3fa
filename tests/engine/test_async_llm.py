"""The engine in a process of its own: how many requests it takes, and whether it lives."""

import asyncio
import os
import signal
import time

import pytest

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm import AsyncLLM
from vllm.engine.output_processor import RequestState
from vllm.errors import RequestError
from vllm.sampling_params import RequestOutputKind


def args(folder, **options):
    return EngineArgs.from_keywords(model=folder, skip_tokenizer_init=True, **options)


def test_as_many_as_run_and_wait_are_taken_and_an_engine_is_free_again(checkpoint):
    async def ask(llm, n, name="one"):
        params = SamplingParams(n=n, max_tokens=3, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [5, 6]}
        return [output async for output in llm.generate(prompt, params, name)][-1]

    async def run() -> None:
        llm = AsyncLLM(args(checkpoint("llama"), max_num_seqs=2), max_waiting=1)
        try:
            await llm.wait_ready()
            assert len((await ask(llm, 3)).outputs) == 3
            assert [engine.num_in_flight for engine in llm._engines] == [0]
            with pytest.raises(RequestError, match="4 sequences"):
                await ask(llm, 4)
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


def test_who_takes_outputs_slowly_makes_no_engine_seem_to_hang(checkpoint):
    async def body(llm: AsyncLLM) -> None:
        watch = asyncio.create_task(llm._watch_silence(1.5))
        params = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False,
                                output_kind=RequestOutputKind.DELTA)  # fmt: skip
        outputs = llm.generate({"prompt_token_ids": [5, 6]}, params, "slow")
        first = await anext(outputs)
        await asyncio.sleep(3)
        rest = [output async for output in outputs]
        assert sum(len(o.outputs[0].token_ids) for o in (first, *rest)) == 20
        assert not llm.is_dead and not watch.done()
        watch.cancel()

    served(checkpoint, body)


def test_a_machine_that_was_frozen_goes_on(checkpoint):
    async def body(llm: AsyncLLM) -> None:
        watch = asyncio.create_task(llm._watch_silence(1.0))
        params = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)
        outputs = llm.generate({"prompt_token_ids": [5, 6]}, params, "one")
        whole = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0.05)
        os.kill(llm._engines[0].process.pid, signal.SIGSTOP)
        time.sleep(2.0)  # this process too
        os.kill(llm._engines[0].process.pid, signal.SIGCONT)
        async for _ in outputs_after(whole, outputs):
            pass
        assert not llm.is_dead
        watch.cancel()

    async def outputs_after(first, rest):
        yield await first
        async for output in rest:
            yield output

    served(checkpoint, body)
