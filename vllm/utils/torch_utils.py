"""Names of dtypes, seeds, and what to say when a GPU is full."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm.errors import ConfigError, VllmError, is_out_of_memory

# Names users write -> torch dtype -> short name used by the kernel selector.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
}
_MOST_FACTS = 500  # characters of somebody else's error that a message quotes


def dtype_of(short_name: str) -> torch.dtype:
    """`bf16` -> torch.bfloat16."""
    return next(dtype for dtype, name in SHORT_NAMES.items() if name == short_name)


def set_random_seed(seed: int) -> None:
    """Seeds Python's and torch's global generators."""
    random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def naming_the_knob(knob: str) -> Iterator[None]:
    """Turns a GPU that is full into a ConfigError that says which option to change, and how."""
    try:
        yield
    except Exception as error:
        if isinstance(error, VllmError) or not is_out_of_memory(error):
            raise
        # Up to what torch says of its own allocator; before it, who has how much.
        facts = " ".join(str(error).partition(" Of the allocated memory")[0].split())
        raise ConfigError(
            f"not enough GPU memory: change {knob}, or end other processes that use the GPU: "
            f"{facts[:_MOST_FACTS]}"
        ) from error
