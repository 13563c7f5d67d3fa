"""What one layer keeps of a request between steps: the kinds of KV cache."""

import math

from vllm.architectures.sharding import Dim
from vllm.utils.dataclasses import dataclass


@dataclass(frozen=True)
class FullAttentionSpec:
    """Keys and values of every token, in pages."""

    kv_heads: Dim
    head_dim: int

    def token_bytes(self, item_size: int, ranks: int) -> int:
        """Of one token on one tensor-parallel rank, in numbers of item_size bytes."""
        return 2 * self.kv_heads.per_rank(ranks) * self.head_dim * item_size


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values, of which each query sees the last `window`, its own included."""

    window: int


MLA = "MLA"
"""The variant of attention that reads latents."""


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """One latent for each token, of head_dim numbers, whose first value_dim are the values."""

    value_dim: int

    def token_bytes(self, item_size: int, ranks: int) -> int:
        return self.head_dim * item_size


@dataclass(frozen=True)
class RecurrentStateSpec:
    """A state of one size for each request, whatever its length.

    channels: of the causal convolution of `taps` taps before the recurrence; its last taps - 1
    inputs are kept. The state is float32 [heads, key_dim, value_dim].
    """

    channels: tuple[Dim, ...]
    taps: int
    heads: Dim
    key_dim: int
    value_dim: int

    def shapes(self, ranks: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Per rank and request: of the kept inputs and of the state."""
        num_channels = sum(dim.per_rank(ranks) * dim.unit for dim in self.channels)
        state = (self.heads.per_rank(ranks), self.key_dim, self.value_dim)
        return (self.taps - 1, num_channels), state

    def request_bytes(self, item_size: int, ranks: int) -> int:
        """Of one request on one rank; item_size: of activations."""
        kept, state = self.shapes(ranks)
        return math.prod(kept) * item_size + 4 * math.prod(state)


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec | MLAAttentionSpec | RecurrentStateSpec
"""None stands for a layer that keeps nothing."""
