"""The forms in which kernels take the scales of weights."""

from enum import StrEnum


class Scales(StrEnum):
    """The form of weight scales that a kernel takes; ACTIVATION: in the type of activations."""

    FLOAT32 = "float32"
    FLOAT32_CEIL_UE8M0 = "float32-ceil-ue8m0"
    UE8M0 = "ue8m0"
    ACTIVATION = "activation-type"
