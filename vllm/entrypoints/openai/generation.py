"""What completions and chat completions share: the served model, outputs, responses."""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
from fastapi import Response

from vllm.engine.engine_client import EngineClient
from vllm.engine.input_processor import Prompt
from vllm.engine.output_processor import RequestState
from vllm.entrypoints.openai.answer_format import AnswerFormats
from vllm.entrypoints.openai.beams import Beams
from vllm.entrypoints.openai.caller import Caller
from vllm.entrypoints.openai.direct_events import DirectEvents
from vllm.entrypoints.openai.errors import ApiError, as_api_error
from vllm.entrypoints.openai.http import EventStream
from vllm.entrypoints.openai.logprobs import prompt_logprobs_json
from vllm.entrypoints.openai.prompts import Prompts
from vllm.entrypoints.openai.protocol import GenerationRequest, StreamOptions
from vllm.entrypoints.openai.response_store import Responses
from vllm.entrypoints.openai.streams import merged
from vllm.outputs import CompletionOutput, LogprobDict, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.aside import aside

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode
_MARK = "\0"
_ENCODED_MARK = _encode(_MARK)


class Admission(Protocol):
    def place(self, client: str, num_sequences: int) -> AbstractAsyncContextManager[None]:
        """Counts the sequences for as long as it lasts; QueueFullError where they are too many."""


@dataclass
class Service:
    """The served model as the endpoints see it.

    sampling_defaults: what requests that leave a sampling field open get. admission: of all their
    sequences. response_role: role of chat answers. answers: how chat answers are read. responses:
    those that clients may come back to. numbers: make ids of requests to the engine unique. caller:
    who asks, in the copy of a service that one request gets.
    """

    engine: EngineClient
    prompts: Prompts
    sampling_defaults: Mapping[str, Any]
    admission: Admission
    response_role: str = "assistant"
    answers: AnswerFormats = field(default_factory=AnswerFormats)
    responses: Responses = field(default_factory=Responses)
    created: int = field(default_factory=lambda: int(time.time()))
    numbers: Iterator[object] = field(default_factory=itertools.count)
    caller: Caller = field(default_factory=Caller)
    includes_usage: bool = False
    """Whether every stream ends with its usage, as --enable-force-include-usage asks for."""

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
            served = ", ".join(self.model_names)
            message = f"model {name!r} is not served here; served: {served}"
            raise ApiError(404, message, "model", "model_not_found")


@dataclass
class Answer(ABC):
    """A response being generated, whole or as events.

    request_id: as the client sees it. token_ids: of each prompt. kind, chunk_kind: `object` of the
    response and of an event. cached_tokens: prompt tokens found in the prefix cache, by prompt.
    extra: what a response that is not streamed has beside its choices. direct: of a
    connection that takes events at once (`direct_events.py`), else None.
    """

    service: Service
    request: GenerationRequest
    request_id: str
    token_ids: list[list[int]]
    created: int = field(init=False, default_factory=lambda: int(time.time()))
    num_completion_tokens: int = field(init=False, default=0)
    cached_tokens: dict[int, int] = field(init=False, default_factory=dict)
    extra: Json = field(init=False, default_factory=dict)
    direct: DirectEvents | None = field(init=False, default=None)

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    async def choice(self, index: int, output: RequestOutput, new: CompletionOutput) -> Json:
        """The JSON of one choice to prompt `index`, of a response that is not streamed."""

    async def chunks(
        self, index: int, output: RequestOutput, new: CompletionOutput
    ) -> list[tuple[Json, Json]]:
        """What is new of one choice: the choice of each event, and fields of the event itself."""
        return [(await self.choice(index, output, new), {})]

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return True

    @abstractmethod
    def text_choice(self, text: str) -> Json:
        """The only choice in an event that has `text` and nothing else, and is not the first."""

    def core(self, index: int, new: CompletionOutput, content: Json, shape: Json | None) -> Json:
        """What every choice has. content: its text, by name. shape: its log-probabilities."""
        choice = {
            "index": index,
            **content,
            "logprobs": shape,
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        return {**choice, "token_ids": new.token_ids} if self.request.return_token_ids else choice

    async def prompt_fields(self, output: RequestOutput) -> Json:
        """What the request wants to know of its prompt."""
        extra: Json = {}
        places = output.prompt_logprobs
        if self.request.prompt_logprobs is not None and places is not None:
            extra["prompt_logprobs"] = await built([places], prompt_logprobs_json, places)
        if self.request.return_token_ids:
            extra["prompt_token_ids"] = output.prompt_token_ids
        return extra

    def params_of(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """Of one prompt, out of those of the request."""
        return params

    async def response(self) -> Response:
        if not self.request.stream:
            return json_response(await self._whole())
        events = self._events()
        # The first event is waited for, so that a refused request gets an error status.
        first = await anext(events)
        return EventStream(first, events, self.direct)

    async def _whole(self) -> Json:
        choices: list[Json] = []
        async with aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                choices += [await self.choice(index, output, new) for new in output.outputs]
        choices.sort(key=lambda choice: int(choice["index"]))
        return {**self._head(self.kind), "choices": choices, "usage": self._usage(), **self.extra}

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The events of each output in one item, an error among them after the first, the end."""
        head = msgspec.json.encode(self._head(self.chunk_kind))[:-1]
        options = self.request.stream_options or StreamOptions()
        has_usage = options.include_usage or self.service.includes_usage
        usage: Json = {"usage": None} if has_usage else {}
        if not (self.request.return_token_ids or (has_usage and options.continuous_usage_stats)):
            self.direct = DirectEvents(self._text_event(head, usage))
        is_first = True
        try:
            async with aclosing(self._outputs()) as outputs:
                async for index, output in outputs:
                    if has_usage and options.continuous_usage_stats:
                        usage = {"usage": self._usage()}
                    told = b""
                    for new in output.outputs:
                        for choice, extra in await self.chunks(index, output, new):
                            told += _event(head, {"choices": [choice], **usage, **extra})
                    if told:
                        yield told
                        is_first = False
            if has_usage:
                yield _event(head, {"choices": [], "usage": self._usage()})
        except Exception as error:
            if is_first:
                raise
            yield b"data: %b\n\n" % msgspec.json.encode(as_api_error(error).body())
        yield b"data: [DONE]\n\n"

    def _text_event(self, head: bytes, usage: Json) -> Callable[[str, int], bytes]:
        """Makes the event with a text of so many tokens, as `_events` would, and counts them."""

        def event_of(text: str) -> bytes:
            return _event(head, {"choices": [self.text_choice(text)], **usage})

        is_plain = self.is_plain
        around: list[bytes] = []  # its text, which is all that plain events differ in

        def event(text: str, num_tokens: int) -> bytes:
            self.num_completion_tokens += num_tokens
            if not is_plain:
                return event_of(text)
            if not around:
                around.extend(event_of(_MARK).rsplit(_ENCODED_MARK, 1))
            return _encode(text).join(around)

        return event

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        caller = self.service.caller
        params = self.request.sampling_params(self.service.sampling_defaults)
        num_sequences = len(self.token_ids) * params.n
        async with self.service.admission.place(caller.client, num_sequences):
            is_one = len(self.token_ids) == 1
            is_direct = is_one and params.n == 1 and params.logprobs is None
            tell = self.direct.tell if self.direct is not None and is_direct else None
            streams = [
                self._stream(prompt, self.params_of(prompt, params), tell)
                for prompt in self.token_ids
            ]
            source: AsyncGenerator[Any, None] = streams[0] if is_one else merged(streams)
            async with aclosing(caller.in_time(source)) as items:
                async for item in items:
                    index, output = (0, item) if is_one else item
                    for new in output.outputs:
                        self.num_completion_tokens += len(new.token_ids)
                    self.cached_tokens[index] = output.num_cached_tokens
                    yield index, output

    def _stream(
        self,
        token_ids: list[int],
        params: SamplingParams,
        tell: Callable[[RequestState], bool] | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        service, request = self.service, self.request
        # Clients may send the same id twice; the engine's ids are unique.
        request_id = f"{self.request_id}-{next(service.numbers)}"
        prompt, priority = self._prompt(token_ids), request.priority or 0
        if not request.use_beam_search:
            return service.engine.generate(
                prompt,
                params,
                request_id,
                trace_headers=service.caller.trace_headers,
                priority=priority,
                client=service.caller.client,
                tell=tell,
            )
        penalty = 1.0 if request.length_penalty is None else request.length_penalty
        search = Beams(service.engine, service.prompts, prompt, token_ids, params, penalty,
                       request_id, priority, service.caller)  # fmt: skip
        return search.outputs()

    def _prompt(self, token_ids: list[int]) -> Prompt:
        salt = self.request.cache_salt
        return token_ids if salt is None else {"prompt_token_ids": token_ids, "cache_salt": salt}

    def _head(self, kind: str) -> Json:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.request.model or self.service.model_names[0],
        }

    def _usage(self) -> Json:
        num_prompt_tokens = sum(map(len, self.token_ids))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt_tokens + self.num_completion_tokens,
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


def _event(head: bytes, fields: Json) -> bytes:
    """head: JSON of the fields before, without its closing brace."""
    return b"data: %b,%b\n\n" % (head, msgspec.json.encode(fields)[1:])


def json_response(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
