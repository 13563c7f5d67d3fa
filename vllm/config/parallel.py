"""Over how many devices a model is spread."""

from dataclasses import dataclass

from vllm.errors import ConfigError


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size}: this version serves a model "
                f"on one device; leave it at 1"
            )
