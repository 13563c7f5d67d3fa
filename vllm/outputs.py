"""What a request gives back."""

from dataclasses import dataclass, field

import msgspec

from vllm.lora.request import LoRARequest


# gc: there may be a million, and none refers to anything that could refer back.
class Logprob(msgspec.Struct, gc=False):
    """Natural log of a token's probability before temperature and filters; rank 1 is likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobDict = dict[int, Logprob]
"""token id -> Logprob: the token taken (or given) and the likeliest ones of one position."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice. With RequestOutputKind.DELTA, text, token_ids and logprobs are what is new.

    finish_reason: None while running, then "stop", "length" or "abort"; stop_reason: the stop
    text or stop token id that ended it, None for the end-of-sequence token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobDict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStateStats:
    """Times of a request in seconds. arrival_time: of the clock of the day; the `_ts` by
    time.monotonic, 0 before their event."""

    arrival_time: float
    queued_ts: float
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        """From the arrival to the first token; 0 before it."""
        return max(0.0, self.first_token_ts - self.queued_ts)


@dataclass(slots=True)
class PoolingRequestOutput:
    """The vector of a pooling request: float32 [hidden_size]."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[float]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of a request. prompt_logprobs[0] is None: nothing precedes the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobDict | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | None = None
