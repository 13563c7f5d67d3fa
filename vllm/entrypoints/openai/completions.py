"""`/v1/completions`."""

import asyncio
from dataclasses import dataclass, field

import msgspec
from fastapi import Response

from vllm.entrypoints.openai.generation import Answer, Json, Service, built
from vllm.entrypoints.openai.logprobs import completion_logprobs, positions
from vllm.entrypoints.openai.protocol import DEFAULT_MAX_TOKENS, CompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams


async def create_completion(
    service: Service, request: CompletionRequest, request_id: str
) -> Response:
    prompts = await asyncio.gather(
        *(_read_prompt(service, given, request) for given in request.prompt)
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
    service: Service, given: str | list[int], request: CompletionRequest
) -> _Prompt:
    text: str | None = None
    if isinstance(given, str):
        text = given
        adds_special_tokens = request.add_special_tokens is not False
        is_truncated = request.truncate_prompt_tokens is not None
        given = await service.prompts.encode(given, adds_special_tokens, is_truncated)
    prompt = _Prompt(request.truncated(given, service.max_model_len))
    if request.echo:
        is_whole = len(prompt.token_ids) == len(given)
        known = text if is_whole else None
        prompt.text = known or await service.prompts.decode(prompt.token_ids)
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
        """All of its text, or what is new where the response is streamed."""
        request, prompt = self.request, self.prompts[index]
        number = index * request.num_choices + new.index
        is_first = number not in self.offsets
        offset = self.offsets.setdefault(number, 0)
        shape = None
        if request.logprobs is not None:
            places = positions(new.token_ids, new.logprobs or [])
            if is_first and request.echo:
                places = positions(prompt.token_ids, output.prompt_logprobs or []) + places
            told = [logprobs for _, logprobs in places]
            as_ids = bool(request.return_tokens_as_token_ids)
            make, first_text = completion_logprobs, prompt.first_text
            shape, length = await built([told], make, places, offset, first_text, as_ids)
            self.offsets[number] += length
        text = (prompt.text if is_first and request.echo else "") + new.text
        choice = self.core(number, new, {"text": text}, shape)
        return {**choice, **await self.prompt_fields(output)} if is_first else choice

    def text_choice(self, text: str) -> Json:
        return self.core(0, CompletionOutput(0), {"text": text}, None)

    def params_of(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """The default of max_tokens is cut to what the context leaves."""
        room = self.service.max_model_len - len(prompt)
        is_default = self.request.max_tokens is None
        if not is_default or not params.min_tokens <= room < DEFAULT_MAX_TOKENS:
            return params
        return msgspec.structs.replace(params, max_tokens=max(room, 1))
