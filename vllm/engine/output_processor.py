"""Turns engine outputs into RequestOutputs: detokenises, cuts at stop texts, joins choices."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.core.outputs import EngineOutput, TokenLogprobs
from vllm.core.request import FinishReason
from vllm.engine.detokenizer import Detokenizer, StopTexts, has_own_texts
from vllm.engine.input_processor import ProcessedInput
from vllm.errors import NoMemoryError, NumericsError, RequestError
from vllm.outputs import (
    CompletionOutput,
    Logprob,
    LogprobDict,
    PoolingRequestOutput,
    RequestOutput,
    RequestStateStats,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams


@dataclass(slots=True)
class _Choice:
    """One sequence. num_given, num_given_chars: tokens and characters that `take` has returned."""

    index: int
    detokenizer: Detokenizer | None
    stops: StopTexts
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobDict] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_given: int = 0
    num_given_chars: int = 0
    is_end_given: bool = False


class RequestState:
    """A request in flight, as its client sees it. is_counted: its prompt is in the metrics. times:
    one object in all outputs."""

    def __init__(
        self,
        request_id: str,
        given: ProcessedInput,
        params: SamplingParams,
        tokenizer: Any,
        token_texts: dict[int, str],
        stream_interval: int,
        own_texts: dict[bool, dict[int, str]] | None,
    ):
        """token_texts: of tokens with log-probabilities. own_texts: see `Detokenizer`, by whether
        special tokens are skipped."""
        self.request_id = request_id
        self.params = params
        self.prompt = given.prompt
        self.prompt_token_ids = given.prompt_token_ids
        self.prompt_logprobs: list[LogprobDict | None] | None = None
        self._unread_prompt: list[TokenLogprobs] | None = None
        self.num_cached_tokens = 0
        self.queue_seconds = 0.0
        self.error: Exception | None = None
        self.times = RequestStateStats(time.time(), time.monotonic())
        self.is_counted = False
        self._tokenizer = tokenizer
        self._token_texts = token_texts
        # Tokens that nobody was told of, and how many are worth it; an end is worth any number.
        self._num_untold = 0.0
        self._num_due = 1.0
        is_final = params.output_kind == RequestOutputKind.FINAL_ONLY
        self._interval = math.inf if is_final else float(stream_interval)
        self.choices = []
        for index in range(params.n):
            detokenizer = None
            if tokenizer is not None and params.detokenize:
                detokenizer = Detokenizer(
                    tokenizer,
                    given.prompt_token_ids,
                    params.skip_special_tokens,
                    params.spaces_between_special_tokens,
                    None if own_texts is None else own_texts[params.skip_special_tokens],
                )
            stops = StopTexts(params.stop_strings, params.include_stop_str_in_output)
            self.choices.append(_Choice(index, detokenizer, stops))

    @property
    def is_finished(self) -> bool:
        # At every token: a generator would cost four times as much.
        return None not in [choice.finish_reason for choice in self.choices]

    @property
    def is_due(self) -> bool:
        """Whether what `take` would return is enough to be told."""
        return self._num_untold >= self._num_due

    @property
    def num_running(self) -> int:
        """Choices that still run."""
        return sum(choice.finish_reason is None for choice in self.choices)

    def running_ids(self) -> list[str]:
        """The engine's ids of the choices that still run."""
        return [f"{self.request_id}#{c.index}" for c in self.choices if c.finish_reason is None]

    def abort(self) -> list[str]:
        """Ends all choices; returns the engine's ids of those that ran."""
        running = self.running_ids()
        for choice in self.choices:
            choice.finish_reason = choice.finish_reason or FinishReason.ABORT
        return running

    def add(self, output: EngineOutput) -> bool:
        """Adds one step's output; True when a stop text ended a choice that the engine runs on."""
        choice = self.choices[int(output.request_id.rpartition("#")[2])]
        if choice.finish_reason is not None:
            return False
        if output.error is not None and self.error is None:
            self.error = _error_of(output)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.queue_seconds = output.queue_seconds
        if output.prompt_logprobs is not None:
            self._unread_prompt, self._num_untold = output.prompt_logprobs, math.inf
        is_stopped = self._add_tokens(choice, output)
        if choice.finish_reason is not None:
            self._num_untold = math.inf
        return is_stopped

    def _add_tokens(self, choice: _Choice, output: EngineOutput) -> bool:
        if len(output.token_ids) <= 1 or not self.params.stop_strings:
            return self._extend(choice, output)
        # A stop text may end the choice before the last of several tokens.
        for token in _one_by_one(output):
            if self._extend(choice, token):
                return output.finish_reason is None
        return False

    def _extend(self, choice: _Choice, output: EngineOutput) -> bool:
        """Adds tokens to a choice; True when a stop text ended it before the engine did."""
        choice.token_ids += output.token_ids
        self.times.num_generation_tokens += len(output.token_ids)
        self._num_untold += len(output.token_ids)
        for entry in output.logprobs or ():
            choice.logprobs.append(self._logprob_dict(entry))
            choice.cumulative_logprob += entry.logprobs[0]
        choice.finish_reason = output.finish_reason
        # A stop_reason is reported for the user's stop tokens, not for EOS.
        if output.stop_reason in (self.params.stop_token_ids or ()):
            choice.stop_reason = output.stop_reason
        if choice.detokenizer is None:
            return False
        tokens = output.token_ids
        if output.stop_reason is not None and not self.params.include_stop_str_in_output:
            tokens = tokens[:-1]
        num_old = len(choice.text)
        choice.text += choice.detokenizer.add(tokens, is_last=output.finish_reason is not None)
        if len(choice.token_ids) < self.params.min_tokens:
            return False
        hit = choice.stops.find(choice.text, num_old)
        if hit is None:
            return False
        length, stop = hit
        choice.text = choice.text[:length]
        is_running = choice.finish_reason is None
        choice.finish_reason, choice.stop_reason = FinishReason.STOP, stop
        return is_running

    def _logprob_dict(self, entry: TokenLogprobs) -> LogprobDict:
        """The sampled token first, then the likeliest by rank; one entry per token."""
        result = {}
        num_top = len(entry.token_ids) - len(entry.named_ranks)
        ranks = (entry.rank, *range(1, num_top), *entry.named_ranks)
        for token, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks):
            if token not in result:
                result[token] = Logprob(logprob, rank, self._decoded(token))
        return result

    def _decoded(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token not in self._token_texts:
            self._token_texts[token] = self._tokenizer.decode([token])
        return self._token_texts[token]

    @property
    def has_unread_prompt(self) -> bool:
        """Whether `read_prompt` has work to do."""
        return self._unread_prompt is not None

    def read_prompt(self) -> None:
        """Converts the engine's prompt logprobs. Takes seconds for a long prompt: a thread may do
        it while outputs are added."""
        if self._unread_prompt is not None:
            self.prompt_logprobs = [None, *map(self._logprob_dict, self._unread_prompt)]
            self._unread_prompt = None

    def take(self) -> RequestOutput | None:
        """What is new since the last call, in the requested output_kind; None for nothing."""
        self.read_prompt()
        self._num_untold, self._num_due = 0.0, self._interval
        if self._interval > 1 and len(self.choices) > 1:  # of each that has begun
            self._num_due *= max(
                1, sum(c.finish_reason is None and bool(c.token_ids) for c in self.choices)
            )
        kind, is_finished = self.params.output_kind, self.is_finished
        if kind == RequestOutputKind.FINAL_ONLY and not is_finished:
            return None
        is_delta = kind == RequestOutputKind.DELTA
        outputs = [
            self._completion(c, is_delta) for c in self.choices if not is_delta or _has_news(c)
        ]
        if not outputs:
            return None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=outputs,
            finished=is_finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.times,
        )

    def take_text(self) -> tuple[str, int] | None:
        """As `take` for a request with one choice, of which deltas without log-probabilities are
        asked for: the new text and its number of tokens, without objects made for them. None where
        there is something else to tell, an end or an error; nothing is taken then."""
        choice = self.choices[0]
        if choice.finish_reason is not None or self.error is not None or self.has_unread_prompt:
            return None
        self._num_untold, self._num_due = 0.0, self._interval
        first, first_char = choice.num_given, choice.num_given_chars
        choice.num_given, choice.num_given_chars = len(choice.token_ids), _num_safe_chars(choice)
        return choice.text[first_char : choice.num_given_chars], choice.num_given - first

    def _completion(self, choice: _Choice, is_delta: bool) -> CompletionOutput:
        first, first_char = (choice.num_given, choice.num_given_chars) if is_delta else (0, 0)
        last_char = _num_safe_chars(choice)
        choice.num_given, choice.num_given_chars = len(choice.token_ids), last_char
        choice.is_end_given = choice.finish_reason is not None
        wants_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=choice.index,
            text=choice.text[first_char:last_char],
            token_ids=choice.token_ids[first:],
            cumulative_logprob=choice.cumulative_logprob if wants_logprobs else None,
            logprobs=choice.logprobs[first:] if wants_logprobs else None,
            finish_reason=choice.finish_reason and choice.finish_reason.value,
            stop_reason=choice.stop_reason,
        )


def _num_safe_chars(choice: _Choice) -> int:
    if choice.finish_reason is not None:
        return len(choice.text)
    return max(choice.num_given_chars, choice.stops.num_safe(choice.text))


def _has_news(choice: _Choice) -> bool:
    ended = choice.finish_reason is not None and not choice.is_end_given
    return ended or choice.num_given < len(choice.token_ids)


def _one_by_one(output: EngineOutput) -> Iterator[EngineOutput]:
    """The output as the engine would send it with one token per step."""
    last = len(output.token_ids) - 1
    for index, token in enumerate(output.token_ids):
        yield EngineOutput(
            request_id=output.request_id,
            token_ids=[token],
            logprobs=output.logprobs and output.logprobs[index : index + 1],
            finish_reason=output.finish_reason if index == last else None,
            stop_reason=output.stop_reason if index == last else None,
        )


class PoolingState:
    """A pooling request in flight."""

    def __init__(self, request_id: str, given: ProcessedInput):
        self.request_id = request_id
        self.prompt_token_ids = given.prompt_token_ids
        self.num_cached_tokens = 0
        self.error: RequestError | None = None
        self._vector: list[float] | None = None

    @property
    def is_finished(self) -> bool:
        return self._vector is not None

    def add(self, output: EngineOutput) -> bool:
        if output.error is not None:
            self.error = _error_of(output)
        self.num_cached_tokens = output.num_cached_tokens
        self._vector = output.pooler_output
        return False

    def take(self) -> PoolingRequestOutput | None:
        """The output, once it is there."""
        if self._vector is None:
            return None
        return PoolingRequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._vector,
            num_cached_tokens=self.num_cached_tokens,
        )

    def running_ids(self) -> list[str]:
        return [] if self.is_finished or self.error else [f"{self.request_id}#0"]


def _error_of(output: EngineOutput) -> RequestError:
    kind = NumericsError if output.is_fault else RequestError
    return (NoMemoryError if output.is_out_of_memory else kind)(output.error or "")


class OutputProcessor:
    """All requests in flight by id."""

    def __init__(self, tokenizer: Any, stream_interval: int = 1):
        self.tokenizer = tokenizer
        self._stream_interval = stream_interval
        self.states: dict[str, RequestState | PoolingState] = {}
        # Text of single tokens, for logprobs; as many as the vocabulary has at most.
        self._token_texts: dict[int, str] = {}
        has_own = tokenizer is not None and has_own_texts(tokenizer)
        self._own_texts: dict[bool, dict[int, str]] | None = None
        if has_own:
            self._own_texts = {True: {}, False: {}}

    def add(self, request_id: str, given: ProcessedInput, params: SamplingParams) -> RequestState:
        state = RequestState(
            request_id, given, params, self.tokenizer, self._token_texts, self._stream_interval,
            self._own_texts,
        )  # fmt: skip
        self.states[request_id] = state
        return state

    def process(
        self, outputs: Iterable[EngineOutput]
    ) -> tuple[list[tuple[RequestState | PoolingState, EngineOutput]], list[str]]:
        """Takes the outputs of a step; drops those of removed requests. Returns the states that
        changed, each with its output, and the engine's ids of sequences to abort."""
        changed, to_abort = [], []
        for output in outputs:
            state = self.states.get(output.request_id.rpartition("#")[0])
            if state is None:
                continue
            if state.add(output):
                to_abort.append(output.request_id)
            changed.append((state, output))
        return changed, to_abort

    def remove(self, request_id: str) -> list[str]:
        """Removes a request; returns the engine's ids of its sequences that still run."""
        state = self.states.pop(request_id, None)
        return [] if state is None else state.running_ids()
