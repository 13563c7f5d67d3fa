"""NVFP4: E2M1 with an E4M3 scale per 16 columns, and a float32 global scale for each weight."""

from vllm.formats.act_scheme import ActScheme
from vllm.formats.description import INPUT_SCALE, FormatDescription, QuantizeOption, StoredTensor
from vllm.formats.scales import Scales

GROUP = 16

FORMAT = FormatDescription(
    element="nvfp4",
    scale="none",
    tensors=(
        StoredTensor("weight", "uint8", "code"),
        StoredTensor("scales", "float8_e4m3fn", "scale"),
        # Of merged weights each keeps its own.
        StoredTensor("global_scales", "float32", "shard"),
        INPUT_SCALE,
    ),
    per_scale=(1, GROUP),
    codes_per_byte=2,
    act=(ActScheme.NVFP4_GROUP16, ActScheme.NONE),
    rounded_scales=Scales.ACTIVATION,
    gemm_variable="VLLM_NVFP4_GEMM_BACKEND",
    quantize=QuantizeOption(
        "nvfp4", f"E2M1 with a scale per {GROUP} columns, weight-only", is_whole=True
    ),
)
