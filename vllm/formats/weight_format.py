"""How weights are stored and how activations are quantised, as printable values."""

import re
from dataclasses import dataclass
from enum import StrEnum

from vllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight is stored: element type, and the granularity of its scales.

    `str()` is the short name used everywhere: `bf16`, `fp8-tensor`, `fp8-channel`,
    `fp8-block[128x128]` (rows x columns of a [N, K] weight that share one scale), `nvfp4` (E2M1
    with an E4M3 scale per 16 and a global one), `int4-group[128]` (a scale per row and group).
    """

    element: str
    scale: str = "none"
    block: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> str:
        """The name without sizes: what a kernel declares to support."""
        return self.element if self.scale == "none" else f"{self.element}-{self.scale}"

    @property
    def is_quantized(self) -> bool:
        return self.element not in ("fp32", "bf16", "fp16")

    @classmethod
    def parse(cls, text: str) -> "WeightFormat":
        if match := re.fullmatch(r"fp8-block\[([1-9]\d{0,5})x([1-9]\d{0,5})\]", text):
            return cls("fp8", "block", (int(match[1]), int(match[2])))
        if match := re.fullmatch(r"int4-group\[([1-9]\d{0,5})\]", text):
            return cls("int4", "group", (1, int(match[1])))
        if text in ("fp8-tensor", "fp8-channel"):
            return cls("fp8", text.removeprefix("fp8-"))
        if text in _PLAIN:
            return cls(text)
        if text == "fp8-block":
            return cls("fp8", "block", (128, 128))
        raise ConfigError(
            f"unknown weight format {text!r}: it takes {', '.join(_PLAIN)}, fp8-tensor, "
            f"fp8-channel, fp8-block[128x128] (fp8-block for short), int4-group[128]"
        )

    def __str__(self) -> str:
        if self.scale == "block":
            return f"{self.kind}[{self.block[0]}x{self.block[1]}]"
        return f"{self.kind}[{self.block[1]}]" if self.scale == "group" else self.kind


_PLAIN = ("fp32", "bf16", "fp16", "nvfp4")


class ActScheme(StrEnum):
    """How a kernel quantises its activations; NONE multiplies them as they are (weight-only)."""

    NONE = "none"
    STATIC_TENSOR = "static-tensor"
    DYNAMIC_TENSOR = "dynamic-tensor"
    DYNAMIC_TOKEN = "dynamic-token"
    DYNAMIC_GROUP128 = "dynamic-group128"
    NVFP4_GROUP16 = "nvfp4-group16"
