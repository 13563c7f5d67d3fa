"""What prompts may take of one step, for the sake of the requests beside them."""

from dataclasses import dataclass

from vllm.config.scheduler import SchedulerConfig
from vllm.core.request import Request

# Prompt logprobs take a row of logits and a sort of it for each token. Of a step's tokens this part
# has them: beside other requests, and where all requests are one client's and ask for them.
LOGPROBS_PART_BESIDE_OTHERS = 32
LOGPROBS_PART_ALONE = 8
# And so many at least.
MIN_PROMPT_LOGPROBS = 64


@dataclass(slots=True)
class PromptLimits:
    """Tokens of the step that are left to prompts longer than a step, and to those that are
    computed with logprobs."""

    long: int = 0
    with_logprobs: int = 0

    @classmethod
    def of_step(cls, config: SchedulerConfig, is_beside: bool, is_alone: bool) -> "PromptLimits":
        """is_beside: other requests generate. is_alone: all requests are one client's, and ask for
        prompt logprobs."""
        most, share = config.max_num_batched_tokens, config.max_prefill_share
        part = LOGPROBS_PART_ALONE if is_alone else LOGPROBS_PART_BESIDE_OTHERS
        return cls(
            max(1, int(most * share)) if is_beside else most,
            max(most // part, MIN_PROMPT_LOGPROBS),
        )

    def left_to(self, request: Request, is_long: bool) -> int | None:
        """Tokens that the request may have; None where it is not limited."""
        limits = [self.long] if is_long else []
        if _is_scored(request):
            limits.append(self.with_logprobs)
        return min(limits, default=None)

    def take(self, request: Request, is_long: bool, num_tokens: int) -> None:
        if is_long:
            self.long -= num_tokens
        if _is_scored(request):
            self.with_logprobs -= num_tokens


def _is_scored(request: Request) -> bool:
    """Whether its prompt is computed with logprobs now."""
    return request.sampling.prompt_logprobs is not None and not request.num_output_tokens
