"""Measuring experts: plans, routing, checks, and from `vllm kernels tune` to a choice."""

import json
from dataclasses import replace

import pytest
import torch
from entrypoints.serving import REPOSITORY, run_cli
from selection_cases import LIBS, linear, moe

from vllm.architectures.registry import builtin_config
from vllm.formats.act_scheme import ActScheme
from vllm.kernels.evidence.tables import Chip, Entry, Table
from vllm.kernels.select.decision import Candidate
from vllm.kernels.step_bytes import weight_bytes
from vllm.kernels.tuning import trials
from vllm.kernels.tuning.jobs import Job, Measured, Turns
from vllm.kernels.tuning.plan import plan, stale_notes, without_done
from vllm.kernels.tuning.routing import EVEN, SKEWED, draws
from vllm.machine import Device

H100, CPU = Device.parse("sm_90"), torch.device("cpu")
SMALL = moe(num_experts=16, intermediate=128, hidden=128, top_k=2, dtype="fp32")


# ---------------------------------------------------------------- what is planned


def test_every_kernel_of_experts_but_the_reference_is_planned_for_all_tokens():
    planned = plan([moe()], H100, LIBS["all"], tokens=(1, 64)).jobs
    names = [job.backend for job in planned]
    assert {"deep_gemm", "cutlass", "triton", "flashinfer-cutlass"} <= set(names)
    assert "torch" not in names and all(job.tokens == (1, 64) for job in planned)
    on_cpu = plan([SMALL], Device.parse("cpu"), LIBS["all"]).jobs
    assert {job.backend for job in on_cpu} == {"cpu", "torch"}


def test_experts_per_rank_are_planned_once_for_each_size():
    halves, cut = moe(intermediate=256), moe(intermediate=256, cut=2)
    partial = moe(intermediate=64, cut=8)
    problems = [halves, cut, moe(cut_experts=4), partial, moe(layout="batched")]
    planned = plan(problems, H100, LIBS["all"])
    assert {job.problem for job in planned.jobs} == {halves, moe(cut_experts=4), partial}
    assert any("batched" in note for note in planned.notes)


def test_bytes_of_a_weight_are_those_of_a_rank():
    assert weight_bytes(linear("bf16")) == 2 * 4096 * 4096
    scales = 4 * (2 * 4 * 16 + 16 * 4)
    assert weight_bytes(moe()) == 256 * (3 * 512 * 2048 + scales)
    assert weight_bytes(moe()) == 4 * weight_bytes(moe(cut_experts=4))


def test_what_has_most_bytes_in_all_its_layers_comes_first():
    small, large = linear(n=1024), linear(n=8192)
    for count, first in ((7, large), (9, small)):
        jobs = plan([small] * count + [large], H100, LIBS["all"]).jobs
        assert jobs[0].problem == first
    jobs = plan([large, moe(), small], H100, LIBS["all"]).jobs
    assert list(dict.fromkeys(job.problem for job in jobs)) == [moe(), large, small]


def test_experts_without_skewed_times_are_measured_again():
    (job, *_) = plan([moe()], H100, LIBS["all"], tokens=(1, 64)).jobs
    times = ((1, 5.0), (64, 6.0))
    even = Entry(job.version, "2026-11-23", times)
    table = Table(Chip(H100), "")
    left = without_done([job], table.with_entry(moe().size_key, job.backend, even))
    assert left == [job]
    both = replace(even, skewed_us=times[1:])
    (left,) = without_done([job], table.with_entry(moe().size_key, job.backend, both))
    assert left.tokens == (1,)


def test_times_of_another_build_are_told_and_count_for_nothing():
    (job, *_) = plan([linear()], H100, LIBS["all"]).jobs
    times = tuple((m, 5.0) for m in job.tokens)
    table = Table(Chip(H100), "").with_entry(
        linear().size_key, job.backend, Entry("deep_gemm 0.0.1", "2026-11-23", times)
    )
    (note,) = stale_notes([job, job], table)
    assert note == f"deep_gemm: the table's times are of deep_gemm 0.0.1, and {job.version} is here"
    assert without_done([job], table) == [job]


# ---------------------------------------------------------------- routing


def shares(problem, exponent: float) -> torch.Tensor:
    """Of this rank's experts in one batch, the largest first, as shares of all pairs."""
    ((_, ids),) = draws(problem, 4096, 1, exponent, CPU)
    counts = torch.bincount(ids[ids >= 0], minlength=problem.num_experts // problem.cut_experts)
    return counts.sort(descending=True).values / ids.numel()


def test_tokens_choose_experts_evenly_or_by_a_power_law():
    problem = moe(num_experts=64, top_k=1)
    even, skewed = shares(problem, EVEN), shares(problem, SKEWED)
    assert float(even[0]) < 1.5 / 64 and float(even[-1]) > 0.5 / 64
    law = torch.arange(1, 65) ** -1.2
    assert torch.allclose(skewed[:8], law[:8] / law.sum(), rtol=0.3)


@pytest.mark.parametrize("exponent", [EVEN, SKEWED])
def test_a_rank_has_its_share_of_the_pairs_and_others_are_marked(exponent):
    problem = moe(num_experts=64, top_k=8, cut_experts=4)
    batches = draws(problem, 512, 8, exponent, CPU)
    for weights, ids in batches:
        assert weights.shape == ids.shape == (512, 8) and ids.dtype == torch.int64
        assert torch.allclose(weights.sum(1), torch.ones(512))
        assert int(ids.min()) == -1 and int(ids.max()) < 16
        for row in ids.tolist()[:16]:
            own = [expert for expert in row if expert >= 0]
            assert len(set(own)) == len(own)
    share = sum(int((ids >= 0).sum()) for _, ids in batches) / (8 * 512 * 8)
    assert 0.2 < share < 0.5  # the first rank has the most popular expert
    assert exponent or share == pytest.approx(1 / 4, rel=0.05)


def test_batches_are_the_same_each_time_and_differ_from_each_other():
    first, again = (draws(SMALL, 64, 2, SKEWED, CPU) for _ in range(2))
    for (weights, ids), (other_weights, other_ids) in zip(first, again):
        assert torch.equal(ids, other_ids) and torch.equal(weights, other_weights)
    popular = [int(torch.bincount(ids.flatten()).argmax()) for _, ids in draws(
        SMALL, 512, 8, SKEWED, CPU)]  # fmt: skip
    assert len(set(popular)) > 1


# ---------------------------------------------------------------- trials


def job(backend: str, problem=SMALL, **changes) -> Job:
    candidate = Candidate(backend, ActScheme.NONE)
    return replace(Job(problem, candidate, (1, 16), (1, 2, 33), "lib 1"), **changes)


@pytest.mark.parametrize(
    "problem",
    [SMALL, replace(SMALL, cut_experts=4), replace(SMALL, intermediate=96, cut=2),
     moe("nvfp4", num_experts=8, intermediate=64, hidden=128, top_k=2, dtype="fp32")],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_kernels_of_experts_pass_the_gate(problem, backend):
    act = problem.act[-1] if problem.format != "nvfp4" else ActScheme.NONE
    one = job(backend, problem, candidate=Candidate(backend, act, fit=problem.block_fit(True)))
    found = [(m, error) for m, error in trials.checked(one, CPU) if error is not None]
    assert [m for m, _ in found] == [1, 2, 33] and all(0 <= error < 1e-3 for _, error in found)


def test_kernels_of_one_problem_are_timed_in_turns_with_even_and_skewed_routing():
    turns = Turns((job("cpu"), job("torch", tokens=(16,))))
    found = [(m, one) for m, one in trials.timed(turns, CPU) if one is not None]
    assert [(m, one.backend) for m, one in found] == [(1, "cpu"), (16, "cpu"), (16, "torch")]
    for _, one in found:
        assert isinstance(one, Measured) and one.noise >= 0
        assert one.us.keys() == {"us", "skewed_us"} and all(us > 0 for us in one.us.values())


def test_tokens_are_timed_quantised_where_a_kernel_takes_them_and_no_rank_shares_them():
    class Kernel:
        def input_quant(self, num_tokens):
            return self

        def quantise(self, x):
            return "quantised"

        def __call__(self, *given):
            return given[0]

    def fields(problem) -> dict[str, set]:
        routings = trials._routings(problem, 4, 2, CPU)
        runs = trials._runs([Kernel()], problem, torch.ones(4, 128), routings)
        return {field: {isinstance(call(), str) for call in calls} for field, calls in runs.items()}

    floats = {"us": {False}, "skewed_us": {False}}
    quantised = {"quantised_us": {True}, "skewed_quantised_us": {True}}
    assert fields(SMALL) == floats | quantised
    assert fields(replace(SMALL, cut_experts=4)) == floats
    assert fields(linear()) == {"us": {False}, "quantised_us": {True}}


# ---------------------------------------------------------------- the command


@pytest.fixture
def model(tmp_path):
    """A config.json of a tiny Qwen3 MoE."""
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256,
             "moe_intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
             "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2,
             "vocab_size": 128}  # fmt: skip
    config = builtin_config("Qwen3-30B-A3B-FP8") | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def vllm(tmp_path, *words: str) -> tuple[int, str, str]:
    path = f"{REPOSITORY}:{tmp_path}"  # where a test may have put a backend
    done = run_cli("kernels", *words, timeout=200, PYTHONPATH=path, OMP_NUM_THREADS="1",
                   VLLM_CACHE_ROOT=str(tmp_path / "cache"))  # fmt: skip
    return done.returncode, done.stdout, done.stderr


EXPERTS = "fp8-block[128x128]:8{}x{}x128x2 fp32 dynamic-group128,none"


@pytest.mark.slow
def test_experts_of_a_model_over_ranks_are_measured_and_chosen_by(model, tmp_path):
    words = ("tune", model, "--tp", "1,2", "--ep", "1,2", "--tokens", "1,256")
    code, out, err = vllm(tmp_path, *words)
    assert code == 0, err
    (path,) = (tmp_path / "cache" / "kernel_tables").glob("cpu*.json")
    rows = json.loads(path.read_text())["rows"]
    sizes = EXPERTS.format("", 256), EXPERTS.format("", 128), EXPERTS.format("/2", 256)
    for size_key in sizes:
        for entry in rows[size_key].values():
            for name in ("us", "skewed_us", "noise"):
                assert entry[name].keys() == {"1", "256"}
            assert entry["us"] != entry["skewed_us"] and 0 <= entry["error"] < 1e-3
        assert f"moe {size_key} -> cpu" in out
    assert "default order" in out and "skewed" in out
    assert "0 kernels to measure" in vllm(tmp_path, *words)[1]
    for ranks in (("--tp", "2"), ("--ep", "2")):
        content = json.loads(vllm(tmp_path, "explain", model, *ranks, "--json")[1])
        (decision,) = (d for d in content["decisions"] if d["problem"]["family"] == "moe")
        assert decision["origin"]["rank"] == 6, decision["origin"]
        assert decision["timings"]["tokens"] == [1, 256]


OFF = """
from dataclasses import replace
import time
from vllm.kernels.backends import cpu

def _spec(name):
    own = next(spec for spec in cpu.SPECS if spec.family == "moe")
    return replace(own, backend=name)

SPECS = (_spec("off"), _spec("off-stuck"))

def moe(problem, tensors, winner):
    right = cpu.moe(problem, tensors, winner)
    if winner.backend == "off-stuck":
        return lambda *given: time.sleep(1000)
    return lambda *given: right(*given) * 1.03
"""


@pytest.mark.slow
def test_experts_that_are_wrong_by_3_percent_or_hang_are_rejected(model, tmp_path):
    (tmp_path / "off_kernels.py").write_text(OFF)
    info = tmp_path / "off_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: off-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.kernel_backends]\noff = off_kernels\n")
    code, out, err = vllm(
        tmp_path, "tune", model, "--tokens", "1,16", "--timeout", "5",
        "--backend", "off", "--backend", "off-stuck", "--backend", "cpu",
    )  # fmt: skip
    assert code == 0, err
    rejected = [line for line in out.splitlines() if "REJECTED" in line]
    assert any("  off  numerics: relative error 3.00e-02" in line for line in rejected), out
    assert any("  off-stuck  library: hung for 5 s" in line for line in rejected), out
    assert "2 kernels failed and are not used" in out
    (path,) = (tmp_path / "cache" / "kernel_tables").glob("cpu*.json")
    assert json.loads(path.read_text())["rows"][EXPERTS.format("", 256)].keys() == {"cpu"}
