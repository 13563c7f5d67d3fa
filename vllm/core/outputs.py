"""Data of one step between engine, executor and worker. No torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from vllm.core.request import FinishReason, Request


@dataclass(slots=True)
class NewRequestData:
    """A request that enters the batch, for the first time or after a preemption. state_slot: slot
    of a snapshot of its recurrent state after `num_computed_tokens`; 0 for none."""

    request: Request
    num_computed_tokens: int
    state_slot: int = 0


@dataclass(slots=True)
class SchedulerOutput:
    """What the worker computes in one step. Dicts are keyed by request id.

    num_scheduled_tokens: tokens to compute, draft tokens included, in batch order.
    scheduled_spec_decode_tokens: draft tokens to verify, after a request's last known token.
    num_draft_tokens: tokens to draft for each request after the step, at most.
    new_block_ids: blocks allocated to requests that are already in the batch, by cache group.
    removed_request_ids: requests that finished or were preempted since the last step.
    state_snapshots: slot to save the recurrent state to after the step.
    num_tokens_across_dp: tokens of each data-parallel rank, where they step in lock-step.
    uniform_decode: all of these ranks compute one token per request, the last one.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    num_draft_tokens: int = 0
    new_block_ids: dict[str, list[list[int]]] = field(default_factory=dict)
    removed_request_ids: list[str] = field(default_factory=list)
    state_snapshots: dict[str, int] = field(default_factory=dict)
    num_tokens_across_dp: tuple[int, ...] = ()
    uniform_decode: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.num_scheduled_tokens


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the sampled token first, then the likeliest ones, then
    those that the request names, whose ranks are `named_ranks`."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the sampled token; 1 is the likeliest."""
    named_ranks: list[int] = []


class StepRows(NamedTuple):
    """Rows that one call of a kernel computed in a step, padding of its CUDA graph included: of a
    linear layer, of experts (the tokens of all data-parallel ranks in lock-step), and of lm_head (0
    where nothing was sampled)."""

    linear: int
    moe: int
    lm_head: int


@dataclass(slots=True)
class ModelRunnerOutput:
    """Results of one step. Dicts are keyed by request id.

    request_ids: requests whose known tokens are all computed. sampled_token_ids: the next tokens
    of each of them, any number. Of `d` scheduled draft tokens, those before the last sampled token
    are accepted. logprobs: one entry per sampled token, where requested. prompt_logprobs: once,
    with the step that completes the prompt; the first prompt token has no entry. pooler_output:
    vectors of pooling requests. draft_token_ids: proposals to verify in the next step. errors: why
    requests got no token. out_of_memory: those of `errors` for which memory ran out; the others
    have non-finite logits. compile_waits: Unix time of the begin, and seconds, of each compilation
    of a kernel since the last step. rows: what its kernels computed. catch_up_seconds: of the time
    for proposals, what tokens took that what drafts had not seen before.
    """

    request_ids: list[str] = field(default_factory=list)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    pooler_output: dict[str, list[float]] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    out_of_memory: set[str] = field(default_factory=set)
    compile_waits: list[tuple[float, float]] = field(default_factory=list)
    rows: StepRows = StepRows(0, 0, 0)
    catch_up_seconds: float = 0.0


class EngineOutput(msgspec.Struct, array_like=True):
    """What one step adds to one request, as it is sent to the front end.

    prompt_logprobs: sent once, without an entry for the first prompt token. error: why the request
    was refused (finish_reason ERROR), or failed where is_fault, for want of memory where
    is_out_of_memory.
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
    pooler_output: list[float] | None = None
    is_out_of_memory: bool = False
