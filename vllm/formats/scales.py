"""The forms in which kernels take the scales of weights."""

from enum import StrEnum
from functools import cache

from vllm.utils.dataclasses import dataclass


class Scales(StrEnum):
    """The form of weight scales that a kernel takes; ACTIVATION: in the type of activations."""

    FLOAT32 = "float32"
    FLOAT32_CEIL_UE8M0 = "float32-ceil-ue8m0"
    UE8M0 = "ue8m0"
    ACTIVATION = "activation-type"


@dataclass(frozen=True)
class Requant:
    """The relative Frobenius error of bringing a weight's scales to another form, 0 where nothing
    is rounded. is_estimated: from the formats alone, not from this weight."""

    error: float
    is_estimated: bool = False


# A second rounding to E4M3 with other scales than those that the weight has. Upstream's pull
# request 58157 reports 2.58 to 2.72 % on layers of published models; tests/select/test_select.py
# compares with weights that are normally distributed.
_E4M3_TWICE = 0.0266
# Rounding to a type whose numbers from 1 to 2 are `step` apart: step / sqrt(12) of a number that is
# log-uniform there, whose mean of 1 / x^2 is 3 / (8 ln 2).
_STEPS = {"bf16": 2**-7, "fp16": 2**-10, "fp32": 2**-23}
_LOG_UNIFORM = (3 / (8 * 0.6931) / 12) ** 0.5


@cache
def estimated(form: str, dtype: str) -> Requant:
    """Of a weight that is not at hand. dtype: of activations, for scales in their type."""
    if form == Scales.ACTIVATION:
        return Requant(_STEPS[dtype] * _LOG_UNIFORM, is_estimated=True)
    return Requant(_E4M3_TWICE, is_estimated=True)
