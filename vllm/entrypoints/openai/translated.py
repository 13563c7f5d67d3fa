"""What the APIs share that are translations of chat: requests to it, answers from it."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec
from fastapi import Response
from pydantic import BaseModel, PrivateAttr, ValidationError

from vllm.entrypoints.openai.blocks import Blocks, Delta, Step
from vllm.entrypoints.openai.chat import ChatAnswer
from vllm.entrypoints.openai.errors import ApiError, as_api_error, invalid_fields
from vllm.entrypoints.openai.generation import Json, json_response
from vllm.entrypoints.openai.http import EventStream
from vllm.entrypoints.openai.logprobs import chat_logprobs, positions
from vllm.entrypoints.openai.output_format import _Strict
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.errors import RequestError
from vllm.outputs import CompletionOutput
from vllm.utils.aside import aside

Fields = TypeVar("Fields", bound=BaseModel)
T = TypeVar("T")


class TranslatedRequest(_Strict):
    """A request of another API. The fields here are those of chat that it may have beside its own.

    chat_names: what its fields are called in chat, by the name in chat, for errors. unserved: by
    the name of a field what to do instead.
    """

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    chat_names: ClassVar[Mapping[str, str]] = {}
    unserved: ClassVar[Mapping[str, str]] = {}
    _warnings: list[str] = PrivateAttr(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """Those of the request for chat."""
        return self._warnings

    def check(self) -> None:
        """What no single field can tell; raises RequestError."""
        for name in self.model_fields_set & self.unserved.keys():
            if getattr(self, name) is not False:
                raise RequestError(f"{name} is not supported: {self.unserved[name]}", name)

    def chat(self, own: Json) -> ChatCompletionRequest:
        """The request as one for chat. own: the translated fields."""
        same = {name: getattr(self, name) for name in self.model_fields_set & _SAME}
        try:
            request = ChatCompletionRequest.model_validate({**same, **own})
            request.check()
        except ValidationError as error:
            raise self.own_error(invalid_fields(error, ChatCompletionRequest)) from None
        except RequestError as error:
            raise self.own_error(error) from None
        self._warnings = request.warnings
        return request

    async def told(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` for the translated request; errors name the fields of this one."""
        try:
            return await work
        except RequestError as error:
            raise self.own_error(error) from error

    def own_error(self, error: Exception) -> Exception:
        """`error` with the name of the field here."""
        name = str(getattr(error, "param", None))
        if name not in self.chat_names:
            return error
        told, own = as_api_error(error), self.chat_names[name]
        is_first = told.message.startswith(name)
        text = own + told.message.removeprefix(name) if is_first else told.message
        return ApiError(told.status, text, own, told.code)


_SAME = frozenset(TranslatedRequest.model_fields)


# Of so many items a translation takes a few milliseconds.
_MANY_ITEMS = 1000


async def translated(
    items: Sequence[Any], translate: Callable[[], ChatCompletionRequest]
) -> ChatCompletionRequest:
    """The result of `translate`, in a thread where the request has many `items`."""
    return translate() if len(items) < _MANY_ITEMS else await aside(translate)


def item_of(kind: type[Fields], fields: Any, at: tuple[str | int, ...]) -> Fields:
    """`fields` as one of `kind`; ApiError 400 names the place `at` which they are."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error, kind, at) from None


def type_of(fields: Any, accepted: Sequence[str], at: tuple[str | int, ...]) -> str:
    """The `type` of one of several kinds of item. RequestError for one that is not accepted."""
    place = ".".join(map(str, at))
    if not isinstance(fields, dict):
        shown = msgspec.json.encode(fields).decode()
        raise RequestError(f"{place} should be an object, not {shown:.80}", str(at[0]))
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in accepted:
        given = "is missing" if kind is None else f"is {str(kind)[:80]!r}"
        raise RequestError(
            f"{place}.type {given}; this server takes {', '.join(accepted)}", str(at[0])
        )
    return kind


def joined_text(
    content: str | list[Any], accepted: Sequence[str], at: tuple[str | int, ...]
) -> str:
    """The text of a content that is one, or a list of parts with texts."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        kind = type_of(part, accepted, (*at, place))
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            where = ".".join(map(str, (*at, place)))
            raise RequestError(f"{where}.text should be a text", str(at[0]))
        texts.append(text)
    return "\n".join(texts)


@dataclass
class TranslatedAnswer(ChatAnswer, ABC):
    """One choice of a chat, told in the words of another API. streams: whether the client wants
    events. last: the newest output. needs_text: see `Blocks.end`."""

    needs_text: ClassVar[bool] = False

    streams: bool = False
    blocks: Blocks = field(init=False)
    last: CompletionOutput = field(init=False, default_factory=lambda: CompletionOutput(0))
    _logprobs: list[Any] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = Blocks(keeps_space=self.form.is_plain)
        # The tokens asked for are an upper bound: the end of the context may come before.
        asked, room = self.request.max_tokens, self.service.max_model_len - len(self.token_ids[0])
        if asked is not None and 0 < room < asked:
            self.request.max_tokens = room

    @abstractmethod
    def body(self) -> Any:
        """The response as JSON has it, when the answer is whole."""

    async def keep(self) -> None:
        """Called when the answer is whole, before its client knows."""

    @abstractmethod
    def opening(self) -> bytes:
        """Events before the first block."""

    @abstractmethod
    def events(self, step: Step) -> bytes:
        """Events of one change of a block."""

    @abstractmethod
    def closing(self) -> bytes:
        """Events after the last block."""

    @abstractmethod
    def own_error(self, error: Exception) -> Exception:
        """`error` with the names of this API."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Events of an error after the opening."""

    async def response(self) -> Response:
        try:
            if not self.streams:
                async for _ in self._steps():
                    pass
                await self.keep()
                return json_response(self.body())
            parts = self._parts()
            # The first is waited for, so that a refused request gets an error status.
            return EventStream(await anext(parts), parts)
        except RequestError as error:
            raise self.own_error(error) from error

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        is_open = False
        try:
            async with aclosing(self._steps()) as all_steps:
                async for steps in all_steps:
                    opening = b"" if is_open else self.opening()
                    is_open = True
                    if told := opening + b"".join(map(self.events, steps)):
                        yield told
            await self.keep()
            yield self.closing()
        except Exception as error:
            if not is_open:
                raise
            yield self.failed(as_api_error(error))

    async def _steps(self) -> AsyncGenerator[list[Step], None]:
        """What each output changes, and what the end does."""
        async with aclosing(self._outputs()) as outputs:
            async for _, output in outputs:
                for new in output.outputs:
                    self.last = new
                    steps = self.blocks.add(await self.read(new))
                    if self.request.logprobs:
                        self._give_logprobs(new, steps)
                    yield steps
        yield self.blocks.end(self.needs_text and self.last.finish_reason == "stop")

    def _give_logprobs(self, new: CompletionOutput, steps: Sequence[Step]) -> None:
        """To the next text: a token whose text is held back belongs to what comes after it."""
        places, num_top = positions(new.token_ids, new.logprobs or []), self.request.top_logprobs
        shape = chat_logprobs(places, num_top or 0, self.service.prompts)
        self._logprobs += msgspec.json.decode(shape["content"])
        for step in steps:
            if isinstance(step, Delta):
                if step.block.kind == "text":
                    step.logprobs = self._logprobs
                    step.block.logprobs += self._logprobs
                self._logprobs = []
