"""What holds for every problem, chip, set of libraries and policy."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import ask, parse_device
from selection_strategies import (
    devices,
    excluding,
    linears,
    models,
    moes,
    problems,
    some_libs,
    wishes,
)

from vllm.formats.act_scheme import ActScheme
from vllm.kernels import registry
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.policy import Override, Policy
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.select.reason import Origin, Why
from vllm.kernels.select.select import select
from vllm.machine import NATIVE, Libs


def for_every(*strategies):
    """`given`, with more examples, and no deadline that a busy machine could miss."""
    return lambda test: settings(max_examples=300, deadline=None)(given(*strategies)(test))


LISTED = "qwen3_5_moe_text"


def candidates(decision: Decision) -> dict:
    return {candidate.backend: candidate for candidate in decision.candidates}


def forced_to(problem, backend: str, device: str, libs: Libs, falls_back: bool = False) -> Decision:
    override = Override(problem.family, backend, Origin(2, f"--flag {backend}"))
    policy = Policy((override,), falls_back=falls_back)
    chip = parse_device(device)
    specs = registry.specs(problem.family, chip.family)
    return select(problem, chip, libs, policy, specs)


def is_free(problem, device: str, libs: Libs, backend: str) -> bool:
    return not candidates(ask(problem, device, libs))[backend].reasons


# ---------------------------------------------------------------- forcing


@for_every(problems, devices, some_libs(), st.data())
def test_a_forced_backend_is_chosen_or_refused_and_never_replaced(problem, device, libs, data):
    backend = data.draw(st.sampled_from(registry.backend_names(problem.family)))
    decision = forced_to(problem, backend, device, libs)
    specs = registry.specs(problem.family)
    if not any(problem.format in spec.formats for spec in specs if spec.backend == backend):
        assert decision == ask(problem, device, libs)  # it speaks of other formats
    elif is_free(problem, device, libs, backend):
        assert decision.chosen == backend and decision.origin.rank == 2
    else:
        assert decision.chosen is None and decision.origin.rank == 2
        assert candidates(decision)[backend].reasons


@for_every(problems, devices, some_libs(), st.data())
def test_a_fallback_goes_to_what_would_have_been_chosen_and_says_so(problem, device, libs, data):
    backend = data.draw(st.sampled_from(registry.backend_names(problem.family)))
    decision = forced_to(problem, backend, device, libs, falls_back=True)
    usual = ask(problem, device, libs)
    if decision.chosen == backend:
        assert not candidates(decision)[backend].reasons
        return
    assert decision.chosen == usual.chosen
    if decision != usual:  # it was meant: the one who asked is named, with why it could not be
        assert decision.origin.rank == 2 and backend in decision.origin.text
        assert candidates(decision)[backend].reasons == candidates(usual)[backend].reasons


@for_every(problems, devices, some_libs(), models)
def test_the_variable_is_a_permission_that_stops_nothing(problem, device, libs, model):
    decision = ask(problem, device, libs, "VLLM_USE_DEEP_GEMM=1", model)
    if decision.chosen != "deep_gemm":
        usual = ask(problem, device, libs, model="llama")
        assert (decision.chosen, decision.origin) == (usual.chosen, usual.origin)
    else:
        assert decision.origin.rank == 3 and not candidates(decision)["deep_gemm"].reasons


@for_every(problems, devices, some_libs(), models, wishes)
def test_what_is_chosen_has_no_reason_against_it_and_comes_first(
    problem, device, libs, model, wish
):
    decision = ask(problem, device, libs, wish, model)
    free = [c.backend for c in decision.candidates if not c.reasons]
    assert decision.chosen == (free[0] if free else None)
    names = [candidate.backend for candidate in decision.candidates]
    order = list(registry.backend_names(problem.family, parse_device(device).family))
    prefers = any(text in wish for text in ("DEEP_GEMM=1", "use_deep_gemm=True"))
    assert names == order or (prefers and sorted(names) == sorted(order))


# ---------------------------------------------------------------- libraries


def needs(backend: str, family: str, lib: str) -> bool:
    return any(
        lib in dict(spec.libs) or any(lib == name for _, name, _ in spec.carries)
        for spec in registry.specs(family)
        if spec.backend == backend
    )


@for_every(problems, devices, some_libs(), models, excluding, st.data())
def test_without_a_library_only_candidates_that_need_it_change(
    problem, device, libs, model, wish, data
):
    if not libs.libs:
        return
    gone = data.draw(st.sampled_from(sorted(libs.libs, key=str)))
    fewer = Libs(libs.libs - {gone})
    before, after = (ask(problem, device, some, wish, model) for some in (libs, fewer))
    for backend, candidate in candidates(before).items():
        if not needs(backend, problem.family, gone.name):
            assert candidates(after)[backend] == candidate
    if before.chosen != after.chosen:
        assert needs(before.chosen, problem.family, gone.name)


@for_every(problems, devices, some_libs(), models, excluding, st.data())
def test_a_further_library_never_removes_a_candidate(problem, device, libs, model, wish, data):
    more = data.draw(some_libs())
    added = [lib for lib in more.libs if libs.get(lib.name) is None]
    before = ask(problem, device, libs, wish, model)
    after = ask(problem, device, Libs(libs.libs.union(added)), wish, model)
    for backend, candidate in candidates(before).items():
        assert candidate.reasons or not candidates(after)[backend].reasons


@for_every(problems, devices, some_libs(), wishes, st.randoms())
def test_the_order_of_libraries_does_not_matter(problem, device, libs, wish, random):
    shuffled = list(libs.libs)
    random.shuffle(shuffled)
    assert ask(problem, device, Libs.of(shuffled), wish) == ask(problem, device, libs, wish)


@for_every(problems, devices, some_libs(), models, wishes)
def test_the_same_question_has_the_same_answer(problem, device, libs, model, wish):
    first, second = (ask(problem, device, libs, wish, model) for _ in range(2))
    assert first == second and hash(first) == hash(second)


# ---------------------------------------------------------------- chips and formats

# NUMERICS: which chips may run which kind of kernel at all.
DEEP_GEMM = {"90", "100", "103", "120", "121"}
CUTLASS_BLOCK_FP8 = {"90", "100", "103", "120", "121"}
NATIVE_NVFP4 = {"100", "103", "120", "121"}


@for_every(st.one_of(linears(), moes()), devices, some_libs(), models, wishes)
def test_no_chip_gets_what_it_cannot_run(problem, device, libs, model, wish):
    decision = ask(problem, device, libs, wish, model)
    if decision.chosen is None:
        return
    if decision.chosen == "deep_gemm":
        assert device in DEEP_GEMM
        assert device[:2] != "12" or "sm120" in libs.get("deep_gemm").archs
    if decision.chosen == "cutlass" and problem.format == "fp8-block":
        assert device in CUTLASS_BLOCK_FP8
    if decision.winner.act == ActScheme.NVFP4_GROUP16:
        assert device in NATIVE_NVFP4
    if (decision.chosen == "cpu") or device == "cpu":
        assert device == "cpu" and decision.chosen in ("cpu", "torch")


@for_every(problems, devices, some_libs(), models, wishes)
def test_a_chip_of_family_12_gets_nothing_that_only_family_10_runs(
    problem, device, libs, model, wish
):
    tens = [
        backend
        for backend in registry.backend_names(problem.family)
        if all(
            spec.devices <= {"sm_10x", "sm_100", "sm_103"}
            for spec in registry.specs(problem.family)
            if spec.backend == backend and problem.format in spec.formats
        )
    ]
    if device in ("120", "121"):
        assert ask(problem, device, libs, wish, model).chosen not in tens


@for_every(problems, devices, some_libs())
def test_formats_types_and_activations_are_judged_by_the_kernel_of_the_format(
    problem, device, libs
):
    for backend, candidate in candidates(ask(problem, device, libs)).items():
        own = [spec for spec in registry.specs(problem.family) if spec.backend == backend]
        spec = next((spec for spec in own if problem.format in spec.formats), own[0])
        kinds = {reason.why for reason in candidate.reasons}
        blocks = getattr(getattr(problem, "weight", None), "block", None)
        takes_block = not spec.blocks or problem.format != "fp8-block" or blocks in spec.blocks
        assert (Why.FORMAT in kinds) != (problem.format in spec.formats and takes_block)
        assert (Why.DTYPE in kinds) != (problem.dtype in spec.dtypes)
        assert candidate.act == next((act for act in problem.act if act in spec.act), None)
        assert candidate.act is not None or Why.NUMERICS in kinds


@for_every(st.one_of(linears(), moes()), devices, some_libs(), models, wishes)
def test_a_chosen_kernel_gets_sizes_it_is_aligned_to(problem, device, libs, model, wish):
    decision = ask(problem, device, libs, wish, model)
    if decision.chosen is None:
        return
    spec = next(
        spec
        for spec in registry.specs(problem.family)
        if spec.backend == decision.chosen and problem.format in spec.formats
    )
    fit = decision.winner.fit
    if isinstance(problem, LinearProblem):
        n, k = fit.sizes if fit else (problem.n, problem.k)
        assert n % spec.n_align == k % spec.k_align == 0 and n >= problem.n and k >= problem.k
    if isinstance(problem, MoEProblem):
        inner, hidden = fit.sizes if fit else (problem.intermediate, problem.hidden)
        assert inner % spec.k_align == hidden % spec.k_align == 0 and hidden == problem.hidden
        assert problem.layout in spec.layouts
    if spec.native_archs and device != "cpu":
        assert set(libs.get(NATIVE).archs) & spec.native_archs


# ---------------------------------------------------------------- the model rule


@for_every(problems, devices, some_libs(), excluding)
def test_the_rule_touches_listed_models_on_blackwell_and_deep_gemm_alone(
    problem, device, libs, wish
):
    listed, free = (ask(problem, device, libs, wish, model) for model in (LISTED, "qwen3_moe"))
    for backend, candidate in candidates(listed).items():
        if backend != "deep_gemm" or device not in ("100", "103", "120", "121"):
            assert candidate == candidates(free)[backend]
    if listed.chosen != free.chosen:
        assert free.chosen == "deep_gemm" and problem.format == "fp8-block"
        assert listed.origin.rank == 5


@for_every(problems, devices, some_libs(), wishes)
def test_models_that_are_not_listed_are_all_alike(problem, device, libs, wish):
    one, other = (ask(problem, device, libs, wish, model) for model in ("qwen3_moe", "llama"))
    assert one == other


@for_every(
    st.one_of(linears(st.just("nvfp4")), linears(st.just("fp8-tensor"))), devices, some_libs()
)
def test_nvfp4_and_static_layers_never_see_the_rule_or_deep_gemm(problem, device, libs):
    for wish in ("-", "VLLM_USE_DEEP_GEMM=1", "use_deep_gemm=True", "--linear-backend deep_gemm"):
        decision = ask(problem, device, libs, wish, LISTED)
        usual = ask(problem, device, libs)
        assert decision.chosen == usual.chosen != "deep_gemm"
        assert decision.origin == usual.origin


@for_every(problems, devices, some_libs())
def test_an_explicit_variable_makes_listed_models_like_any_other(problem, device, libs):
    for value in "01":
        wish = f"VLLM_USE_DEEP_GEMM={value}"
        assert ask(problem, device, libs, wish, LISTED) == ask(problem, device, libs, wish)


@for_every(problems, devices, some_libs(), models)
def test_deep_gemm_takes_unpacked_scales_on_hopper_and_packed_exponents_elsewhere(
    problem, device, libs, model
):
    for wish, hopper in (
        ("-", "float32"),
        ("VLLM_USE_DEEP_GEMM_E8M0=0", "float32"),
        ("VLLM_USE_DEEP_GEMM_E8M0=1", "float32-ceil-ue8m0"),
    ):
        decision = ask(problem, device, libs, wish, model)
        if decision.chosen == "deep_gemm":
            assert decision.winner.scales == (hopper if device == "90" else "ue8m0")
            assert device == "90" or wish != "VLLM_USE_DEEP_GEMM_E8M0=0"


# ---------------------------------------------------------------- whom an override means


@for_every(problems, st.sampled_from(["*", "*.down_proj", "model.*"]), st.data())
def test_an_override_means_its_family_its_layers_and_its_formats(problem, pattern, data):
    family = data.draw(st.sampled_from(registry.FAMILIES))
    backend = data.draw(st.sampled_from(registry.backend_names(family)))
    override = Override(family, backend, Origin(1, "--kernel"), pattern)
    specs = registry.specs(problem.family)
    formats = {f for spec in specs if spec.backend == backend for f in spec.formats}
    for layer in ("model.layers.0.mlp.down_proj", "lm_head"):
        named = pattern == "*" or layer != "lm_head"
        spoken_of = pattern != "*" or problem.format in formats
        expected = family == problem.family and named and spoken_of
        assert override.applies_to(layer, problem, specs) == expected
    narrow = replace(override, pattern="*", formats=frozenset({"fp8-block"}))
    if narrow.applies_to("lm_head", problem, specs):
        assert problem.format == "fp8-block"
