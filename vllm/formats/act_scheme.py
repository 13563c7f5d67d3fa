"""How activations are quantised."""

from enum import StrEnum


class ActScheme(StrEnum):
    """How a kernel quantises its activations; NONE multiplies them as they are (weight-only)."""

    NONE = "none"
    STATIC_TENSOR = "static-tensor"
    DYNAMIC_TENSOR = "dynamic-tensor"
    DYNAMIC_TOKEN = "dynamic-token"
    DYNAMIC_GROUP128 = "dynamic-group128"
    NVFP4_GROUP16 = "nvfp4-group16"
    DYNAMIC_TOKEN_INT8 = "dynamic-token-int8"
    STATIC_TENSOR_INT8 = "static-tensor-int8"
    MXFP8_GROUP32 = "mxfp8-group32"
