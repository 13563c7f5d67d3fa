"""`/v1/chat/completions`."""

from dataclasses import dataclass, field

from fastapi import Response

from vllm.entrypoints.openai.generation import Answer, Json, Service, built
from vllm.entrypoints.openai.logprobs import chat_logprobs, positions, prompt_logprobs_json
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
        message = {
            "role": self.service.response_role,
            "content": self._echoed() + new.text,
            "refusal": None,
        }
        return await built([new.logprobs], self._choice, "message", message, new)

    async def chunks(
        self, index: int, output: RequestOutput, new: CompletionOutput
    ) -> list[tuple[Json, Json]]:
        chunks: list[tuple[Json, Json]] = []
        if new.index not in self.started:
            extra = {} if self.started else await self.prompt_fields(output)
            self.started.add(new.index)
            chunks.append((self._opening(new.index), extra))
        delta = {"content": new.text}
        chunk = await built([new.logprobs], self._choice, "delta", delta, new)
        return [*chunks, (chunk, {})]

    async def prompt_fields(self, output: RequestOutput) -> Json:
        return await built([output.prompt_logprobs], self._prompt_fields, output)

    def _opening(self, index: int) -> Json:
        delta = {"role": self.service.response_role, "content": self._echoed()}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, kind: str, content: Json, new: CompletionOutput) -> Json:
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

    def _prompt_fields(self, output: RequestOutput) -> Json:
        extra: Json = {}
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
