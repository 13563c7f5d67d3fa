"""FP8 (E4M3) with a float32 scale per block of rows and columns, as DeepSeek and Qwen store it."""

from typing import Any

from vllm.formats.act_scheme import ActScheme
from vllm.formats.description import OF_TEXT, FormatDescription, QuantizeOption, StoredTensor
from vllm.formats.scales import Scales

BLOCK = (128, 128)


def as_block(given: Any) -> tuple[int, int] | None:
    """Two sizes of a config.json; None for what is none."""
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    if not is_pair or not all(isinstance(size, int) and 0 < size <= 1 << 16 for size in given):
        return None
    return (given[0], given[1])


FORMAT = FormatDescription(
    element="fp8",
    scale="block",
    tensors=(
        StoredTensor("weight", "float8_e4m3fn", "code"),
        StoredTensor("scales", "float32", "scale"),
    ),
    per_scale=(OF_TEXT, OF_TEXT),
    default_size=BLOCK,
    act=(ActScheme.DYNAMIC_GROUP128, ActScheme.NONE),
    # Weights too: their codes are rounded a second time.
    rounded_scales=Scales.UE8M0,
    # The gates of a gated delta-net, one row a head; the vendor's FP8 checkpoints keep them too.
    kept_at_load=("in_proj_a", "in_proj_b", "in_proj_ba"),
    quantize=QuantizeOption(
        "fp8-block",
        "E4M3 with one scale per 128x128 block, edge blocks partial",
        sizes=(BLOCK,),
    ),
)
