"""The comparison of attention and of cache writes finds the mistakes that kernels make."""

from dataclasses import replace

import pytest
import torch

from tests.models.test_rotated_writes import rotary_into_cache
from vllm.kernels.backends import cpu
from vllm.kernels.cache_numerics import attention_comparison, write_comparison
from vllm.kernels.numerics import MAX_ERROR, WrongResultError, max_error
from vllm.kernels.select.problem import AttentionProblem, KVQuantProblem
from vllm.ops import cpu_ops

CPU = torch.device("cpu")
ATTENTION = AttentionProblem(6, 2, 64, "fp32", "bf16")
WRITING = KVQuantProblem(2, 64, "fp32", "bf16")


@pytest.fixture(autouse=True)
def one_thread():
    """As the engine compares."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ("cpu", "torch"))
@pytest.mark.parametrize("dtype", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("cache", ("fp32", "bf16", "fp16", "fp8"))
def test_kernels_of_the_cpu_are_right(cache, dtype, backend):
    for heads in ((6, 2, 64), (7, 1, 128), (3, 3, 16)):
        for window, block_size in ((0, 16), (70, 32), (5, 48)):
            problem = AttentionProblem(*heads, cache, dtype, window)
            assert attention_comparison(problem, backend, block_size, CPU)() < MAX_ERROR[dtype] / 2
        capped = replace(
            problem, sliding_window=70, variant="logit softcapping", scale=0.4, softcap=3.0
        )
        assert attention_comparison(capped, backend, 16, CPU)() < MAX_ERROR[dtype] / 2
        sinks = AttentionProblem(*heads, cache, dtype, 70, "sinks")
        assert attention_comparison(sinks, backend, 16, CPU)() < MAX_ERROR[dtype] / 2
        for chunk, block_size in ((70, 16), (32, 32)):
            chunks = AttentionProblem(*heads, cache, dtype, chunk, "chunks")
            assert attention_comparison(chunks, backend, block_size, CPU)() < MAX_ERROR[dtype] / 2
        writing = KVQuantProblem(*heads[1:], cache, dtype)
        assert write_comparison(writing, backend, 16, CPU)() == 0


# ---------------------------------------------------------------- attention

Q, K, V, TABLES, STARTS, LENS, SCALE, WINDOW, K_SCALE, V_SCALE = range(10)


def changed(place: int, change):
    """Attention with another argument than what it is given."""

    def attend(*given):
        given = [*given]
        given[place] = change(given[place])
        return cpu_ops.paged_attention(*given)

    return attend


def sees_a_later_key(*given):
    """Each query the key of the next position, which is there except for the last one."""
    q, starts, lens = given[Q], given[STARTS].clone(), given[LENS]
    out = cpu_ops.paged_attention(*given)
    for r in range(len(lens)):
        rows = slice(int(starts[r]), int(starts[r + 1]) - 1)
        if rows.stop > rows.start:
            shifted = [*given]
            shifted[Q] = torch.cat([q[rows.start : rows.start + 1], q[rows]])
            shifted[STARTS] = torch.tensor([0, len(shifted[Q])], dtype=torch.int32)
            shifted[TABLES], shifted[LENS] = given[TABLES][r : r + 1], lens[r : r + 1]
            out[rows] = cpu_ops.paged_attention(*shifted)[1:]
    return out


def wrong_for_one_token_alone(*given):
    out = cpu_ops.paged_attention(*given)
    lengths = given[STARTS].diff()
    return torch.where((lengths == 1).repeat_interleave(lengths)[:, None, None], out * 1.03, out)


def swaps_heads(*given):
    return cpu_ops.paged_attention(*given).roll(1, 1)


MISTAKES = {
    "a result that is 3 % too small": (
        lambda *given: cpu_ops.paged_attention(*given) * 0.97,
        "relative error (3.00|2.99)e-02 for 37 new tokens of 101, more than 8e-03",
    ),
    "a softmax that is 3 % too sharp": (changed(SCALE, lambda s: s * 1.03), "relative error"),
    "a key of the future": (sees_a_later_key, "relative error"),
    "a key behind the last": (
        changed(LENS, lambda lens: lens + 1),
        "NaN or infinity .* with NaN in the unused places of pages",
    ),
    "the first key left out": (changed(TABLES, lambda t: t[:, 1:].contiguous()), "NaN|relative"),
    "heads in another order": (swaps_heads, "relative error"),
    "decoding alone": (wrong_for_one_token_alone, "relative error 3.* for 1 new tokens of 1"),
    "a row too few": (lambda *given: cpu_ops.paged_attention(*given)[1:], "tokens has 72 rows"),
}
FP8_MISTAKES = {
    "keys without their scale": changed(K_SCALE, lambda _: 1.0),
    "values without their scale": changed(V_SCALE, lambda _: 1.0),
}
WINDOW_MISTAKES = {
    "no window": changed(WINDOW, lambda _: 0),
    "a window that is one key too long": changed(WINDOW, lambda size: size + 1),
    "a window that is one key too short": changed(WINDOW, lambda size: size - 1),
}
CASES = [
    *((name, ATTENTION, attend, text) for name, (attend, text) in MISTAKES.items()),
    *((name, replace(ATTENTION, format="fp8"), a, "relative") for name, a in FP8_MISTAKES.items()),
    *(
        (name, replace(ATTENTION, sliding_window=70), attend, "relative error")
        for name, attend in WINDOW_MISTAKES.items()
    ),
]


@pytest.mark.parametrize(
    ("problem", "attend", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_mistake_of_attention_is_found(problem, attend, text, monkeypatch):
    make = cpu.attention

    def wrong(*given):
        kernel = make(*given)
        kernel._attend = attend
        return kernel

    monkeypatch.setattr(cpu, "attention", wrong)
    with pytest.raises(WrongResultError, match=text):
        attention_comparison(problem, "cpu", 16, CPU)()


def test_a_window_too_large_for_a_small_problem_is_no_window():
    wide = replace(ATTENTION, sliding_window=1 << 20)
    assert attention_comparison(wide, "cpu", 16, CPU)() < 3e-3


# ---------------------------------------------------------------- writes


def written(problem, write) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "kv_quant", lambda _: write)
        write_comparison(problem, "cpu", 16, CPU)()


def free_slot(slots) -> int:
    return min({*range(64)} - {*slots.tolist()})


def overflows(k, v, k_cache, v_cache, slots, k_scale, v_scale) -> None:
    """Values that E4M3 cannot hold become NaN."""
    cpu_ops.reshape_and_cache(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    bits = k_cache.view(torch.int8)
    bits[(bits & 0x7F) == 0x7E] = 0x7F


WRITES = {
    "a value that is 3 % too large": (
        lambda k, v, *places: cpu_ops.reshape_and_cache(k, v * 1.03, *places),
        "relative error 3.* for stored V",
    ),
    "keys and values exchanged": (
        lambda k, v, *places: cpu_ops.reshape_and_cache(v, k, *places),
        "relative error .* for stored K",
    ),
    "a token that has no place": (
        lambda k, v, kc, vc, slots, *scales: cpu_ops.reshape_and_cache(
            k, v, kc, vc, torch.where(slots < 0, free_slot(slots), slots), *scales
        ),
        "K was written to places of no token",
    ),
    "a token left out": (
        lambda k, v, kc, vc, slots, *scales: cpu_ops.reshape_and_cache(
            k[:-1], v[:-1], kc, vc, slots[:-1], *scales
        ),
        "NaN or infinity",
    ),
}
FP8_WRITES = {
    "no saturation": (overflows, "NaN or infinity .* for stored K"),
    "keys without their scale": (
        lambda *given: cpu_ops.reshape_and_cache(*given[:5], 1.0, given[6]),
        "relative error .* for stored K",
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_mistake_of_a_write_is_found(name):
    write, text = WRITES[name]
    with pytest.raises(WrongResultError, match=text):
        written(WRITING, write)


@pytest.mark.parametrize("name", FP8_WRITES)
def test_a_mistake_of_a_write_in_fp8_is_found(name):
    write, text = FP8_WRITES[name]
    with pytest.raises(WrongResultError, match=text):
        written(replace(WRITING, format="fp8"), write)


def test_a_wrong_value_in_fp8_is_found_though_codes_may_move():
    wide = replace(WRITING, format="fp8", dtype="fp32")
    with pytest.raises(WrongResultError, match="for stored V"):
        written(wide, lambda k, v, *places: cpu_ops.reshape_and_cache(k, v * 1.03, *places))
    # Each code a step of 2^-3 in 16 would be too many.
    written(wide, lambda k, v, *places: cpu_ops.reshape_and_cache(k, v * (1 + 1e-6), *places))


@pytest.mark.parametrize("cache", ("bf16", "fp8"))
def test_what_rotates_is_compared_after_the_rotation(cache, monkeypatch):
    """With the CPU's operations one after the other: the kernel is a GPU's."""
    problem = KVQuantProblem(2, 64, cache, "bf16")
    monkeypatch.setattr(cpu_ops, "rotary_into_cache", rotary_into_cache, raising=False)
    assert write_comparison(problem, "rotary", 16, CPU)() < max_error(problem) / 2

    def without_norms(positions, q, k, target, cos_sin, norms=None, eps=0.0):
        rotary_into_cache(positions, q, k, target, cos_sin)

    def without_query(positions, q, k, *others):
        rotary_into_cache(positions, q.clone(), k, *others)

    def one_further(positions, *others):
        rotary_into_cache(positions + 1, *others)

    for wrong in (without_norms, without_query, one_further):
        monkeypatch.setattr(cpu_ops, "rotary_into_cache", wrong)
        with pytest.raises(WrongResultError, match=r"relative error .* for q"):
            write_comparison(problem, "rotary", 16, CPU)()
