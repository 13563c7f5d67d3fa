"""int4 in groups of columns, each with a float32 scale and a zero point, or 8 for all; or with
one scale for each row."""

from vllm.formats.description import (
    INTEGER_GROUPS,
    OF_TEXT,
    WHOLE,
    FormatDescription,
    QuantizeOption,
    StoredTensor,
)
from vllm.formats.scales import Scales

_TENSORS = (
    StoredTensor("weight", "uint8", "code"),
    StoredTensor("scales", "float32", "scale"),
    StoredTensor("zero_points", "uint8", "scale", is_optional=True),
)

FORMAT = FormatDescription(
    element="int4",
    scale="group",
    tensors=_TENSORS,
    per_scale=(1, OF_TEXT),
    sizes=tuple((1, group) for group in INTEGER_GROUPS),
    codes_per_byte=2,
    rounded_scales=Scales.ACTIVATION,
    quantize=QuantizeOption(
        "w4a16",
        "symmetric int4 in groups of 128 columns (or 64 or 32), weight-only",
        sizes=tuple((1, group) for group in reversed(INTEGER_GROUPS)),
        is_whole=True,
    ),
)

CHANNEL = FormatDescription(
    element="int4",
    scale="channel",
    tensors=_TENSORS,
    per_scale=(1, WHOLE),
    codes_per_byte=2,
    rounded_scales=Scales.ACTIVATION,
)
