"""What completions and chat completions share: the served model, outputs, usage, responses."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from fastapi import Response

from vllm.engine.async_llm import AsyncLLM
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.http import EventStream
from vllm.entrypoints.openai.prompts import Prompts
from vllm.outputs import LogprobDict, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.aside import aside


@dataclass
class Service:
    """The served model as the endpoints see it.

    sampling_defaults: what requests that leave a sampling field open get. response_role: role of
    chat answers.
    """

    engine: AsyncLLM
    prompts: Prompts
    sampling_defaults: Mapping[str, Any]
    response_role: str = "assistant"
    created: int = field(default_factory=lambda: int(time.time()))
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def model_names(self) -> tuple[str, ...]:
        names: tuple[str, ...] = self.engine.model_config.served_model_name
        return names

    @property
    def max_model_len(self) -> int:
        return int(self.engine.model_config.max_model_len)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 unless `name` is None or a name of the served model."""
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"model {name!r} is not served here; served: {', '.join(self.model_names)}",
                "model",
                "model_not_found",
            )

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request_id: str,
        shortens: bool = False,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts in order of arrival, each with the index of its prompt. shortens:
        max_tokens is a default, and is cut to what the context leaves."""
        self.engine.check_queue(len(prompts) * params.n)
        # Clients may send the same id twice; the engine's ids are unique.
        streams = [
            self.engine.generate(
                prompt,
                self._shortened(params, len(prompt)) if shortens else params,
                f"{request_id}-{next(self._numbers)}",
            )
            for prompt in prompts
        ]
        return _merged(streams)

    def _shortened(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        room = self.max_model_len - num_prompt
        if params.max_tokens is None or not params.min_tokens <= room < params.max_tokens:
            return params
        return msgspec.structs.replace(params, max_tokens=max(room, 1))


@dataclass
class Usage:
    """Token counts of one HTTP request."""

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, output: RequestOutput) -> None:
        """Counts an output of prompt `index`: what is new in it."""
        self.num_completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self.cached_tokens[index] = output.num_cached_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }


# Logprobs responses with more entries are built in a thread: this many take a few milliseconds.
_MANY_LOGPROBS = 2000
_Built = TypeVar("_Built")


async def built(
    logprobs: Iterable[Sequence[LogprobDict | None] | None],
    make: Callable[..., _Built],
    *arguments: Any,
) -> _Built:
    """make(*arguments), in a thread where `logprobs` has many entries."""
    count = sum(len(place or ()) for places in logprobs for place in places or ())
    if count < _MANY_LOGPROBS:
        return make(*arguments)
    return await aside(make, *arguments)


def json_response(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def stream_response(events: AsyncGenerator[bytes, None]) -> Response:
    """Waits for the first event, so that a refused request gets an error status."""
    return EventStream(await anext(events), events)


_Item = tuple[int, RequestOutput | Exception | None]


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Items of all streams in order of arrival; the first error ends and closes them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    # Bounded: while nobody takes items, the streams stand still too.
    queue: asyncio.Queue[_Item] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        num_running = len(tasks)
        while num_running:
            index, item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[RequestOutput, None], queue: "asyncio.Queue[_Item]"
) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((index, item))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
