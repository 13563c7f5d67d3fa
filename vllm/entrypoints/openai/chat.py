"""`/v1/chat/completions`."""

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
from vllm.entrypoints.openai.logprobs import chat_logprobs, positions, prompt_logprobs_json
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput


async def create_chat_completion(
    service: Service, request: ChatCompletionRequest, request_id: str
) -> Response:
    service.check_model(request.model)
    request.check()
    text = await service.prompts.render(request)
    # The template writes the special tokens itself.
    prompt = await service.prompts.encode(text, add_special_tokens=False)
    answer = _Answer(service, request, request_id, prompt)
    if request.stream:
        return await stream_response(answer.events())
    return json_response(await answer.whole())


@dataclass
class _Answer:
    """A response being generated: n choices to one prompt."""

    service: Service
    request: ChatCompletionRequest
    request_id: str
    prompt: list[int]
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.usage = Usage(len(self.prompt))

    async def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        extra: dict[str, Any] = {}
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                extra |= await built([output.prompt_logprobs], self._prompt_extra, output)
                for choice in output.outputs:
                    message = {
                        "role": self.service.response_role,
                        "content": self._echoed() + choice.text,
                        "refusal": None,
                    }
                    new = await built([choice.logprobs], self._choice, "message", message, choice)
                    choices.append(new)
        choices.sort(key=lambda choice: int(choice["index"]))
        usage = {"usage": self.usage.to_json()}
        return {**self._head("chat.completion"), "choices": choices, **usage, **extra}

    async def events(self) -> AsyncGenerator[bytes, None]:
        usage: dict[str, Any] = {"usage": None} if self.request.includes_usage else {}
        head = self._head("chat.completion.chunk")
        started: set[int] = set()
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                if self.request.includes_usage_always:
                    usage = {"usage": self.usage.to_json()}
                for choice in output.outputs:
                    if choice.index not in started:
                        extra = {}
                        if not started:
                            extra = await built(
                                [output.prompt_logprobs], self._prompt_extra, output
                            )
                        started.add(choice.index)
                        opening = self._opening(choice.index)
                        yield msgspec.json.encode({**head, "choices": [opening], **usage, **extra})
                    delta = {"content": choice.text}
                    chunk = await built([choice.logprobs], self._choice, "delta", delta, choice)
                    yield msgspec.json.encode({**head, "choices": [chunk], **usage})
        if self.request.includes_usage:
            yield msgspec.json.encode({**head, "choices": [], "usage": self.usage.to_json()})

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        params = self.request.sampling_params(self.service.sampling_defaults)
        outputs = self.service.generate([self.prompt], params, f"chatcmpl-{self.request_id}")
        async with aclosing(outputs):
            async for index, output in outputs:
                self.usage.add(index, output)
                yield output

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.request.model or self.service.model_names[0],
        }

    def _opening(self, index: int) -> dict[str, Any]:
        delta = {"role": self.service.response_role, "content": self._echoed()}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, kind: str, content: dict[str, Any], new: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs:
            places = positions(new.token_ids, new.logprobs or [])
            num_top = self.request.top_logprobs or 0
            logprobs = chat_logprobs(places, num_top, self.service.prompts)
        choice = {
            "index": new.index,
            kind: content,
            "logprobs": logprobs,
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = new.token_ids
        return choice

    def _prompt_extra(self, output: RequestOutput) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self.request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if self.request.return_token_ids:
            extra["prompt_token_ids"] = output.prompt_token_ids
        return extra

    def _echoed(self) -> str:
        """The message being continued, where the request asks for it to be part of the answer."""
        last = self.request.messages[-1]
        if self.request.echo and last.role == self.service.response_role:
            return last.content
        return ""
