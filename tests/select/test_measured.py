"""What was measured fastest goes ahead of the default order, and behind everything else."""

from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import ask, linear, moe
from selection_strategies import devices, excluding, linears, models, some_libs

from vllm.kernels.spec import Measured

LISTED = "qwen3_5_moe_text"
RESULT = "benchmarks/results/example.json"
SPLIT = Measured(((64, "triton"), (None, "cutlass")), RESULT)
_BACKENDS = st.sampled_from(["deep_gemm", "cutlass", "flashinfer-cutlass", "triton", "marlin"])


def winner(backend: str) -> Measured:
    return Measured(((None, backend),), RESULT)


@st.composite
def measurements(draw) -> Measured:
    backends = draw(st.lists(_BACKENDS, min_size=1, max_size=3, unique=True))
    limits = [16, 64, 256][: len(backends) - 1]
    return Measured(tuple(zip([*limits, None], backends)), RESULT)


def split_name(measured: Measured) -> str:
    return "|".join(name if limit is None else f"{name}<={limit}" for limit, name in measured.parts)


def test_the_winner_is_chosen_by_rank_6_with_its_evidence():
    decision = ask(linear(), "90", measured=winner("triton"))
    assert decision.chosen == "triton"
    assert decision.origin.rank == 6 and RESULT in decision.origin.text
    assert decision.candidates[0].backend == "triton"


def test_a_split_is_one_candidate_with_its_thresholds():
    decision = ask(linear(), "90", measured=SPLIT)
    assert decision.chosen == "triton<=64|cutlass" and decision.origin.rank == 6
    assert decision.winner.parts == SPLIT.parts
    assert decision.candidates[1].backend == "deep_gemm"  # the default order follows


def test_a_winner_that_cannot_run_is_passed_over_with_its_reasons():
    decision = ask(linear(n=4080), "90", measured=winner("deep_gemm"))
    assert decision.chosen == "cutlass" and decision.origin.rank == 7
    assert [reason.why for reason in decision.candidates[0].reasons] == ["shape"]


def test_a_split_of_which_one_cannot_run_is_passed_over_with_the_reasons_of_that_one():
    decision = ask(linear(), "90", "no native", measured=SPLIT)
    assert decision.chosen == "deep_gemm" and decision.origin.rank == 7
    split = decision.candidates[0]
    assert [reason.why for reason in split.reasons] == ["library"]
    assert split.reasons[0].text.startswith("cutlass: ")


def test_exclusions_beat_measurements():
    for wish, model, rank in (("-", LISTED, 5), ("VLLM_USE_DEEP_GEMM=0", "llama", 3)):
        decision = ask(linear(), "100", "all", wish, model, measured=winner("deep_gemm"))
        assert decision.chosen == "cutlass" and decision.origin.rank == rank


def test_an_exclusion_that_breaks_a_split_decides():
    split = Measured(((64, "deep_gemm"), (None, "flashinfer-trtllm")), RESULT)
    decision = ask(moe(), "100", "all", "-", LISTED, measured=split)
    assert decision.chosen == "flashinfer-trtllm" and decision.origin.rank == 5


def test_a_forced_backend_beats_measurements():
    decision = ask(linear(), "90", "all", "--linear-backend marlin", measured=SPLIT)
    assert decision.chosen == "marlin" and decision.origin.rank == 2
    assert [reason.why for reason in decision.candidates[0].reasons] == ["policy"]


def test_a_measurement_of_a_backend_that_is_gone_changes_nothing():
    gone = Measured(((64, "retired"), (None, "deep_gemm")), RESULT)
    for device in ("90", "100"):
        assert ask(linear(), device, measured=gone) == ask(linear(), device)


@settings(max_examples=300, deadline=None)
@given(linears(), devices, some_libs(), models, excluding, measurements())
def test_a_measurement_changes_the_order_and_nothing_else(
    problem, device, libs, model, wish, measured
):
    usual = ask(problem, device, libs, wish, model)
    decision = ask(problem, device, libs, wish, model, measured=measured)
    usual_candidates = {c.backend: c for c in usual.candidates}
    for candidate in decision.candidates:
        if not candidate.parts:
            assert candidate == usual_candidates[candidate.backend]
    measured_one = decision.candidates[0]
    assert measured_one.backend == split_name(measured)
    against = [r for _, name in measured.parts for r in usual_candidates[name].reasons]
    assert [r.why for r in measured_one.reasons] == [r.why for r in against]
    if against:
        assert decision.chosen == usual.chosen
        assert decision.origin.rank != 6
    else:
        assert decision.chosen == measured_one.backend
