"""`/v1/completions`."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Response

from vllm.entrypoints.openai.generation import (
    Service,
    Usage,
    built,
    json_response,
    stream_response,
)
from vllm.entrypoints.openai.logprobs import (
    completion_logprobs,
    positions,
    prompt_logprobs_json,
)
from vllm.entrypoints.openai.protocol import CompletionRequest
from vllm.outputs import CompletionOutput, LogprobDict, RequestOutput


async def create_completion(
    service: Service, request: CompletionRequest, request_id: str
) -> Response:
    service.check_model(request.model)
    request.check()
    adds_special_tokens = request.add_special_tokens is not False
    prompts = await asyncio.gather(
        *(_read_prompt(service, prompt, adds_special_tokens, request) for prompt in request.prompt)
    )
    answer = _Answer(service, request, request_id, prompts)
    if request.stream:
        return await stream_response(answer.events())
    return json_response(await answer.whole())


@dataclass
class _Prompt:
    """text and first_text (of the first token) are known where they are to be echoed."""

    token_ids: list[int]
    text: str = ""
    first_text: str = ""
    logprobs: list[LogprobDict | None] | None = None


async def _read_prompt(
    service: Service, given: str | list[int], adds_special_tokens: bool, request: CompletionRequest
) -> _Prompt:
    if isinstance(given, list):
        prompt = _Prompt(given)
        if request.echo:
            prompt.text = await service.prompts.decode(given)
    else:
        prompt = _Prompt(await service.prompts.encode(given, adds_special_tokens), given)
    if request.echo and request.logprobs is not None and prompt.token_ids:
        prompt.first_text = await service.prompts.decode(prompt.token_ids[:1])
    return prompt


@dataclass
class _Answer:
    """A response being generated; choice i of prompt p has index p * n + i.

    offsets: characters that the logprobs told so far cover, by index of choice.
    """

    service: Service
    request: CompletionRequest
    request_id: str
    prompts: list[_Prompt]
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in self.prompts))

    async def whole(self) -> dict[str, Any]:
        choices = []
        async with aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                for choice in output.outputs:
                    choices.append(await self._built(index, output, choice))
        choices.sort(key=lambda choice: int(choice["index"]))
        return {**self._head(), "choices": choices, "usage": self.usage.to_json()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        usage: dict[str, Any] = {"usage": None} if self.request.includes_usage else {}
        async with aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                if self.request.includes_usage_always:
                    usage = {"usage": self.usage.to_json()}
                for choice in output.outputs:
                    chunk = await self._built(index, output, choice)
                    yield msgspec.json.encode({**self._head(), "choices": [chunk], **usage})
        if self.request.includes_usage:
            yield msgspec.json.encode(
                {**self._head(), "choices": [], "usage": self.usage.to_json()}
            )

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        params = self.request.sampling_params(self.service.sampling_defaults)
        token_ids = [prompt.token_ids for prompt in self.prompts]
        is_default = self.request.max_tokens is None
        name = f"cmpl-{self.request_id}"
        outputs = self.service.generate(token_ids, params, name, shortens=is_default)
        async with aclosing(outputs):
            async for index, output in outputs:
                if output.prompt_logprobs is not None:
                    self.prompts[index].logprobs = output.prompt_logprobs
                self.usage.add(index, output)
                yield index, output

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.request.model or self.service.model_names[0],
        }

    async def _built(
        self, index: int, output: RequestOutput, new: CompletionOutput
    ) -> dict[str, Any]:
        is_first = self._number(index, new) not in self.offsets
        told = new.logprobs, self.prompts[index].logprobs if is_first else None
        return await built(told, self._choice, index, output, new)

    def _number(self, index: int, new: CompletionOutput) -> int:
        return index * self.request.num_choices + new.index

    def _choice(self, index: int, output: RequestOutput, new: CompletionOutput) -> dict[str, Any]:
        """New text of one choice; all of it where the response is not streamed."""
        prompt = self.prompts[index]
        number = self._number(index, new)
        is_first = number not in self.offsets
        offset = self.offsets.setdefault(number, 0)
        echoed = prompt.text if is_first and self.request.echo else ""
        choice: dict[str, Any] = {
            "index": number,
            "text": echoed + new.text,
            "logprobs": None,
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        if self.request.logprobs is not None:
            places = positions(new.token_ids, new.logprobs or [])
            if is_first and self.request.echo:
                places = positions(prompt.token_ids, prompt.logprobs or []) + places
            shape = completion_logprobs(places, offset, prompt.first_text)
            self.offsets[number] += sum(map(len, shape["tokens"]))
            choice["logprobs"] = shape
        if is_first and self.request.prompt_logprobs is not None and prompt.logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(prompt.logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = new.token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice
