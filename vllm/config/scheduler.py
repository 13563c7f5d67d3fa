"""Limits of one step."""

from vllm.errors import ConfigError
from vllm.utils.dataclasses import dataclass

# Defaults of --max-num-batched-tokens: enough to fill the device.
CPU_BATCHED_TOKENS = 2048
GPU_BATCHED_TOKENS = 8192
# Default of --max-prompt-graph-tokens where steps are captured: larger steps take the device longer
# than the host.
PROMPT_GRAPH_TOKENS = 4096


SCHEDULING_POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class SchedulerConfig:
    """max_num_seqs, max_num_batched_tokens: limits of one step; longer prompts are chunked.
    max_prompt_graph_tokens: largest step with prompts that a CUDA graph is captured for; 0: none.
    policy: whether requests run in order of arrival (fcfs) or of their priority.
    max_num_seqs_per_client: sequences of one client that run at once; None for no limit.
    max_prefill_share: share of a step's tokens, 0 to 1, that prompts longer than a step take at
    most while other requests generate. stream_interval: tokens of a choice that one event of a
    stream has at least, after the first and before the last.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = CPU_BATCHED_TOKENS
    max_prompt_graph_tokens: int = 0
    policy: str = SCHEDULING_POLICIES[0]
    max_num_seqs_per_client: int | None = None
    max_prefill_share: float = 1.0
    stream_interval: int = 1

    def __post_init__(self) -> None:
        if self.policy not in SCHEDULING_POLICIES:
            raise ConfigError(
                f"--scheduling-policy {self.policy!r} is unknown: it takes "
                f"{', '.join(SCHEDULING_POLICIES)}"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens", "stream_interval"):
            value = getattr(self, name)
            if not 0 < value <= 1 << 20:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} {value} is out of range: it takes 1 to {1 << 20}")
        if self.max_num_seqs_per_client is not None and self.max_num_seqs_per_client < 1:
            raise ConfigError(
                f"--max-num-seqs-per-client {self.max_num_seqs_per_client} is out of range: it "
                f"takes 1 or more; leave it out for no limit"
            )
        if not 0 < self.max_prefill_share <= 1:
            raise ConfigError(
                f"--max-prefill-share {self.max_prefill_share} is out of range: it takes a share "
                f"above 0, at most 1"
            )
        if not 0 <= self.max_prompt_graph_tokens <= self.max_num_batched_tokens:
            raise ConfigError(
                f"--max-prompt-graph-tokens {self.max_prompt_graph_tokens} is out of range: it "
                f"takes 0 to --max-num-batched-tokens, {self.max_num_batched_tokens}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.max_num_seqs}: every running request needs a token a step"
            )
