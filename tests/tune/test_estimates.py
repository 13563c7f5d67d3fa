"""Estimates for sizes that nobody measured: their form, where there are none, and what they do."""

import json
from dataclasses import replace
from itertools import count, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import LIBS, ask, attention, linear, moe
from slowness import seconds_elsewhere

from vllm.errors import ConfigError
from vllm.kernels.evidence.cost_model import (
    FITTED,
    RANGES,
    dimensions,
    kind_of,
    path_of_fitted,
    read_fitted,
    terms,
    write_fitted,
)
from vllm.kernels.evidence.estimates import (
    REACH,
    Costs,
    estimate_of,
    find_fitted,
    sizes_of,
)
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.tables import TOKENS, Chip, find_tables, timings_of, user_folder
from vllm.kernels.report.question import GPUS
from vllm.kernels.select.grade import Grade
from vllm.machine import Device

H100, H200 = GPUS["h100"], GPUS["h200"]
OF_H100 = FITTED / H100.file_name


def is_beyond(estimated: Timings) -> bool:
    return "beyond the sizes that were measured" in estimated.source


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


def costs() -> Costs:
    return Costs(read_fitted(OF_H100))


COSTS = costs()
LINEARS = st.builds(
    lambda n, k, quantised: linear(n=128 * n, k=128 * k, comes_quantised=quantised),
    st.integers(1, 300), st.integers(1, 100), st.booleans(),
)  # fmt: skip
EXPERTS = st.builds(
    lambda experts, inner, hidden, top_k, ranks: moe(
        num_experts=experts, intermediate=128 * inner, hidden=512 * hidden, top_k=top_k,
        cut_experts=ranks,
    ),
    st.sampled_from((64, 128, 256, 512)), st.integers(1, 12), st.integers(2, 16),
    st.integers(2, 16), st.sampled_from((1, 2, 4, 8)),
)  # fmt: skip


# ---------------------------------------------------------------- the form


@settings(max_examples=150, deadline=None)
@given(st.one_of(LINEARS, EXPERTS))
def test_an_estimate_is_the_numbers_times_the_terms(problem):
    """So what decides is what the documentation of the model says."""
    estimated = estimate_of((COSTS,), problem)
    kind, sizes = kind_of(problem.size_key)[0], sizes_of(problem)
    cost = COSTS.fitted.kinds[kind]
    is_near = all(
        low <= REACH * size and size <= REACH * high
        for size, (low, high) in zip(dimensions(sizes), cost.measured)
    )
    assert (estimated is not None) == is_near
    if estimated is None:
        return
    quantised = problem.comes_quantised
    us, error = dict(estimated.us), dict(estimated.error)
    assert estimated.tokens == cost.tokens
    for kernel in cost.kernels:
        twins = [k for k in cost.kernels if k.backend == kernel.backend]
        if kernel.takes_quantised != (quantised and len(twins) > 1):
            continue
        for place, m in enumerate(cost.tokens):
            time = us[kernel.backend][place]
            if m > kernel.max_tokens:
                assert time is None
                continue
            one = kernel.ranges[sum(m > limit for limit in RANGES)]
            expected = sum(map(float.__mul__, one.numbers, terms(sizes, m, one.tile, 132)))
            if kernel.slow_wave and kernel.slow_wave.takes(m, sizes[0], 132):
                expected = kernel.slow_wave.launch + kernel.slow_wave.columns * sizes[1] / 1e3
            assert time == pytest.approx(expected, rel=1e-9)
            assert error[kernel.backend][place] == (
                one.error_beyond if is_beyond(estimated) else one.error
            )


def test_an_estimate_takes_quantised_input_where_the_layer_before_quantises():
    after_norm = dict(estimate_of((COSTS,), linear()).us)
    after_attention = dict(estimate_of((COSTS,), linear(comes_quantised=False)).us)
    assert after_norm.keys() == after_attention.keys()
    assert all(x < y for x, y in zip(after_norm["deep_gemm"], after_attention["deep_gemm"]))
    assert after_norm["marlin"] == after_attention["marlin"]  # which takes no quantised input


def test_more_ranks_read_the_weights_of_fewer_experts():
    whole, eighth = (estimate_of((COSTS,), moe(cut_experts=ranks)) for ranks in (1, 4))
    for (name, times), (other, shorter) in zip(whole.us, eighth.us):
        assert name == other and all(y <= x for x, y in zip(times, shorter))
    assert dict(eighth.us)["triton"][-1] < 0.5 * dict(whole.us)["triton"][-1]


def test_experts_that_ranks_share_by_their_columns_quantise_their_tokens_themselves():
    shared, small = (estimate_of((COSTS,), moe(intermediate=256, cut=cut)) for cut in (2, 1))
    assert shared.tokens == small.tokens
    for (name, longer), (other, times) in zip(shared.us, small.us):
        assert name == other and all(x <= y for x, y in zip(times, longer))
    assert dict(shared.us)["marlin"] == dict(small.us)["marlin"]  # which does not quantise them


def test_what_was_fitted_with_another_version_says_so():
    here = {"deep_gemm": "deep_gemm 9.9", "scaled_mm": "torch 1"}
    stale = estimate_of((COSTS,), linear(n=4224), here).stale
    assert stale == (("deep_gemm", "deep_gemm 0.1.3", "deep_gemm 9.9"),)
    assert not estimate_of((COSTS,), linear(n=4224), {"deep_gemm": "deep_gemm 0.1.3"}).stale


def test_the_source_names_the_file_and_the_chip():
    source = estimate_of((COSTS,), linear(n=4224)).source
    assert source == f"fitted/{H100.file_name} (NVIDIA H100 80GB HBM3, 2026-11-24)"


# ---------------------------------------------------------------- where there is none


@pytest.mark.parametrize(
    "problem",
    [
        attention(),
        linear("nvfp4"),
        linear(dtype="fp16"),
        linear(n=128 * 1000),  # more rows than four times the most measured
        linear(k=8),
        linear(n=4000 + 96, parts=(4000, 96)),  # partial scale blocks
        linear(n=192, cut_n=4),
        moe(layout="batched"),
        moe(activation="gelu"),
        moe(num_experts=2048),
        moe(intermediate=192, cut=4),
        moe(num_experts=3, top_k=2),
        moe(num_experts=128, cut_experts=64),  # 2 experts of a rank: 16 was the least
    ],
    ids=str,
)
def test_nothing_is_estimated(problem):
    assert estimate_of(find_fitted(H100), problem) is None


def test_beyond_all_that_was_measured_the_error_is_larger():
    inside, beyond = (estimate_of((COSTS,), linear(n=n)) for n in (8192, 49152))
    assert not is_beyond(inside) and is_beyond(beyond)
    for (name, errors), (other, larger) in zip(inside.error, beyond.error):
        assert name == other
        assert all(x <= y for x, y in zip(errors, larger)) and errors != larger


# ---------------------------------------------------------------- which file


def test_a_users_file_comes_before_that_of_the_build_and_another_chips_comes_last():
    assert [one.fitted.chip for one in find_fitted(H100)] == [H100, H200]
    assert [one.fitted.is_near for one in find_fitted(H100)] == [False, True]
    mine = replace(read_fitted(OF_H100), name="mine")
    write_fitted(path_of_fitted(user_folder() / H100.file_name), mine)
    assert [one.fitted.name for one in find_fitted(H100)][:1] == ["mine"]
    assert "mine" in estimate_of(find_fitted(H100), linear(n=4224)).source
    for chip in (Chip(H100.device, 78, 3352), Chip(Device.parse("sm_100"), 148)):
        assert find_fitted(chip) == ()


def test_estimates_of_another_chip_say_so_and_have_the_larger_error():
    (near,) = [one for one in find_fitted(H100) if one.fitted.is_near]
    estimated = near.estimate(linear(n=4224))
    assert "; another chip)" in estimated.source and not is_beyond(estimated)
    own = Costs(replace(near.fitted, is_near=False)).estimate(linear(n=4224))
    assert estimated.error != own.error
    for (_, errors), (_, larger) in zip(own.error, estimated.error):
        assert all(x <= y for x, y in zip(errors, larger))


# ---------------------------------------------------------------- broken files


def changed(tmp_path, change) -> str:
    content = json.loads(OF_H100.read_text())
    change(content)
    path = tmp_path / "fitted" / H100.file_name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def first_kernel(content):
    return next(iter(content["kinds"].values()))["kernels"][0]


@pytest.mark.parametrize("name", ["launch", "weights", "waves", "error", "error_beyond"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1e9, None, True, "fast"])
def test_a_number_that_is_none_or_absurd_is_refused(tmp_path, name, value):
    path = changed(tmp_path, lambda c: first_kernel(c)["ranges"][1].update({name: value}))
    with pytest.raises(ConfigError, match="vllm kernels fit") as error:
        read_fitted(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("kinds"),
        lambda c: c.update(device="sm_9"),
        lambda c: c.update(num_sms=None),
        lambda c: first_kernel(c).update(ranges=[]),
        lambda c: first_kernel(c)["ranges"].pop(0),
        lambda c: first_kernel(c)["ranges"][0].update(tile=[0, 64]),
        lambda c: first_kernel(c)["ranges"][0].update(tile=[64]),
        lambda c: first_kernel(c).update(max_tokens=1.5),
        lambda c: next(iter(c["kinds"].values())).update(tokens=[4, 2]),
        lambda c: next(iter(c["kinds"].values())).update(tokens=[]),
        lambda c: next(iter(c["kinds"].values())).update(measured=[[0, 4]]),
        lambda c: first_kernel(c)["ranges"][0].update(
            dict.fromkeys(("launch", "weights", "inputs", "outputs", "products", "waves"), 0)
        ),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_what_to_do(tmp_path, change):
    path = changed(tmp_path, change)
    with pytest.raises(ConfigError, match="vllm kernels fit") as error:
        find_fitted(H100)
    assert str(path) in str(error.value)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = changed(tmp_path, lambda c: None)
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ConfigError, match="delete it"):
        read_fitted(path)


# ---------------------------------------------------------------- what an estimate decides

ABLE = (("deep_gemm", None), ("cutlass", None), ("skinny", 16))


def estimated(us: dict[str, float], error: float) -> Timings:
    """The same for all tokens."""
    tokens = (1, 64, 8192)
    return Timings(
        "",
        tokens,
        tuple((name, (value,) * 3) for name, value in us.items()),
        grade=Grade.ESTIMATED,
        error=tuple((name, (error,) * 3) for name in us),
    )


@pytest.mark.parametrize(
    ("gain", "error", "chosen"),
    [(1.15, 0.1, "cutlass"), (1.15, 0.2, "deep_gemm"), (0.9, 0.0, "deep_gemm"),
     (1.15, 0.0, "cutlass")],
)  # fmt: skip
def test_the_default_order_yields_only_to_a_gain_that_exceeds_the_error(gain, error, chosen):
    one = estimated({"cutlass": 10.0, "deep_gemm": 10.0 * gain}, error)
    assert one.best_split(ABLE, (1, 8192)) == ((None, chosen),)
    as_measured = Timings("", one.tokens, one.us)
    assert as_measured.best_split(ABLE, (1, 8192)) == (
        (None, "cutlass" if gain > 1 else "deep_gemm"),
    )


def test_the_first_of_the_default_order_is_the_first_that_takes_any_number_of_tokens():
    one = estimated({"skinny": 10.0, "cutlass": 10.5}, 0.1)
    assert one.best_split(ABLE[1:], (1, 8192)) == ((None, "cutlass"),)


def test_the_selector_chooses_by_an_estimate_where_a_kernel_is_far_slower():
    """One wave of DeepGEMM's largest tiles for 2048 tokens; of a size that no table has."""
    problem = linear(n=1920, k=2048)
    assert timings_of(find_tables(H100), problem) is None
    found = estimate_of(find_fitted(H100), problem)
    us = dict(zip(found.tokens, dict(found.us)["deep_gemm"]))
    assert us[2048] > 2 * us[1024] and us[2048] > us[4096]
    decision = ask(problem, "90", timings=found)
    parts = decision.winner.parts
    chosen = next(name for limit, name in parts if limit is None or limit >= 2048)
    assert chosen == "cutlass"


# ---------------------------------------------------------------- time

# A model has a few dozen distinct problems.
MAX_MICROSECONDS = {"linear": 14, "moe": 18}
ALLOWANCE = 1.2


@pytest.mark.parametrize("family", MAX_MICROSECONDS)
def test_an_estimate_takes_microseconds(family):
    both, numbers = find_fitted(H100), count()
    made = {
        "linear": [linear(n=128 * n, k=128 * k) for n, k in product(range(8, 72), range(8, 24))],
        "moe": [moe(intermediate=128 * n, hidden=128 * k) for n, k in
                product(range(2, 12), range(8, 48))],
    }[family]  # fmt: skip

    def one() -> object:
        return estimate_of(both, made[next(numbers) % len(made)])

    assert one().grade is Grade.ESTIMATED
    took = seconds_elsewhere(one) * 1e6
    assert took <= MAX_MICROSECONDS[family] * ALLOWANCE, f"{took:.1f} us"


@pytest.mark.parametrize("problem", [linear(n=4224), moe(hidden=2176)], ids=["linear", "moe"])
def test_an_estimate_of_a_size_that_was_asked_for_before_takes_4_microseconds(problem):
    """Layers of one size are problems of their own where more is known of their weights."""
    both = find_fitted(H100)
    again = replace(problem, requant_error=0.01)
    assert estimate_of(both, again) == estimate_of(both, problem)
    assert estimate_of(both, again).us is estimate_of(both, problem).us
    took = seconds_elsewhere(lambda: estimate_of(both, again)) * 1e6
    assert took <= 4 * ALLOWANCE, f"{took:.1f} us"


def test_a_decision_by_an_estimate_is_remembered_like_one_by_measurements():
    problem = linear(n=4224)
    found = estimate_of(find_fitted(H100), problem)
    assert found.tokens == TOKENS and hash(found) == hash(replace(found))
    decisions = [ask(problem, "90", LIBS["all"], timings=replace(found)) for _ in range(2)]
    assert decisions[0] == decisions[1]
