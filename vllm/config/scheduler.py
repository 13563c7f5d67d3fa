"""How many requests and tokens one step may hold."""

from dataclasses import dataclass

from vllm.errors import ConfigError

# Tokens of one step where nobody asks for another number: enough to fill the device.
CPU_BATCHED_TOKENS = 2048
GPU_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class SchedulerConfig:
    """max_num_batched_tokens: tokens of one step; longer prompts are computed in chunks.
    max_prompt_graph_tokens: of the steps with prompts that CUDA graphs are captured for, 0 for
    none."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = CPU_BATCHED_TOKENS
    max_prompt_graph_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if not 0 < value <= 1 << 20:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} {value} is out of range: it takes 1 to {1 << 20}")
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
