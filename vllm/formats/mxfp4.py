"""MXFP4: E2M1 with a UE8M0 scale byte per 32 columns (OCP Microscaling Formats 1.0)."""

from vllm.formats.description import FormatDescription, QuantizeOption, StoredTensor
from vllm.formats.scales import Scales

GROUP = 32

FORMAT = FormatDescription(
    element="mxfp4",
    scale="none",
    tensors=(StoredTensor("weight", "uint8", "code"), StoredTensor("scales", "uint8", "scale")),
    per_scale=(1, GROUP),
    codes_per_byte=2,
    rounded_scales=Scales.ACTIVATION,
    quantize=QuantizeOption(
        "mxfp4",
        f"E2M1 with a power-of-two scale per {GROUP} columns, weight-only",
        is_whole=True,
    ),
)
