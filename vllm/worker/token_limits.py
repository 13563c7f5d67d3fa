"""Tokens that a request may not have next: all but those it names, or the ends of bad words."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor


def mask_of(allowed: Sequence[int], vocab_size: int) -> Tensor:
    """Bits of the tokens `allowed`, int32 [ceil(vocab_size / 32)], as xgrammar's bitmasks."""
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    is_allowed[np.asarray(allowed)] = True
    return torch.from_numpy(np.packbits(is_allowed, bitorder="little").view(np.int32))


def both(grammar: Tensor | None, mask: Tensor) -> Tensor:
    """Tokens that both allow; those of the grammar where there are none."""
    if grammar is None:
        return mask
    joint = grammar & mask
    return joint if joint.any() else grammar


def banned_next(bad_words: Iterable[Sequence[int]], output: np.ndarray) -> list[int]:
    """Last tokens of the words whose other tokens the output [n] ends with."""
    longest = max(map(len, bad_words), default=1) - 1
    end = tuple(output[len(output) - min(longest, len(output)) :].tolist())
    return [
        word[-1]
        for word in bad_words
        if len(word) <= len(end) + 1 and end[len(end) + 1 - len(word) :] == tuple(word[:-1])
    ]
