"""Layers grouped by what they keep of a request, so that window layers keep their window alone.

All groups allocate from one pool of blocks of equal bytes, whichever layers they are of. To that
end layers share memory: a slot holds a layer or several of every group, and a block is a piece of
all slots. A group with fewer layers in a slot, or smaller ones, puts more tokens into its part of a
block: `parts` times as many as a block of the cache has.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import lcm

from vllm.architectures.kv_cache import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from vllm.utils.dataclasses import dataclass
from vllm.utils.math_utils import cdiv, round_up

Kind = tuple[int, int]
"""Of a layer: its window, 0 for none, and its bytes of a token in numbers of one byte."""


@dataclass(frozen=True)
class CacheGroup:
    """kinds: of the layers that share a block table. parts: blocks of the cache that a block of the
    pool holds of each of them. window: tokens that a query sees, its own included; 0 for all."""

    kinds: frozenset[Kind]
    parts: int = 1
    window: int = 0


_MOST_LOST = 1.1
"""Sharing that would cost short requests more, for sizes that do not divide, is not worth it."""

WHOLE = (CacheGroup(frozenset()),)
"""Of a model whose layers all keep every token, whatever their kinds."""


def kind_of(cache: FullAttentionSpec, ranks: int) -> Kind:
    window = cache.window if isinstance(cache, SlidingWindowSpec) else 0
    return window, cache.token_bytes(1, ranks)


def cache_groups(caches: Iterable[KVCacheSpec | None], ranks: int) -> tuple[CacheGroup, ...]:
    """Of the layers of a whole model on `ranks` tensor-parallel ranks: layers without a window
    first. `WHOLE` where there is no window, or sharing wastes memory; and beside latents or
    recurrent states, whose prefix cache knows one block table."""
    kept = [cache for cache in caches if cache is not None]
    if any(isinstance(cache, MLAAttentionSpec | RecurrentStateSpec) for cache in kept):
        return WHOLE
    counts = Counter(kind_of(c, ranks) for c in kept if isinstance(c, FullAttentionSpec))
    if not any(window for window, _ in counts):
        return WHOLE
    num_slots, size = best_slots(counts, dict.fromkeys(counts))
    groups = tuple(
        CacheGroup(frozenset({kind}), size // (cdiv(counts[kind], num_slots) * kind[1]), kind[0])
        for kind in sorted(counts)
    )
    taken = num_slots * sum(size / group.parts for group in groups)
    is_worth_it = taken <= _MOST_LOST * sum(kind[1] * count for kind, count in counts.items())
    return groups if is_worth_it else WHOLE


def best_slots(counts: Mapping[Kind, int], parts: Mapping[Kind, int | None]) -> tuple[int, int]:
    """How many slots, and the bytes of a token in one. parts: of each kind, None to be chosen: so
    that a token which all layers keep takes the fewest bytes. Of equals the most slots: blocks of a
    layer lie closer together."""

    def cost(num_slots: int) -> tuple[float, int]:
        size = slot_bytes(counts, parts, num_slots)
        own = ((cdiv(n, num_slots) * kind[1], parts[kind]) for kind, n in counts.items())
        return num_slots * sum(size / (given or size // each) for each, given in own), -num_slots

    most = (min if None in parts.values() else max)(counts.values())
    num_slots = min(range(1, most + 1), key=cost)
    return num_slots, slot_bytes(counts, parts, num_slots)


def slot_bytes(counts: Mapping[Kind, int], parts: Mapping[Kind, int | None], num_slots: int) -> int:
    """A multiple of the bytes of every kind, so that its blocks lie at whole places."""
    largest = max(
        (parts[kind] or 1) * cdiv(count, num_slots) * kind[1] for kind, count in counts.items()
    )
    return round_up(largest, lcm(*(size for _, size in counts)))
