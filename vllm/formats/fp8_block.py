"""FP8 (E4M3) with a float32 scale per block of rows and columns, as DeepSeek and Qwen store it."""

from vllm.formats.act_scheme import ActScheme
from vllm.formats.description import (
    OF_TEXT,
    FormatDescription,
    QuantizeOption,
    StoredTensor,
)
from vllm.formats.scales import Scales

BLOCK = (128, 128)

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
    kept_at_load=("in_proj_a", "in_proj_b"),
    quantize=QuantizeOption(
        "fp8-block",
        "E4M3 with one scale per 128x128 block, edge blocks partial",
        sizes=(BLOCK,),
    ),
)
