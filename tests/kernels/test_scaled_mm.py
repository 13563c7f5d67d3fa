"""FP8 layers with scales per tensor and channel, as `scaled_mm` computes them without a GPU."""

import pytest
from fp8_linear_cases import SCHEMES, check_plain_scales


@pytest.mark.parametrize("m", (0, 1, 33))
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("scale", ["tensor", "channel"])
@pytest.mark.parametrize("parts", [(256,), (320, 64, 64)])
def test_tensors_and_channels_are_computed_as_the_format_says(m, scheme, scale, parts):
    check_plain_scales(m, scheme, scale, parts, "cpu")
