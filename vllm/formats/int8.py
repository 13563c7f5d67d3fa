"""int8: a float32 scale for each row of a weight, or for groups of columns.

w = (code - zero point) * scale; both are signed. Without zero points those are 0.
"""

from vllm.formats.act_scheme import ActScheme
from vllm.formats.description import (
    INPUT_SCALE,
    INTEGER_GROUPS,
    OF_TEXT,
    WHOLE,
    FormatDescription,
    QuantizeOption,
    StoredTensor,
)
from vllm.formats.scales import Scales

_TENSORS = (
    StoredTensor("weight", "int8", "code"),
    StoredTensor("scales", "float32", "scale"),
    StoredTensor("zero_points", "int8", "scale", is_optional=True),
)

CHANNEL = FormatDescription(
    element="int8",
    scale="channel",
    tensors=(*_TENSORS, INPUT_SCALE),
    per_scale=(1, WHOLE),
    act=(ActScheme.DYNAMIC_TOKEN_INT8, ActScheme.NONE),
    rounded_scales=Scales.ACTIVATION,
    quantize=QuantizeOption("int8", "int8 with one scale per row, for activations in int8 (W8A8)"),
)

GROUP = FormatDescription(
    element="int8",
    scale="group",
    tensors=_TENSORS,
    per_scale=(1, OF_TEXT),
    sizes=tuple((1, group) for group in INTEGER_GROUPS),
    rounded_scales=Scales.ACTIVATION,
)
