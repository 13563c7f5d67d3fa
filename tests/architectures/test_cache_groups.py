"""How layers share the memory of the KV cache."""

from collections import Counter
from math import lcm
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.architectures.cache_groups import WHOLE, best_slots, cache_groups, kind_of
from vllm.architectures.kv_cache import (
    FullAttentionSpec,
    MLAAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from vllm.architectures.registry import builtin_config, describe
from vllm.architectures.sharding import Dim
from vllm.core.kv_blocks import BlockNeeds
from vllm.utils.math_utils import cdiv

BLOCK, STEP = 16, 8192


def full(heads: int = 8, dim: int = 128) -> FullAttentionSpec:
    return FullAttentionSpec(Dim("kv heads", heads, dim, "repeated"), dim)


def window(size: int, heads: int = 8, dim: int = 128) -> SlidingWindowSpec:
    return SlidingWindowSpec(Dim("kv heads", heads, dim, "repeated"), dim, size)


PUBLISHED = {
    "Gemma 3 27B": [full(16)] * 10 + [window(1024, 16)] * 52,
    "Gemma 3 1B": [full(1, 256)] * 4 + [window(512, 1, 256)] * 22,
    "Gemma 4 31B": [full(4, 512)] * 10 + [window(1024, 16, 256)] * 50,
    "MiMo-V2-Flash": [full(4, 192)] * 9 + [window(128, 8, 192)] * 39,
    "Gemma 2 9B": [full(8, 256)] * 21 + [window(4096, 8, 256)] * 21,
    "one of many": [full()] * 31 + [window(512)],
}


def layers_of(name: str) -> list:
    if name in PUBLISHED:
        return PUBLISHED[name]
    decoder = describe(builtin_config(name))
    return [layer.mixer.cache for layer in decoder.layers]


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", [*PUBLISHED, "gpt-oss-20b", "gpt-oss-120b"])
def test_published_models_lose_little_memory_to_sharing(name, ranks):
    """For short requests, whose windows hold all: what 64 tokens of all layers take."""
    caches = layers_of(name)
    groups = cache_groups(caches, ranks)
    counts = Counter(kind_of(cache, ranks) for cache in caches)
    num_slots, size = best_slots(counts, dict.fromkeys(counts))
    kinds = [kind for group in groups for kind in group.kinds]
    assert [group.window for group in groups] == sorted(group.window for group in groups)
    whole = sum(size * count for (_, size), count in counts.items())
    shared = sum(num_slots * size / group.parts for group in groups)
    assert set(kinds) == set(counts) and whole <= shared < 1.06 * whole


@pytest.mark.parametrize("name, row", [
    ("gpt-oss-20b", "gpt-oss-20b and -120b"),
    ("gpt-oss-120b", "gpt-oss-20b and -120b"),
    *((name, name) for name in ("Gemma 3 27B", "Gemma 4 31B", "MiMo-V2-Flash")),
])  # fmt: skip
def test_the_documentation_says_how_many_requests_fit_in_the_same_bytes(name, row):
    caches = layers_of(name)
    needs = BlockNeeds(BLOCK, cache_groups(caches, 1), STEP)
    counts = Counter(kind_of(cache, 1) for cache in caches)
    num_slots, size = best_slots(counts, dict.fromkeys(counts))
    whole = sum(each * count for (_, each), count in counts.items())
    blocks = {n: needs.resting(n) for n in (1024, 8192, 32768, 131072)}
    found = [f"{whole * n / (count * num_slots * size * BLOCK):.2f}" for n, count in blocks.items()]
    documented = (Path(__file__).parents[2] / "docs/models.md").read_text()
    assert f"| {row} | {' | '.join(found)} |" in documented


@given(
    counts=st.dictionaries(
        st.tuples(st.integers(0, 3), st.sampled_from([2, 4, 6, 16])),
        st.integers(1, 70), min_size=1, max_size=3,
    ),
    parts=st.lists(st.integers(1, 9), min_size=3, max_size=3),
)  # fmt: skip
def test_blocks_of_every_kind_lie_at_whole_places_of_a_slot_that_holds_them(counts, parts):
    for given_parts in (dict.fromkeys(counts), dict(zip(counts, parts))):
        num_slots, size = best_slots(counts, given_parts)
        assert size % lcm(*(each for _, each in counts)) == 0
        for kind, count in counts.items():
            in_slot = cdiv(count, num_slots)
            own = given_parts[kind] or size // (in_slot * kind[1])
            assert own >= 1 and own * in_slot * kind[1] <= size


def test_models_without_windows_or_with_other_caches_have_one_group():
    state = RecurrentStateSpec((), 4, Dim("heads", 4), 16, 16)
    assert cache_groups([full(), full(4)], 1) == WHOLE == cache_groups([], 1)
    assert cache_groups([full(), window(64), state], 1) == WHOLE
    assert cache_groups([MLAAttentionSpec(Dim("heads", 1), 576, 512), window(64)], 1) == WHOLE
    odd = [full(2, 40), window(20, 6, 16), window(20, 6, 16)]
    assert cache_groups(odd, 1) == WHOLE, "18 % more for short requests"
    (alone,) = cache_groups([window(64), window(64), None], 1)
    assert (alone.window, alone.parts) == (64, 1)


def test_the_longest_request_is_the_longest_that_fits():
    needs = BlockNeeds(BLOCK, cache_groups(PUBLISHED["Gemma 3 27B"], 1), STEP)
    for num_blocks in (3, 700, 1700, 5000):
        longest = needs.longest(num_blocks, 1 << 20)
        assert needs.of(longest) <= num_blocks < needs.of(longest + 1)
        assert needs.longest(num_blocks, 40) == min(longest, 40)
