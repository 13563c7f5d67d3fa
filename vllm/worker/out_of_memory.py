"""A step for which memory ran out: some of its requests are dropped, not the server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from vllm.core.outputs import ModelRunnerOutput, SchedulerOutput, StepRows
from vllm.errors import is_out_of_memory
from vllm.logger import get_logger
from vllm.worker.async_output import AsyncModelRunnerOutput

logger = get_logger(__name__)

Drafts = TypeVar("Drafts")


@dataclass(slots=True)
class FinishedOutput:
    """The output of a step that is done."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


def compute_alone(
    scheduled: SchedulerOutput,
    bitmasks: dict[str, Tensor],
    changed: frozenset[str],
    execute: Callable[[SchedulerOutput, dict[str, Tensor]], AsyncModelRunnerOutput],
) -> FinishedOutput:
    """What a step gives whose requests are computed one by one, and draft nothing. Those that
    memory runs out for again are among its errors, and `changed`: requests that the step may have
    changed already."""
    merged = ModelRunnerOutput()
    for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
        if request_id in changed:
            _drop(merged, request_id)
            continue
        draft = scheduled.scheduled_spec_decode_tokens.get(request_id)
        step = SchedulerOutput(
            num_scheduled_tokens={request_id: num_tokens},
            scheduled_spec_decode_tokens={request_id: draft} if draft else {},
        )
        try:
            _add(merged, execute(step, bitmasks).result())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _drop(merged, request_id)
    logger.error(
        "Out of memory in a step of %d requests: %d of them were computed one by one, %d end with "
        "an error; lower --max-num-batched-tokens or --max-num-seqs, or the size of the KV cache",
        len(scheduled.num_scheduled_tokens),
        len(scheduled.num_scheduled_tokens) - len(merged.errors),
        len(merged.errors),
    )
    return FinishedOutput(merged)


def _drop(merged: ModelRunnerOutput, request_id: str) -> None:
    merged.errors[request_id] = "out of memory: the server has none left for this request now"
    merged.out_of_memory.add(request_id)


def _add(merged: ModelRunnerOutput, one: ModelRunnerOutput) -> None:
    merged.request_ids += one.request_ids
    merged.sampled_token_ids += one.sampled_token_ids
    merged.logprobs |= one.logprobs
    merged.prompt_logprobs |= one.prompt_logprobs
    merged.pooler_output |= one.pooler_output
    merged.draft_token_ids |= one.draft_token_ids
    merged.errors |= one.errors
    merged.catch_up_seconds += one.catch_up_seconds
    merged.compile_waits += one.compile_waits
    merged.rows = StepRows(*(a + b for a, b in zip(merged.rows, one.rows)))


def drafts_or(nothing: Drafts, draft: Callable[[], Drafts], is_alone: bool) -> Drafts:
    """What `draft` gives, and without memory for it `nothing`. is_alone: a rank without others,
    which must not differ in what they draft."""
    try:
        return draft()
    except Exception as error:
        if not (is_alone and is_out_of_memory(error)):
            raise
    logger.warning("No memory for draft tokens")
    return nothing
