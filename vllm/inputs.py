"""What a prompt may be. Other multi_modal_data than None is refused: models here read text."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text."""

    prompt: str
    multi_modal_data: NotRequired[Any]


class TokensPrompt(TypedDict):
    """Token ids. prompt: the text they come from, for the output alone."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Any]


SingletonPrompt = str | TextPrompt | TokensPrompt
PromptType = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}."""
