"""Requests: as sent to the engine process, and as the scheduler keeps them. No torch."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from vllm.sampling_params import PoolingParams, SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EngineRequest(msgspec.Struct, array_like=True):
    """One sequence, as it is sent to the engine process. n > 1 makes several of these.

    seed: drawn by the front end where the user set none. stop_token_ids: all ids that end the
    output, EOS ids included. pooling: asks for a vector instead of tokens; max_tokens is 0 then.
    bad_words: token ids of each spelling of a text that must not come. priority: lower is earlier.
    cache_salt: prefixes are shared with requests of the same salt alone. client: who sent it;
    clients share the places equally.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    stop_token_ids: list[int]
    max_tokens: int
    pooling: PoolingParams | None = None
    bad_words: list[list[int]] = []
    priority: int = 0
    cache_salt: str | None = None
    client: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine. Only the scheduler changes it.

    arrival: by time.monotonic. queue_seconds: from then until it was scheduled; None before.
    queued_step: number of the step before which it was queued last.
    num_computed_tokens: leading tokens of all_token_ids whose K and V are in block_ids, of window
    layers those that later tokens see.
    num_scheduled_tokens: tokens of all_token_ids that the steps in flight compute.
    num_pending_tokens: steps in flight that sample for it; their tokens are not in all_token_ids.
    spec_token_ids: draft tokens, to be verified in the next step or in flight; -1 for one that the
    worker alone knows.
    block_ids: by cache group, in order of position; none where it is not admitted. num_passed: how
    many of the first of each are given back, which no token reads any more. num_slots: tokens that
    its blocks can hold.
    block_hashes: of the leading full blocks, computed as needed.
    states_kept_after: token counts after which its recurrent state is saved as a snapshot.
    """

    request_id: str
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_tokens: int
    num_prompt_tokens: int
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int = -1
    spec_token_ids: list[int] = field(default_factory=list)
    block_ids: list[list[int]] = field(default_factory=list)
    num_passed: list[int] = field(default_factory=list)
    num_slots: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    states_kept_after: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    pooling: PoolingParams | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    priority: int = 0
    cache_salt: str | None = None
    client: str = ""
    queued_step: int = 0
    arrival: float = field(default_factory=time.monotonic)
    queue_seconds: float | None = None

    @classmethod
    def of(cls, wire: EngineRequest) -> "Request":
        return cls(
            request_id=wire.request_id,
            sampling=wire.sampling,
            seed=wire.seed,
            stop_token_ids=frozenset(wire.stop_token_ids),
            max_tokens=wire.max_tokens,
            num_prompt_tokens=len(wire.prompt_token_ids),
            all_token_ids=list(wire.prompt_token_ids),
            pooling=wire.pooling,
            bad_words=wire.bad_words,
            priority=wire.priority,
            cache_salt=wire.cache_salt,
            client=wire.client,
        )

    @property
    def num_blocks(self) -> int:
        """That it holds."""
        return sum(map(len, self.block_ids)) - sum(self.num_passed)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens that no step computes yet, pending ones included."""
        total = len(self.all_token_ids) + self.num_pending_tokens
        return total - self.num_computed_tokens - self.num_scheduled_tokens

    def schedule(self, num_tokens: int) -> None:
        """A step computes the next `num_tokens`; the step that computes the last one samples."""
        self.num_scheduled_tokens += num_tokens
        self.num_pending_tokens += self.num_unscheduled_tokens == 0

    @property
    def reads_own_tokens(self) -> bool:
        """Whether what it may sample next depends on the tokens before."""
        s = self.sampling
        has_phrases = any(len(word) > 1 for word in self.bad_words)
        return s.penalises or s.structured_outputs is not None or has_phrases

    @property
    def rank(self) -> tuple[int, float]:
        """Its place among others where priorities count: lower ones come first."""
        return self.priority, self.arrival

    @property
    def reads_prompt(self) -> bool:
        """Whether it needs the hidden states of its prompt, not only the next token."""
        return self.sampling.prompt_logprobs is not None or self.pooling is not None
