"""FP8 (E4M3) with a float32 scale for each row of a weight."""

from vllm.formats.act_scheme import ActScheme
from vllm.formats.description import INPUT_SCALE, WHOLE, FormatDescription, StoredTensor
from vllm.formats.scales import Scales

FORMAT = FormatDescription(
    element="fp8",
    scale="channel",
    tensors=(
        StoredTensor("weight", "float8_e4m3fn", "code"),
        StoredTensor("scales", "float32", "scale"),
        INPUT_SCALE,
    ),
    per_scale=(1, WHOLE),
    act=(ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.NONE),
    rounded_scales=Scales.ACTIVATION,
)
