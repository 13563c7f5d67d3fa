"""Anthropic's `/v1/messages`: a conversation as content blocks, answered by the chat path."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
from fastapi import Response
from pydantic_core import from_json

from vllm.entrypoints.openai.anthropic_errors import anthropic_error
from vllm.entrypoints.openai.anthropic_protocol import CountTokensRequest, MessagesRequest
from vllm.entrypoints.openai.blocks import Begin, Block, Delta, Step
from vllm.entrypoints.openai.chat import chat_prompt
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.generation import Json, Service, json_response
from vllm.entrypoints.openai.http import named_event
from vllm.entrypoints.openai.translated import TranslatedAnswer, translated

_PING = named_event({"type": "ping"})
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


async def create_message(service: Service, request: MessagesRequest, request_id: str) -> Response:
    chat = await translated(request.messages, request.to_chat)
    prompt, form = await request.told(chat_prompt(service, chat))
    answer = _MessageAnswer(
        service, chat, f"msg_{request_id}", [prompt], form, streams=bool(request.stream),
        source=request,
    )  # fmt: skip
    return await answer.response()


async def count_message_tokens(
    service: Service, request: CountTokensRequest, request_id: str
) -> Response:
    chat = await translated(request.messages, request.to_chat)
    prompt, _ = await request.told(chat_prompt(service, chat))
    return json_response({"input_tokens": len(prompt)})


@dataclass
class _MessageAnswer(TranslatedAnswer):
    source: MessagesRequest = field(kw_only=True)

    def own_error(self, error: Exception) -> Exception:
        return self.source.own_error(error)

    # ------------------------------------------------------------ the message

    def body(self) -> Json:
        if self.last.finish_reason not in ("stop", "length"):
            raise ApiError(500, "the request was aborted")
        content = [_content(block) for block in self.blocks.found]
        return self._body(content, self._stop(), self._usage())

    def _body(self, content: list[Json], stop: Json, usage: Json) -> Json:
        model = self.request.model or self.service.model_names[0]
        return {"id": self.request_id, "type": "message", "role": "assistant", "model": model,
                "content": content, **stop, "usage": usage}  # fmt: skip

    def _stop(self) -> Json:
        """Why the answer ended; stop ids that the model has beside the end are no sequences."""
        last = self.last
        if last.finish_reason == "length":
            is_asked = self.num_completion_tokens >= self.source.max_tokens
            reason = "max_tokens" if is_asked else "model_context_window_exceeded"
            return {"stop_reason": reason, "stop_sequence": None}
        if last.stop_reason in (self.source.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        reason = "tool_use" if self.callers else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> Json:
        """Tokens that the prefix cache had are no input tokens here."""
        usage = super()._usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens},
        }

    # ------------------------------------------------------------ its events

    def opening(self) -> bytes:
        message = self._body([], {"stop_reason": None, "stop_sequence": None}, self._usage())
        return named_event({"type": "message_start", "message": message}) + _PING

    def events(self, step: Step) -> bytes:
        block = step.block
        if isinstance(step, Begin):
            return named_event(
                {
                    "type": "content_block_start",
                    "index": block.index,
                    "content_block": _empty(block),
                }
            )
        if isinstance(step, Delta):
            kind, name = _DELTAS[block.kind]
            return _delta(block, {"type": kind, name: step.text})
        stop = named_event({"type": "content_block_stop", "index": block.index})
        if block.kind != "reasoning":
            return stop
        return _delta(block, {"type": "signature_delta", "signature": _signature(block)}) + stop

    def closing(self) -> bytes:
        if self.last.finish_reason not in ("stop", "length"):
            return self.failed(ApiError(500, "the request was aborted"))
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return named_event(delta) + named_event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return named_event(anthropic_error(error.status, error.message))


def _delta(block: Block, delta: Json) -> bytes:
    return named_event({"type": "content_block_delta", "index": block.index, "delta": delta})


def _empty(block: Block) -> Json:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": None}


def _content(block: Block) -> Json:
    content = _empty(block)
    if block.kind == "call":
        return {**content, "input": _input(block.text)}
    if block.kind == "reasoning":
        return {**content, "thinking": block.text, "signature": _signature(block)}
    return {**content, "text": block.text}


def _input(arguments: str) -> Any:
    """An object; of arguments that were cut off what is whole of them."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return found
    return msgspec.Raw(arguments.encode())


def _signature(block: Block) -> str:
    """Clients keep thinking only with one. It is a digest of the text, and none is checked."""
    return blake2b(block.text.encode(), digest_size=16).hexdigest()
