"""`/v1/chat/completions`."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from fastapi import Response

from vllm.entrypoints.openai.answer_format import AnswerFormat, AnswerReader
from vllm.entrypoints.openai.generation import Answer, Json, Service, built
from vllm.entrypoints.openai.logprobs import chat_logprobs, positions
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tool_parsers.parser import Arguments, Call, Content, Event, Reasoning


async def create_chat_completion(
    service: Service, request: ChatCompletionRequest, request_id: str
) -> Response:
    prompt, form = await chat_prompt(service, request)
    return await ChatAnswer(service, request, f"chatcmpl-{request_id}", [prompt], form).response()


async def chat_prompt(
    service: Service, request: ChatCompletionRequest
) -> tuple[list[int], AnswerFormat]:
    """Token ids of the conversation, and how its answer is written."""
    text = await service.prompts.render(request)
    # The template writes the special tokens itself.
    is_truncated = request.truncate_prompt_tokens is not None
    prompt = await service.prompts.encode(text, bool(request.add_special_tokens), is_truncated)
    prompt = request.truncated(prompt, service.max_model_len)
    template = service.prompts.template(request)
    return prompt, service.answers.of(request, template, text)


@dataclass
class ChatAnswer(Answer):
    """n choices to one prompt. readers: of those whose opening was sent, or that are whole.
    reasoning: of each choice that has not ended, in parts. callers: choices that call tools."""

    request: ChatCompletionRequest
    form: AnswerFormat
    readers: dict[int, AnswerReader] = field(default_factory=dict)
    reasoning: dict[int, list[str]] = field(default_factory=dict)
    num_reasoning_tokens: int = 0
    callers: set[int] = field(default_factory=set)

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def params_of(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        changes: Json = {}
        if self.form.grammar is not None:
            changes["structured_outputs"] = StructuredOutputsParams(**self.form.grammar)
        if self.form.keeps_special_tokens:
            changes["skip_special_tokens"] = False
        return msgspec.structs.replace(params, **changes) if changes else params

    async def choice(self, index: int, output: RequestOutput, new: CompletionOutput) -> Json:
        if not self.extra:
            self.extra = await self.prompt_fields(output)
        message: Json = {"role": self.service.response_role, "content": None, "refusal": None}
        message |= self._message(await self.read(new))
        if not message.get("tool_calls") or self._echoed():
            message["content"] = self._echoed() + (message["content"] or "")
        return await self._choice({"message": message}, new)

    async def chunks(
        self, index: int, output: RequestOutput, new: CompletionOutput
    ) -> list[tuple[Json, Json]]:
        is_first, has_extra = new.index not in self.readers, not self.readers
        delta = self._delta(await self.read(new))
        chunk = await self._choice({"delta": delta}, new)
        if not is_first:
            return [(chunk, {})]
        extra = await self.prompt_fields(output) if has_extra else {}
        delta = {"role": self.service.response_role, "content": self._echoed()}
        opening = {"index": new.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [(opening, extra), (chunk, {})]

    @property
    def is_plain(self) -> bool:
        return self.form.is_plain

    def text_choice(self, text: str) -> Json:
        delta = self._delta(self._read(0, text, is_last=False))
        return self.core(0, CompletionOutput(0), {"delta": delta}, None)

    async def read(self, new: CompletionOutput) -> list[Event]:
        """What `new` adds to its choice."""
        is_last = new.finish_reason is not None
        events = self._read(new.index, new.text, is_last)
        if is_last and (texts := self.reasoning.pop(new.index, [])):
            tokens = await self.service.prompts.tokens("".join(texts))
            self.num_reasoning_tokens += len(tokens)
        return events

    def _read(self, index: int, text: str, is_last: bool) -> list[Event]:
        reader = self.readers.get(index)
        if reader is None:
            reader = self.readers[index] = self.form.reader()
        events = reader.feed(text, is_last)
        if self.form.is_plain:
            return events
        if self.request.parallel_tool_calls is False:  # which free text may not heed
            events = [event for event in events if getattr(event, "index", 0) == 0]
        texts = [event.text for event in events if isinstance(event, Reasoning)]
        self.reasoning.setdefault(index, []).extend(texts)
        if any(isinstance(event, Call) for event in events):
            self.callers.add(index)
        if self.request.include_reasoning is False:
            return [event for event in events if not isinstance(event, Reasoning)]
        return events

    def _message(self, events: Iterable[Event]) -> Json:
        """Of a whole answer."""
        message = self._texts(events)
        calls: dict[int, Json] = {}
        for event in events:
            if isinstance(event, Call):
                function = {"name": event.name, "arguments": ""}
                calls[event.index] = {"id": event.id, "type": "function", "function": function}
            elif isinstance(event, Arguments):
                calls[event.index]["function"]["arguments"] += event.text
        return message | ({"tool_calls": list(calls.values())} if calls else {})

    def _delta(self, events: Iterable[Event]) -> Json:
        """Of a part of an answer; of a plain one its content, be it empty."""
        if self.form.is_plain:
            return {"content": "".join([e.text for e in events if isinstance(e, Content)])}
        delta = self._texts(events)
        calls: list[Json] = []
        for event in events:
            if isinstance(event, Call):
                function = {"name": event.name, "arguments": ""}
                calls.append({"index": event.index, "id": event.id, "type": "function",
                              "function": function})  # fmt: skip
            elif isinstance(event, Arguments):
                if not calls or calls[-1]["index"] != event.index:
                    calls.append({"index": event.index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += event.text
        return delta | ({"tool_calls": calls} if calls else {})

    def _texts(self, events: Iterable[Event]) -> Json:
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        texts: Json = {"content": content} if content else {}
        if reasoning:
            texts |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return texts

    async def _choice(self, content: Json, new: CompletionOutput) -> Json:
        shape = None
        if self.request.logprobs:
            places = positions(new.token_ids, new.logprobs or [])
            shape = await built(
                [new.logprobs], chat_logprobs, places, self.request.top_logprobs or 0,
                self.service.prompts, frozenset(self.request.logprob_token_ids or ()),
                bool(self.request.return_tokens_as_token_ids),
            )  # fmt: skip
        choice = self.core(new.index, new, content, shape)
        if choice["finish_reason"] == "stop" and new.index in self.callers:
            choice["finish_reason"] = "tool_calls"
        return choice

    def _usage(self) -> Json:
        usage = super()._usage()
        if self.form.is_plain:
            return usage
        details = {"reasoning_tokens": self.num_reasoning_tokens}
        return {**usage, "completion_tokens_details": details}

    def _echoed(self) -> str:
        """The message being continued, where the request asks for it to be part of the answer."""
        last = self.request.messages[-1]
        is_echoed = self.request.echo and last.role == self.service.response_role
        return last.content or "" if is_echoed else ""
