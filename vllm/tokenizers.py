"""Loads a tokenizer by itself, without an engine."""

from typing import Any

from vllm.engine.tokenizer import get_tokenizer

AnyTokenizer = Any

__all__ = ["AnyTokenizer", "get_tokenizer"]
