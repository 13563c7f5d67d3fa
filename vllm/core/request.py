"""A request on its way through the engine. No torch: the scheduler and the wire share it."""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from vllm.sampling_params import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EngineRequest(msgspec.Struct, array_like=True):
    """One sequence to generate, as it crosses to the engine. n > 1 is several of these.

    seed is always set: the front end draws one where the user gave none. stop_token_ids are all
    ids that end the output; eos_token_ids those among them that min_tokens also holds back.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    stop_token_ids: list[int]
    max_tokens: int


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the token taken first, then the likeliest ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the token taken; 1 is the likeliest."""


class EngineOutput(msgspec.Struct, array_like=True):
    """What one step adds to one request.

    prompt_logprobs come once, for the prompt's tokens but the first. error: why a request with
    finish_reason ERROR was refused, or failed where is_fault.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    error: str | None = None
    is_fault: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine. The scheduler alone changes it.

    num_computed_tokens: how many of all_token_ids have their K and V in block_ids.
    num_scheduled_tokens: how many more the steps that run at this moment compute.
    num_pending_tokens: how many next tokens these steps give, not yet in all_token_ids.
    block_hashes: of the leading full blocks, as far as they were needed.
    states_kept_after: numbers of tokens after which its recurrent state is to be kept for others.
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
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    states_kept_after: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

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
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens that no step has taken up yet, the pending ones among them."""
        total = len(self.all_token_ids) + self.num_pending_tokens
        return total - self.num_computed_tokens - self.num_scheduled_tokens

    def schedule(self, num_tokens: int) -> None:
        """A step takes up the next `num_tokens`; the one that takes the last gives a new one."""
        self.num_scheduled_tokens += num_tokens
        self.num_pending_tokens += self.num_unscheduled_tokens == 0

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt logprobs need every prompt position computed."""
        return self.sampling.prompt_logprobs is None
