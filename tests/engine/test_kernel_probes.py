"""A kernel that computes something else is quarantined before it serves, with its error."""

import json
import re
from dataclasses import replace

import pytest
import selection_cases
import torch
from kernel_comparisons import WRONG

from vllm import LLM
from vllm.entrypoints.cli.main import main
from vllm.errors import KernelFailedError
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import cache_numerics, numerics, registry
from vllm.kernels.backends import cpu
from vllm.kernels.evidence.passed import path_of_passed, read_passed
from vllm.kernels.evidence.quarantine import read_failures
from vllm.kernels.make_kernel import make_linear, make_moe
from vllm.kernels.numerics import LinearCase, MoECase, WrongResultError
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.policy import Override, Policy
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.select.reason import Origin
from vllm.kernels.select.select import select
from vllm.kernels.selection import Selection
from vllm.machine import Device, Libs
from vllm.platforms.probe import probe_device, probe_libs
from vllm.utils.startup import current_report
from vllm.worker import kernel_probes
from vllm.worker.kernel_probes import probe_problem, probes_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


@pytest.fixture(autouse=True)
def one_thread():
    """As the engine compares: threads of torch that wait for each other take a hundred times as
    long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(checkpoint, name: str = "llama", **options) -> LLM:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    return LLM(checkpoint(name), skip_tokenizer_init=True, **limits, **options)


def records(llm: LLM) -> list:
    return llm.llm_engine.core.executor.selection.records


# By family: a checkpoint, and how many sizes of its layers.
MODELS = {
    "linear": ("llama", 5),
    "moe": ("qwen3_moe", 1),
    "attention": ("llama", 1),
    "kv_quant": ("llama", 1),
    "delta_rule": ("qwen3_5", 1),
}


# ---------------------------------------------------------------- at a start


@pytest.mark.parametrize("family", MODELS)
def test_a_kernel_that_is_wrong_by_3_percent_does_not_serve(
    checkpoint, monkeypatch, capsys, family
):
    name, num_sizes = MODELS[family]
    monkeypatch.setattr(cpu, family, WRONG[family](getattr(cpu, family)))
    with pytest.raises(KernelFailedError) as caught:
        load(checkpoint, name)
    text = str(caught.value)
    assert "kernel cpu failed for model.layers.0." in text
    assert "when compared with the reference: relative error 3.00e-02" in text
    entered = read_failures()
    assert {(f.backend, f.why) for f in entered} == {("cpu", "numerics")}
    # Under the sizes of all layers that it was chosen for, at once.
    assert len({f.size_key for f in entered}) == num_sizes
    llm = load(checkpoint, name)
    served = [d for _, d in records(llm) if d.problem.family == family]
    assert {d.chosen for d in served} == {"torch"}
    told = [str(r) for d in served for c in d.candidates if c.backend == "cpu" for r in c.reasons]
    assert all(t.startswith("numerics: quarantined on") and "3.00e-02" in t for t in told) and told
    assert {f"cpu {family}"}.isdisjoint(passed_kinds())
    capsys.readouterr()
    assert main(["kernels", "explain", str(checkpoint(name))]) == 0
    explained = " ".join(capsys.readouterr().out.split())
    assert "when compared with the reference: relative error 3.00e-02" in explained


def passed_kinds() -> set[str]:
    """Backend and family of what passed."""
    found = (re.search(r" vllm \S+ (\S+) .*?: (\w+) ", name) for name in read_passed())
    return {f"{match[1]} {match[2]}" for match in found}


CACHE = {"cpu attention", "cpu kv_quant"}


def test_what_passed_is_not_compared_again(checkpoint, monkeypatch):
    load(checkpoint, "qwen3_moe")
    assert passed_kinds() == {"cpu linear", "cpu moe", *CACHE}
    compared = []
    prepared = kernel_probes.Probe.prepared
    monkeypatch.setattr(
        kernel_probes.Probe, "prepared", lambda p: compared.append(p.name) or prepared(p)
    )
    load(checkpoint, "qwen3_moe")
    assert not compared and current_report().seconds["numerics"] < 0.5
    load(checkpoint, "qwen3_moe", dtype="bfloat16")  # other kernels
    assert compared and all("bf16" in name for name in compared)


@pytest.mark.parametrize("content", ["", "{", "[1, null]", '{"a": 1}', "[" * 9999])
def test_a_broken_file_of_what_passed_is_written_anew(checkpoint, content):
    path_of_passed().parent.mkdir(parents=True)
    path_of_passed().write_text(content)
    load(checkpoint)
    assert passed_kinds() == {"cpu linear", *CACHE}
    assert json.loads(path_of_passed().read_text()) == read_passed()


def test_where_nothing_can_be_remembered_a_start_compares_again(checkpoint, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    load(checkpoint)
    assert not read_passed()


def test_without_memory_for_the_reference_a_kernel_serves_and_is_compared_later(
    checkpoint, monkeypatch
):
    def full(*given):
        raise MemoryError("no memory for the reference")

    with monkeypatch.context() as patch:
        patch.setattr(numerics, "reference", full)
        patch.setattr(cache_numerics, "attention_reference", full)
        load(checkpoint)
    assert passed_kinds() == {"cpu kv_quant"} and not read_failures()
    load(checkpoint)
    assert passed_kinds() == {"cpu linear", *CACHE}


def test_another_build_is_compared_again(checkpoint):
    llm = load(checkpoint)
    own = llm.llm_engine.core.executor.selection
    libs = Libs.of(
        replace(lib, builds=tuple(f"{build[:-1]}!" for build in lib.builds))
        for lib in own.libs.libs
    )
    other = Selection(own.device, libs, own.policy)
    assert {p.name for p in probes_of(own.records, own, 16)} == set(read_passed())
    assert {p.name for p in probes_of(own.records, other, 16)}.isdisjoint(read_passed())
    longer = {p.name for p in probes_of(own.records, own, 32)} - set(read_passed())
    assert len(longer) == 2 and all(name.endswith("pages of 32") for name in longer)


def test_a_kernel_that_reads_behind_its_input_is_wrong(checkpoint, monkeypatch):
    make = cpu.linear

    def reads_behind(*given):
        kernel = make(*given)

        def apply(x):
            rows = x.as_strided((x.shape[0] + 1, x.shape[1]), x.stride())
            return kernel(x) + 0 * rows[-1].sum()

        return apply

    monkeypatch.setattr(cpu, "linear", reads_behind)
    monkeypatch.setattr(kernel_probes, "NUM_TOKENS", (5,))
    problem = LinearProblem(48, 64, WeightFormat("fp32"), dtype="fp32")
    selection = Selection(probe_device(), probe_libs(), Policy())
    (probe,) = probes_of([("a", selection.choose("a", problem))], selection, 16)
    with pytest.raises(WrongResultError, match="NaN or infinity"):
        probe.prepared()()


# ---------------------------------------------------------------- what is compared

FP8, NVFP4, INT4 = (WeightFormat.parse(t) for t in ("fp8-block", "nvfp4", "int4-group[128]"))
GROUPS = (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)
LINEAR = [
    LinearProblem(576 + 192 + 192, 576, FP8, GROUPS, parts=(576, 192, 192), bias=True, cut_n=2),
    LinearProblem(4096, 18432 // 32, FP8, GROUPS, cut_k=32),
    LinearProblem(300, 700, WeightFormat("bf16")),
    LinearProblem(512, 512, WeightFormat("fp8", "tensor"), (ActScheme.STATIC_TENSOR,)),
    LinearProblem(512, 512, WeightFormat("fp8", "channel"), (ActScheme.DYNAMIC_TOKEN,)),
    LinearProblem(768, 512, NVFP4, (ActScheme.NVFP4_GROUP16,), parts=(256, 512)),
    LinearProblem(512, 640, INT4),
]
MOE = [
    MoEProblem(256, 8, 7168, 2048 // 32, FP8, GROUPS, cut=32),
    MoEProblem(16, 2, 640, 192, FP8, GROUPS, cut_experts=4),
    MoEProblem(8, 2, 512, 256, WeightFormat("bf16")),
    MoEProblem(8, 2, 512, 256, NVFP4, (ActScheme.NVFP4_GROUP16,)),
    MoEProblem(8, 2, 512, 256, INT4),
]


def chosen(problem, backend: str):
    """As asked for by a flag, on a CPU."""
    flag = Origin(2, f"--{problem.family}-backend {backend}")
    policy = Policy((Override(problem.family, backend, flag),))
    return Selection(probe_device(), probe_libs(), policy).choose("layer", problem)


@pytest.mark.parametrize(("backend", "dtype"), [("torch", "bf16"), ("cpu", "fp32")])
@pytest.mark.parametrize("problem", [*LINEAR, *MOE], ids=str)
def test_kernels_of_the_cpu_are_right_and_are_wrong_when_scaled(problem, backend, dtype):
    problem = replace(problem, dtype=dtype, act=(*problem.act, ActScheme.NONE))
    decision = chosen(problem, backend)
    selection = Selection(decision.device, probe_libs(), Policy())
    (probe,) = probes_of([("layer", decision)], selection, 16)
    probe.prepared()()
    is_moe = isinstance(problem, MoEProblem)
    case = (MoECase if is_moe else LinearCase).of(probe.problem, probe.candidate, CPU, 130)
    kernel = (make_moe if is_moe else make_linear)(
        replace(decision, problem=probe.problem), case.tensors
    )
    for num_tokens in probe.num_tokens:
        right = case.expected(num_tokens)
        for factor in (1.03, 0.97):
            with pytest.raises(WrongResultError, match=r"relative error [23]\.\d+e-02"):
                case.error(lambda *given, f=factor: kernel(*given) * f, num_tokens, right)


SMALL_MOE = MoEProblem(8, 2, 512, 256, FP8, GROUPS)


@pytest.mark.parametrize("act", [ActScheme.DYNAMIC_GROUP128, ActScheme.NVFP4_GROUP16])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_experts_with_quantised_activations_have_a_limit_that_roundings_keep(act, dtype):
    """Against the same arithmetic with results of the first product that are not rounded, which
    moves codes between the products."""
    weight = FP8 if act is ActScheme.DYNAMIC_GROUP128 else NVFP4
    problem = replace(SMALL_MOE, weight=weight, act=(act,), dtype=dtype)
    candidate = Candidate("any", act)
    case = MoECase.of(problem, candidate, CPU, 33)

    def kernel(x, weights, ids):
        wide = replace(problem, dtype="fp32")
        return numerics.reference_experts(wide, candidate, case.tensors, x, weights, ids)

    right = {count: case.expected(count) for count in (1, 33)}
    errors = [case.error(kernel, count, right[count]) for count in right]
    limit = numerics.max_error(problem, act)
    assert max(errors) < limit / 1.2
    if dtype != "fp32":
        assert max(errors) > limit / 10, "the limit has nothing to do with what happens"
    with pytest.raises(WrongResultError):
        case.error(lambda *given: kernel(*given) * 1.03, 33, right[33])


def test_a_small_problem_keeps_what_is_odd_of_the_layer():
    spec = next(s for s in registry.specs("linear") if s.backend == "cpu")
    problem = LinearProblem(5760, 9216 + 64, FP8, GROUPS, parts=(4608 + 64, 544, 544), cut_k=2)
    small = probe_problem(problem, spec, 130)
    assert small.parts == (320, 288, 288) and small.n == 896 and small.k == 576
    assert [n % 128 for n in small.parts] == [n % 128 for n in problem.parts]
    assert small.k % 128 == problem.k % 128
    tensors = numerics.random_tensors(small, CPU)
    assert tensors.column_offset == 576 % 128
    moe = next(s for s in registry.specs("moe") if s.backend == "cpu")
    experts = probe_problem(MoEProblem(256, 8, 7168, 2048, FP8, GROUPS, cut_experts=8), moe, 130)
    assert (experts.num_experts, experts.top_k, experts.cut_experts) == (96, 8, 8)
    assert (experts.hidden, experts.intermediate) == (512, 256)


def test_weights_have_scales_over_octaves_and_elements_of_a_real_size():
    for problem in map(kernel_probes._small, (*LINEAR, *MOE)):
        make = numerics.random_experts if problem.family == "moe" else numerics.random_tensors
        made = make(problem, CPU)
        tensors = made.expert(0)[0] if problem.family == "moe" else made
        wide = numerics.reference(
            Candidate("any", ActScheme.NONE),
            replace(tensors, bias=None),
            torch.eye(problem.hidden if problem.family == "moe" else problem.k),
        )
        size = float(wide.std()) * wide.shape[0] ** 0.5
        assert 0.5 < size < 3, f"{problem}: {size}"
        if tensors.scales is None:
            rows = wide.norm(dim=0)
            assert rows.max() > 4 * rows.min()
        elif tensors.scales.numel() > 1:
            assert tensors.scales.float().max() > 4 * tensors.scales.float().min()


def test_each_part_of_a_split_is_called_with_tokens_of_its_range():
    problem = selection_cases.linear()
    names = ("skinny", "triton", "torch")
    parts = ((16, "skinny"), (64, "triton"), (None, "torch"))
    split = Candidate("all", GROUPS[0], parts=parts)
    own = [Candidate(name, GROUPS[0]) for name in names]
    h100 = Device.parse("sm_90")
    decision = select(
        problem, h100, selection_cases.LIBS["all"], Policy(), registry.specs("linear")
    )
    decision = replace(decision, chosen="all", candidates=(split, *own))
    selection = Selection(h100, selection_cases.LIBS["all"], Policy())
    found = {p.candidate.backend: p for p in probes_of([("a", decision)], selection, 16)}
    assert {name: p.num_tokens for name, p in found.items()} == {
        "skinny": (1, 5, 16), "triton": (17, 21, 49, 64), "torch": (65, 69, 97, 194)}  # fmt: skip
    # What is compiled for a size is compared with that size.
    assert found["triton"].problem.n == problem.n and found["torch"].problem.n == 256
