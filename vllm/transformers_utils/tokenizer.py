"""The older import path of `vllm.tokenizers`."""

from vllm.tokenizers import AnyTokenizer, get_tokenizer

__all__ = ["AnyTokenizer", "get_tokenizer"]
