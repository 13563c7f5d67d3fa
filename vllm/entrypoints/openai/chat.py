"""`/v1/chat/completions`."""

from dataclasses import dataclass, field

from fastapi import Response

from vllm.entrypoints.openai.generation import Answer, Json, Service, built
from vllm.entrypoints.openai.logprobs import chat_logprobs, positions
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput


async def create_chat_completion(
    service: Service, request: ChatCompletionRequest, request_id: str
) -> Response:
    text = await service.prompts.render(request)
    # The template writes the special tokens itself.
    prompt = await service.prompts.encode(text, add_special_tokens=False)
    return await _Answer(service, request, f"chatcmpl-{request_id}", [prompt]).response()


@dataclass
class _Answer(Answer):
    """n choices to one prompt. started: choices whose opening was sent."""

    request: ChatCompletionRequest
    started: set[int] = field(default_factory=set)

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    async def choice(self, index: int, output: RequestOutput, new: CompletionOutput) -> Json:
        if not self.extra:
            self.extra = await self.prompt_fields(output)
        content = self._echoed() + new.text
        message = {"role": self.service.response_role, "content": content, "refusal": None}
        return await self._choice({"message": message}, new)

    async def chunks(
        self, index: int, output: RequestOutput, new: CompletionOutput
    ) -> list[tuple[Json, Json]]:
        chunk = await self._choice({"delta": {"content": new.text}}, new)
        if new.index in self.started:
            return [(chunk, {})]
        extra = {} if self.started else await self.prompt_fields(output)
        self.started.add(new.index)
        delta = {"role": self.service.response_role, "content": self._echoed()}
        opening = {"index": new.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [(opening, extra), (chunk, {})]

    async def _choice(self, content: Json, new: CompletionOutput) -> Json:
        shape = None
        if self.request.logprobs:
            places = positions(new.token_ids, new.logprobs or [])
            num_top, prompts = self.request.top_logprobs or 0, self.service.prompts
            shape = await built([new.logprobs], chat_logprobs, places, num_top, prompts)
        return self.core(new.index, new, content, shape)

    def _echoed(self) -> str:
        """The message being continued, where the request asks for it to be part of the answer."""
        last = self.request.messages[-1]
        is_echoed = self.request.echo and last.role == self.service.response_role
        return last.content if is_echoed else ""
