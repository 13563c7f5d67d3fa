"""Every weight format: the built-in ones, and those of other packages.

A format is one file in this folder and a name in the list below, or a FormatDescription that an
installed package offers as an entry point of the group `vllm.formats`.
"""

from functools import cache

from vllm.errors import ConfigError, did_you_mean
from vllm.formats import (
    fp8_block,
    fp8_channel,
    fp8_tensor,
    int4,
    int8,
    mxfp4,
    mxfp8,
    nvfp4,
    plain,
)
from vllm.formats.description import FormatDescription
from vllm.utils.entry_points import extensions

ENTRY_POINTS = "vllm.formats"
_BUILTIN = (
    *plain.FORMATS,
    fp8_block.FORMAT,
    fp8_tensor.FORMAT,
    fp8_channel.FORMAT,
    mxfp8.FORMAT,
    nvfp4.FORMAT,
    int4.FORMAT,
    int8.CHANNEL,
    int8.GROUP,
    mxfp4.FORMAT,
)


@cache
def formats() -> dict[str, FormatDescription]:
    """By kind."""
    return {known.kind: known for known in (*_BUILTIN, *extensions(ENTRY_POINTS).values())}


def description(kind: str) -> FormatDescription:
    """ConfigError for a kind that is unknown."""
    if kind not in formats():
        raise unknown(kind)
    return formats()[kind]


def unknown(text: str) -> ConfigError:
    examples = ", ".join(known.example for known in formats().values())
    hint = did_you_mean(text, formats())
    return ConfigError(f"unknown weight format {text!r}: it takes {examples}{hint}")


def kinds(element: str) -> frozenset[str]:
    """Those whose codes are of one type, such as fp8."""
    return frozenset(kind for kind, known in formats().items() if known.element == element)


def quantizable() -> dict[str, FormatDescription]:
    """What `vllm quantize` writes, by the name it takes."""
    return {known.quantize.name: known for known in formats().values() if known.quantize}
