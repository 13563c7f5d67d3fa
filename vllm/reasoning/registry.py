"""The formats of reasoning by name: the built-in ones, and those of packages with the entry point
`vllm.reasoning_parsers`, whose value is a ReasoningFormat."""

from vllm.errors import ConfigError, did_you_mean
from vllm.reasoning.parser import ReasoningFormat
from vllm.utils.entry_points import extensions

ENTRY_POINTS = "vllm.reasoning_parsers"
HARMONY = "gpt_oss"
"""Whose messages are read by the parser of tool calls of the same name."""

_BUILT_IN = (
    ReasoningFormat("qwen3"),
    ReasoningFormat("deepseek_r1", is_open=True),
    ReasoningFormat("deepseek_v3"),
    ReasoningFormat("glm45"),
    ReasoningFormat("minimax_m2", is_open=True),
    ReasoningFormat("kimi_k2"),
    ReasoningFormat("mistral", ("[THINK]",), "[/THINK]", keeps_special_tokens=True),
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        "Here is my response:",
    ),
    ReasoningFormat(HARMONY, ("<|channel|>analysis<|message|>",), "<|end|>",
                    keeps_special_tokens=True),
)  # fmt: skip


def known() -> dict[str, ReasoningFormat]:
    """By name. ConfigError names a package whose entry point is none."""
    found = {form.name: form for form in _BUILT_IN}
    for name, form in extensions(ENTRY_POINTS).items():
        if not isinstance(form, ReasoningFormat):
            raise ConfigError(
                f"entry point {name!r} of {ENTRY_POINTS} gives {form!r}: it takes a ReasoningFormat"
            )
        found[name] = form
    return found


def reasoning_format(name: str) -> ReasoningFormat:
    """ConfigError for a name that is not known."""
    formats = known()
    if name not in formats:
        raise ConfigError(
            f"--reasoning-parser {name!r} is unknown: it takes {', '.join(formats)}"
            f"{did_you_mean(name, formats)}"
        )
    return formats[name]
