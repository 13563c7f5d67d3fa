"""Weights that are not quantised: float32, bfloat16 and float16."""

from vllm.formats.description import WHOLE, FormatDescription, StoredTensor

FORMATS = tuple(
    FormatDescription(
        element=element,
        scale="none",
        tensors=(StoredTensor("weight", dtype, "code"),),
        per_scale=(WHOLE, WHOLE),
    )
    for element, dtype in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"))
)
