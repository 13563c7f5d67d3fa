"""The engine in a process of its own: how many requests it takes."""

import asyncio

import pytest

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm import AsyncLLM
from vllm.errors import RequestError


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
