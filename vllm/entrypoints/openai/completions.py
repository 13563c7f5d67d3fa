"""`/v1/completions`."""

import asyncio
from dataclasses import dataclass, field

import msgspec
from fastapi import Response

from vllm.entrypoints.openai.generation import Answer, Json, Service, built
from vllm.entrypoints.openai.logprobs import (
    completion_logprobs,
    positions,
    prompt_logprobs_json,
)
from vllm.entrypoints.openai.protocol import DEFAULT_MAX_TOKENS, CompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams


async def create_completion(
    service: Service, request: CompletionRequest, request_id: str
) -> Response:
    adds_special_tokens = request.add_special_tokens is not False
    prompts = await asyncio.gather(
        *(_read_prompt(service, prompt, adds_special_tokens, request) for prompt in request.prompt)
    )
    token_ids = [prompt.token_ids for prompt in prompts]
    return await _Answer(service, request, f"cmpl-{request_id}", token_ids, prompts).response()


@dataclass
class _Prompt:
    """text and first_text (of the first token) are known where they are to be echoed."""

    token_ids: list[int]
    text: str = ""
    first_text: str = ""


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
class _Answer(Answer):
    """Choice i of prompt p has index p * n + i.

    offsets: characters that the logprobs told so far cover, by index of choice.
    """

    request: CompletionRequest
    prompts: list[_Prompt]
    offsets: dict[int, int] = field(default_factory=dict)

    kind = chunk_kind = "text_completion"

    async def choice(self, index: int, output: RequestOutput, new: CompletionOutput) -> Json:
        is_first = self._number(index, new) not in self.offsets
        told = new.logprobs, output.prompt_logprobs if is_first else None
        return await built(told, self._choice, index, output, new)

    def params_of(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """The default of max_tokens is cut to what the context leaves."""
        room = self.service.max_model_len - len(prompt)
        is_default = self.request.max_tokens is None
        if not is_default or not params.min_tokens <= room < DEFAULT_MAX_TOKENS:
            return params
        return msgspec.structs.replace(params, max_tokens=max(room, 1))

    def _number(self, index: int, new: CompletionOutput) -> int:
        return index * self.request.num_choices + new.index

    def _choice(self, index: int, output: RequestOutput, new: CompletionOutput) -> Json:
        """New text of one choice; all of it where the response is not streamed."""
        prompt = self.prompts[index]
        number = self._number(index, new)
        is_first = number not in self.offsets
        offset = self.offsets.setdefault(number, 0)
        echoed = prompt.text if is_first and self.request.echo else ""
        choice: Json = {
            "index": number,
            "text": echoed + new.text,
            "logprobs": None,
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        if self.request.logprobs is not None:
            places = positions(new.token_ids, new.logprobs or [])
            if is_first and self.request.echo:
                places = positions(prompt.token_ids, output.prompt_logprobs or []) + places
            shape = completion_logprobs(places, offset, prompt.first_text)
            self.offsets[number] += sum(map(len, shape["tokens"]))
            choice["logprobs"] = shape
        if is_first and self.request.prompt_logprobs is not None and output.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = new.token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice
