"""FP8 (E4M3) with one float32 scale for a weight."""

from vllm.formats.act_scheme import ActScheme
from vllm.formats.description import (
    INPUT_SCALE,
    WHOLE,
    FormatDescription,
    QuantizeOption,
    StoredTensor,
)
from vllm.formats.scales import Scales

FORMAT = FormatDescription(
    element="fp8",
    scale="tensor",
    tensors=(
        StoredTensor("weight", "float8_e4m3fn", "code"),
        StoredTensor("scales", "float32", "scale"),
        INPUT_SCALE,
    ),
    per_scale=(WHOLE, WHOLE),
    act=(ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.NONE),
    rounded_scales=Scales.ACTIVATION,
    # Merged weights keep their own scales: re-scaling to a common one would lose bits.
    merged_kind="fp8-channel",
    quantize=QuantizeOption("fp8-tensor", "E4M3 with one scale per weight"),
)
