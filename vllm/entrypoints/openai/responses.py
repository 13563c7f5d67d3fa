"""`/v1/responses`: a conversation as typed items, answered by the chat path."""

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import Response

from vllm.entrypoints.openai.blocks import Begin, Block, Delta, Step
from vllm.entrypoints.openai.chat import chat_prompt
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.generation import Json, Service, json_response
from vllm.entrypoints.openai.http import named_event
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.response_store import StoredResponse
from vllm.entrypoints.openai.responses_protocol import (
    ResponsesRequest,
    referenced_ids,
    turns_of,
)
from vllm.entrypoints.openai.translated import TranslatedAnswer, translated
from vllm.errors import RequestError

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_MAX_PAGE = 100


async def create_response(service: Service, request: ResponsesRequest, request_id: str) -> Response:
    items = request.input_items()
    turns, chat = await _conversation(service, request)
    prompt, form = await request.told(chat_prompt(service, chat))
    # Not the id of the request, which the client may have chosen: who has this one may read.
    answer = _ResponseAnswer(
        service, chat, f"resp_{uuid4().hex}", [prompt], form, streams=bool(request.stream),
        source=request, items=items, turns=turns,
    )  # fmt: skip
    return await answer.response()


async def _conversation(
    service: Service, request: ResponsesRequest
) -> tuple[list[Json], ChatCompletionRequest]:
    """Its turns up to the answer, and the request for chat that they make."""
    turns: list[Json] = []
    if request.previous_response_id is not None:
        turns += await service.responses.previous(request.previous_response_id)
    items = request.input_items()
    ids = referenced_ids(items)
    stored = await service.responses.items(ids) if ids else {}

    def translate() -> ChatCompletionRequest:
        turns.extend(turns_of(items, stored))
        return request.to_chat(turns)

    return turns, await translated([*turns, *items], translate)


async def count_input_tokens(
    service: Service, request: ResponsesRequest, request_id: str
) -> Response:
    _, chat = await _conversation(service, request)
    prompt, _ = await request.told(chat_prompt(service, chat))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt)})


async def cancel_response(service: Service, response_id: str) -> Response:
    """Only responses that are whole are stored, and there is nothing to cancel of them."""
    await service.responses.get(response_id)
    raise ApiError(
        400,
        f"response {response_id} has ended: only one with background: true, which this server does "
        f"not take, can be cancelled; close the connection to stop one that runs",
        "response_id",
    )


def input_items(stored: StoredResponse, response_id: str, query: Any) -> Json:
    """A page of the items that a response answers. query: after, limit and order."""
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise RequestError(f"order {order[:80]!r} is none of asc and desc", "order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MAX_PAGE):
        raise RequestError(f"limit takes 1 to {_MAX_PAGE}, not {limit[:80]!r}", "limit")
    key = response_id.removeprefix("resp_")
    items = [
        {"type": "message", "id": f"msg_{key}_{place}", **_with_parts(item)}
        for place, item in enumerate(stored.input)
    ]
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None:
        if after not in ids:
            raise RequestError(f"after {after[:80]!r} is the id of no item", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


@dataclass
class _ResponseAnswer(TranslatedAnswer):
    """items: of the input. turns: the conversation before the answer."""

    source: ResponsesRequest = field(kw_only=True)
    items: list[Any] = field(kw_only=True)
    turns: list[Json] = field(kw_only=True)
    _number: int = field(init=False, default=0)
    _encoded: bytes = field(init=False, default=b"")

    # Clients take an answer without one for an unfinished step.
    needs_text = True

    def __post_init__(self) -> None:
        super().__post_init__()
        asked, defaults = self.source, self.service.sampling_defaults
        text = asked.text.model_dump(by_alias=True, exclude_none=True) if asked.text else {}
        self._constant: Json = {
            **self._head("response"),
            "background": False,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": asked.reasoning.model_dump() if asked.reasoning else {"effort": None},
            "store": asked.is_stored,
            "temperature": _first(asked.temperature, defaults.get("temperature"), 1.0),
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": asked.tool_choice or "auto",
            "tools": msgspec.Raw(msgspec.json.encode(asked.tools or [])),
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": _first(asked.top_p, defaults.get("top_p"), 1.0),
            "truncation": asked.truncation or "disabled",
        }

    def own_error(self, error: Exception) -> Exception:
        return self.source.own_error(error)

    # ------------------------------------------------------------ the response

    def body(self) -> msgspec.Raw:
        if not self._encoded:
            self._encoded = msgspec.json.encode(self._body(self._status, self._output()))
        return msgspec.Raw(self._encoded)

    async def keep(self) -> None:
        if not self.source.is_stored or self._status == "failed":
            return
        self.body()
        await self.service.responses.add(
            self.request_id, self._encoded, self.items, self._output(), [*self.turns, self._turn()],
            self.source.previous_response_id,
        )  # fmt: skip

    def _output(self) -> list[Json]:
        return [self._item(block, self._status_of(block)) for block in self.blocks.found]

    @property
    def _is_complete(self) -> bool:
        return self.last.finish_reason == "stop"

    @property
    def _status(self) -> str:
        return {"stop": "completed", "length": "incomplete"}.get(
            str(self.last.finish_reason), "failed"
        )

    def _status_of(self, block: Block) -> str:
        is_last = block is self.blocks.found[-1]
        return "incomplete" if is_last and not self._is_complete else "completed"

    def _body(self, status: str, output: list[Json], error: Json | None = None) -> Json:
        """`usage` is of a response that has ended."""
        if status == "failed" and error is None:
            error = {"code": "server_error", "message": "the request was aborted"}
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        has_ended = status in ("completed", "incomplete")
        done = {"completed_at": int(time.time())} if status == "completed" else {}
        return {
            **self._constant,
            **done,
            "status": status,
            "error": error,
            "incomplete_details": cut,
            "output": output,
            "usage": self._usage() if has_ended else None,
        }

    def _head(self, kind: str) -> Json:
        head = super()._head(kind)
        return {"created_at": head.pop("created"), **head}

    def _usage(self) -> Json:
        usage = super()._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, block: Block, status: str) -> Json:
        if not block.id:
            block.id = f"{_PREFIXES[block.kind]}_{uuid4().hex}"
        if block.kind == "call":
            return {"id": block.id, "type": "function_call", "status": status,
                    "call_id": block.call_id, "name": block.name,
                    "arguments": block.text}  # fmt: skip
        parts = [] if status == "in_progress" else [self._part(block)]
        if block.kind == "reasoning":
            return {"id": block.id, "type": "reasoning", "status": status, "summary": [],
                    "content": parts, "encrypted_content": None}  # fmt: skip
        return {"id": block.id, "type": "message", "status": status, "role": "assistant",
                "content": parts}  # fmt: skip

    def _part(self, block: Block, text: str | None = None) -> Json:
        shown = block.text if text is None else text
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": shown}
        logprobs = block.logprobs if text is None else []
        return {"type": "output_text", "text": shown, "annotations": [], "logprobs": logprobs}

    def _turn(self) -> Json:
        """The answer as a message of chat, without a call that was cut off."""
        turn: Json = {"role": "assistant"}
        names = {"reasoning": "reasoning_content", "text": "content"}
        for block in self.blocks.found:
            if block.kind == "call":
                if self._status_of(block) == "incomplete":
                    continue
                function = {"name": block.name, "arguments": block.text}
                call = {"id": block.call_id, "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            else:
                name = names[block.kind]
                turn[name] = turn.get(name, "") + block.text
        return turn if turn.get("tool_calls") else {"content": "", **turn}

    # ------------------------------------------------------------ its events

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = named_event({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return event

    def opening(self) -> bytes:
        body = self._body("in_progress", [])
        created = self._event("response.created", response=body)
        return created + self._event("response.in_progress", response=body)

    def events(self, step: Step) -> bytes:
        block = step.block
        if isinstance(step, Begin):
            return self._begun(block)
        if not isinstance(step, Delta):
            return self._ended(block)
        if block.kind == "call":
            return self._event(
                "response.function_call_arguments.delta",
                item_id=block.id, output_index=block.index, delta=step.text,
            )  # fmt: skip
        place = {"item_id": block.id, "output_index": block.index, "content_index": 0}
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **place, delta=step.text)
        return self._event(
            "response.output_text.delta", **place, delta=step.text, logprobs=step.logprobs
        )

    def _begun(self, block: Block) -> bytes:
        item = self._item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._event(
            "response.content_part.added",
            item_id=block.id, output_index=block.index, content_index=0, part=self._part(block, ""),
        )  # fmt: skip

    def _ended(self, block: Block) -> bytes:
        place: Json = {"item_id": block.id, "output_index": block.index}
        if block.kind == "call":
            done = self._event(
                "response.function_call_arguments.done",
                **place, name=block.name, arguments=block.text,
            )  # fmt: skip
        else:
            place["content_index"] = 0
            part = self._part(block)
            if block.kind == "reasoning":
                done = self._event("response.reasoning_text.done", **place, text=part["text"])
            else:
                done = self._event(
                    "response.output_text.done",
                    **place, text=part["text"], logprobs=part["logprobs"],
                )  # fmt: skip
            done += self._event("response.content_part.done", **place, part=part)
        item = self._item(block, self._status_of(block))
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def closing(self) -> bytes:
        return self._event(f"response.{self._status}", response=self.body())

    def failed(self, error: ApiError) -> bytes:
        code = error.code or "server_error"
        told = self._event("error", code=code, message=error.message, param=error.param)
        output = [self._item(block, "incomplete") for block in self.blocks.found]
        failure = {"code": "server_error", "message": error.message}
        return told + self._event("response.failed", response=self._body("failed", output, failure))


def _with_parts(item: Json) -> Json:
    """With the content of a message as a list of parts."""
    content = item.get("content")
    if not isinstance(content, str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {**item, "content": [{"type": kind, "text": content}]}


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
