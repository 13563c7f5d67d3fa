"""MXFP4: E2M1 with a UE8M0 scale byte per 32 columns. Known to readers; no kernel here takes it."""

from vllm.formats.description import FormatDescription, StoredTensor
from vllm.formats.scales import Scales

GROUP = 32

FORMAT = FormatDescription(
    element="mxfp4",
    scale="none",
    tensors=(StoredTensor("weight", "uint8", "code"), StoredTensor("scales", "uint8", "scale")),
    per_scale=(1, GROUP),
    codes_per_byte=2,
    rounded_scales=Scales.ACTIVATION,
    is_served=False,
)
