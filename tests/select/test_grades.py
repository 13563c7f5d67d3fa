"""Grades of evidence, what `--require-evidence` keeps out, versions that are known to be bad."""

from dataclasses import replace

import pytest
from selection_cases import LIBS, ask, attention, linear, moe, parse_device, policy_of, timed, whys

from vllm.kernels import registry
from vllm.kernels.evidence.known import Known
from vllm.kernels.report import json_report
from vllm.kernels.report.html_report import html_page
from vllm.kernels.report.layer_groups import by_outcome
from vllm.kernels.report.question import chip_of, device_of, libs_of
from vllm.kernels.report.text_report import expected_line, outcome, page, table, why
from vllm.kernels.select.grade import Grade, least
from vllm.kernels.select.known_bad import KnownBad
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.select import select
from vllm.kernels.selection import Selection
from vllm.machine import Lib, Libs


def of(decision, backend):
    return next(c for c in decision.candidates if c.backend == backend)


def with_runs(problem, device, *, wishes="-", timings=None, **ran_on):
    """A decision where kernels of these backends ran: `deep_gemm="sm_90/fp8-block"`."""
    specs = [
        replace(spec, ran_on=frozenset({ran_on.get(spec.backend, "")}))
        for spec in registry.specs(problem.family)
    ]
    policy = policy_of(wishes, device=device)
    return select(problem, parse_device(device), LIBS["all"], policy, specs, "layer", timings)


def test_what_was_timed_is_measured_and_what_only_ran_is_run():
    ran = {"triton": "sm_90/fp8-block", "cutlass": "sm_90/nvfp4", "torch": "sm_100/fp8-block"}
    decision = with_runs(linear(), "90", timings=timed(deep_gemm=(1, 8192)), **ran)
    grades = {c.backend: c.grade for c in decision.candidates}
    assert grades["deep_gemm"] is Grade.MEASURED
    assert grades["triton"] is Grade.RUN
    # In another format, on another chip.
    assert grades["cutlass"] is grades["torch"] is Grade.COMPILED


def test_times_of_another_version_or_chip_are_estimates():
    timings = timed(deep_gemm=(1, 8192), cutlass=(1, 8))
    other_version = replace(timings, stale=(("deep_gemm", "0.1.3", "0.1.4"),))
    decision = ask(linear(), "90", timings=other_version)
    assert of(decision, "deep_gemm").grade is Grade.ESTIMATED
    assert of(decision, "cutlass").grade is Grade.MEASURED
    decision = ask(linear(), "90", timings=replace(timings, grade=Grade.ESTIMATED))
    assert of(decision, "cutlass").grade is Grade.ESTIMATED


def test_a_split_has_the_least_grade_of_its_parts():
    timings = timed(deep_gemm=(64, 8192), cutlass=(1, 8))
    decision = ask(linear(), "90", timings=replace(timings, stale=(("cutlass", "a", "b"),)))
    assert decision.winner.parts and decision.winner.grade is Grade.ESTIMATED
    assert least([Grade.MEASURED, Grade.RUN, Grade.IMPORTED]) is Grade.RUN


def test_evidence_that_is_required_keeps_out_what_never_ran_here():
    wishes = "--require-evidence run"
    decision = with_runs(linear(), "100", wishes=wishes, triton="sm_100/fp8-block")
    assert decision.chosen == "triton"
    # What is before it in the order could run, so the flag is what decided.
    assert decision.origin.text == "--require-evidence run"
    assert whys(decision, "cutlass") == ["policy"]
    assert "only compiled on sm_100" in table(decision)
    assert with_runs(linear(), "100", wishes="--require-evidence measured").chosen is None


def test_a_kernel_that_is_asked_for_is_refused_where_its_evidence_is_too_little():
    wishes = "--linear-backend cutlass --require-evidence run"
    assert with_runs(linear(), "100", wishes=wishes).chosen is None
    assert with_runs(linear(), "100", wishes=wishes, cutlass="sm_100/fp8-block").chosen == "cutlass"


@pytest.mark.parametrize("device", ["100", "103", "120", "121"])
@pytest.mark.parametrize("problem", [linear(), linear("nvfp4"), linear("bf16"), moe(), attention()])
def test_not_run_on_hardware_stands_beside_every_choice_on_blackwell(device, problem):
    decision = ask(problem, device)
    assert decision.winner.grade is Grade.COMPILED
    assert "not run on hardware" in outcome(decision)
    assert all(c.grade is Grade.COMPILED for c in decision.candidates)


# ---------------------------------------------------------------- known to be bad


def with_lib(*libs):
    return Libs.of([lib for lib in LIBS["deep_gemm"].libs if lib.name not in {x.name for x in libs}]
                   + list(libs))  # fmt: skip


@pytest.mark.parametrize(
    ("deep_gemm", "torch", "is_bad"),
    [("0.1.3", "2.11.0", False), ("0.1.5.post3", "2.11.0", True), ("0.2.1.post1", "2.11.0", True),
     ("0.2.1.post1", "2.12.0", False), ("0.2.3", "2.11.0", True), ("0.2.3", "2.13.0", False),
     ("2.6", "2.11.0", False), ("", "2.11.0", False)],
)  # fmt: skip
def test_versions_that_fail_beside_a_torch_serve_nothing_beside_it(deep_gemm, torch, is_bad):
    decision = ask(linear(), "90", with_lib(Lib("deep_gemm", deep_gemm), Lib("torch", torch)))
    assert ("library" in whys(decision, "deep_gemm")) == is_bad


@pytest.mark.parametrize(("device", "is_bad"), [("120", True), ("121", True), ("90", False)])
def test_a_revision_that_computes_garbage_on_a_chip_serves_nothing_there(device, is_bad):
    libs = with_lib(Lib("deep_gemm", "2.5.0", ("sm120", "8b1392b")))
    decision = ask(linear(), device, libs)
    assert ("library" in whys(decision, "deep_gemm")) == is_bad
    # Nor where it is asked for: what it computes is wrong, whoever asks.
    forced = ask(linear(), device, libs, "--linear-backend deep_gemm")
    assert forced.chosen == (None if is_bad else "deep_gemm")
    assert ("DeepGEMM/issues/417" in table(forced)) == is_bad


def test_every_known_bad_version_means_a_library_of_a_kernel_and_names_its_source():
    needed = {name for spec in registry.all_specs() for name, _ in spec.libs}
    for bad in registry.every_known_bad():
        assert isinstance(bad, KnownBad) and bad.lib in needed
        assert bad.source and bad.what and (bad.revision or bad.since or bad.until)


def test_every_comparison_that_is_on_record_is_of_a_kernel_that_exists():
    known = {f"{s.family}/{s.backend}/{f}" for s in registry.all_specs() for f in s.formats}
    for arch, kernels in registry.runs().items():
        assert set(kernels) <= known, arch
        family, backend, weight_format = kernels[0].split("/")
        (spec, *_) = [
            s for s in registry.specs(family) if s.backend == backend and weight_format in s.formats
        ]
        assert f"{arch}/{weight_format}" in spec.ran_on


# ---------------------------------------------------------------- times that are not our own


def known(problem, device):
    chip = chip_of(device, device_of(device))
    return Known.of(chip).evidence(problem)


def test_the_strongest_times_count():
    own, estimated = known(linear(), "h100"), known(linear(n=4224), "h100")
    assert own.grade is Grade.MEASURED and not own.error
    assert estimated.grade is Grade.ESTIMATED and dict(estimated.error)["deep_gemm"]
    # Nobody measured here: others did, two kernels that backends here call too.
    others = known(moe(), "b200")
    assert others.grade is Grade.IMPORTED and len(others.us) >= 2
    assert "AIConfigurator" in others.source
    # One kernel is no comparison.
    assert known(linear(), "b200") is None
    assert known(attention(), "h100") is None


def test_times_of_others_decide_where_nobody_measured_and_never_ran_here():
    times = known(moe(), "b200")
    decision = ask(moe(), "100", timings=times)
    assert decision.origin.text.startswith("imported: AIConfigurator")
    assert decision.winner.grade is Grade.IMPORTED
    assert "not run on hardware" in outcome(decision)
    strict = ask(moe(), "100", wishes="--require-evidence run", timings=times)
    assert strict.chosen is None or of(strict, strict.chosen).grade is not Grade.IMPORTED
    assert whys(strict, "flashinfer-trtllm") == ["policy"]


def test_an_estimate_is_called_one_and_its_error_is_told():
    decision = ask(linear(n=4224), "90", timings=known(linear(n=4224), "h100"))
    assert decision.origin.text.startswith("estimated: fitted/sm_90_132_3352.json")
    assert decision.winner.grade is Grade.ESTIMATED
    assert "over the fastest estimated (+-" in expected_line(decision)
    unknown = ask(linear("nvfp4"), "90")
    (one,) = by_outcome([("layer", unknown)])
    assert "nobody measured a size near these" in why(one)


def test_a_layer_that_others_ran_faster_in_bf16_is_named_with_its_source():
    """In text, on the page and in JSON; not where we measure ourselves."""
    found = {}
    for name in ("b200", "h100"):
        device = device_of(name)
        selection = Selection(
            device, libs_of("all", device), Policy(), Known.of(chip_of(name, device))
        )
        selection.decide("layers.0.qkv_proj", linear(n=5120, k=2048))
        report = selection.report()
        content = json_report.report(*report)
        assert json_report.report(*json_report.parse_report(content)) == content
        (row,) = content["decisions"]
        found[name] = row.get("faster_in_bf16"), page(report), html_page(report, "a model")
    facts, *texts = found["b200"]
    assert facts["ratio"] > 1.03 and facts["worst_tokens"] in facts["tokens"]
    said = f"bf16 is faster here: {facts['ratio']:.2g}x at {facts['worst_tokens']} tokens"
    for text in texts:
        words = " ".join(text.split())
        assert said in words and "imported from AIConfigurator 095f58a (B200;" in words
    facts, *texts = found["h100"]
    assert facts is None and not any("bf16 is faster" in text for text in texts)
