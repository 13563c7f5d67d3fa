"""MXFP8: E4M3 with a UE8M0 scale byte per 32 columns (OCP Microscaling Formats 1.0)."""

from vllm.formats.act_scheme import ActScheme
from vllm.formats.description import FormatDescription, QuantizeOption, StoredTensor

GROUP = 32

FORMAT = FormatDescription(
    element="mxfp8",
    scale="none",
    tensors=(
        StoredTensor("weight", "float8_e4m3fn", "code"),
        StoredTensor("scales", "uint8", "scale"),
    ),
    per_scale=(1, GROUP),
    act=(ActScheme.MXFP8_GROUP32, ActScheme.NONE),
    quantize=QuantizeOption(
        "mxfp8", f"E4M3 with a power-of-two scale per {GROUP} columns", is_whole=True
    ),
)
