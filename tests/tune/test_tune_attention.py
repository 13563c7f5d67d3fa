"""Attention: steps that are timed, rows of tables, and the choice that measurements make."""

import io
import json
from dataclasses import replace

import pytest
import torch
from selection_cases import LIBS, ask, attention, linear

from vllm.entrypoints.cli.main import main
from vllm.errors import ConfigError
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.quarantine import Failure, add_failure, with_quarantine
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.steps import MAIN_STEPS, STEPS, Step, fitting, is_telling
from vllm.kernels.evidence.tables import Chip, Entry, Table, read_table, write_table
from vllm.kernels.evidence.versions import versions_here
from vllm.kernels.report import json_report, question, text_report, tuned_report
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import AttentionProblem
from vllm.kernels.select.reason import RANK_FLAG, RANK_MEASURED
from vllm.kernels.selection import Selection
from vllm.kernels.tuning import attention_trials, tune
from vllm.kernels.tuning.fit import kinds_of
from vllm.kernels.tuning.plan import in_turns, plan, without_done
from vllm.kernels.tuning.progress import Progress
from vllm.kernels.tuning.tune import Limits, Run
from vllm.machine import Device
from vllm.platforms.installed import installed_device
from vllm.platforms.probe import installed_kernel_libs

H100, CPU = Device.parse("sm_90"), Device.parse("cpu")
TINY = AttentionProblem(4, 2, 16, "fp32", "fp32")
SHORT = ("decode 2x40", "prompt 33", "mixed 17+2x20")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


# ---------------------------------------------------------------- steps


def test_a_step_has_its_name_back():
    for name in (*STEPS["cuda"], *STEPS["cpu"], *SHORT):
        assert Step.parse(name).name == name
    mixed = Step.parse("mixed 512+32x1024")
    assert mixed == Step(512, 32, 1024) and mixed.requests == [(512, 512)] + [(1, 1024)] * 32
    assert (mixed.num_tokens, mixed.num_keys) == (544, 512 + 32 * 1024)


@pytest.mark.parametrize("name", ["", "16", "decode 16", "decode 0x5", "decode 5x0", "prompt 0512",
                                  "prompt 512+2x3", "mixed 512", "decode 16x1024 ", "mixed 0+2x3",
                                  "prefill 512"])  # fmt: skip
def test_what_is_no_step_is_refused(name):
    with pytest.raises(ValueError, match="is no step: it takes decode REQUESTSxKEYS"):
        Step.parse(name)


def test_a_step_whose_cache_does_not_fit_has_half_of_its_requests():
    problem = attention()  # a key of 1 KiB
    assert Step.parse("decode 16x1024").bytes_of_cache(problem) == 16 << 20
    assert fitting(problem, "cuda", 1 << 40) == list(STEPS["cuda"])
    few = fitting(problem, "cuda", 128 << 20)
    assert "decode 128x1024" in few and "decode 256x1024" not in few and len(few) == len(set(few))
    assert few.count("decode 16x8192") == 1  # also half of half of those of 64 requests
    assert fitting(problem, "cuda", 1 << 20) == ["decode 1x1024", "prompt 512"]


def test_the_main_steps_say_something_of_decodes_and_of_prompts():
    assert is_telling(MAIN_STEPS[:2]) and not is_telling(["decode 1x8", "mixed 8+1x8"])
    assert is_telling(STEPS["cpu"][:2])


# ---------------------------------------------------------------- what is planned


def test_attention_is_planned_for_every_kernel_but_the_reference():
    jobs = plan([attention()], H100, LIBS["all"], cache_bytes=20 << 30).jobs
    assert [job.backend for job in jobs] == ["triton", "flashinfer"]
    assert all(job.tokens == STEPS["cuda"] and job.gate == () for job in jobs)
    assert [job.backend for job in plan([TINY], CPU, LIBS["all"]).jobs] == ["cpu", "torch"]
    alone = plan([attention()], H100, LIBS["none"])
    assert not alone.jobs and any("triton alone can run it" in note for note in alone.notes)


def test_attention_has_its_place_by_the_bytes_that_a_step_reads():
    small, large = linear(n=1024, k=1024), linear(n=16384, k=16384)
    problems = [small, attention(), large]  # 1, 16 and 256 MiB
    jobs = plan(problems, H100, LIBS["all"]).jobs
    assert list(dict.fromkeys(job.problem for job in jobs)) == [large, attention(), small]
    jobs = plan([attention()] * 20 + problems, H100, LIBS["all"]).jobs
    assert jobs[0].problem == attention()
    first, *_, last = in_turns(jobs, is_limited=True)
    assert first[0].tokens == MAIN_STEPS and last[0].problem == small
    later = [group[0] for group in in_turns(jobs, is_limited=True)[3:]]
    assert later[0].problem == attention() and not {*later[0].tokens} & {*MAIN_STEPS}


def test_a_check_of_attention_needs_its_largest_step():
    (job, _) = plan([attention()], H100, LIBS["all"], cache_bytes=20 << 30).jobs
    assert tune.bytes_of_check(job) == 256 * 8192 << 10


# ---------------------------------------------------------------- rows of tables


def entry(us: dict[str, float], **others) -> Entry:
    return Entry("1", "2026-11-24", tuple(us.items()), **others)


def table(**rows: dict[str, float]) -> Table:
    own = Table(Chip(H100, 132, 3352), "NVIDIA H100")
    for backend, us in rows.items():
        own = own.with_entry(attention().size_key, backend, entry(us))
    return own


def test_a_row_of_attention_comes_back_in_the_order_of_tokens_and_keys(tmp_path):
    us = {"prompt 512": 9.0, "decode 16x8192": 7.0, "decode 1x1024": 3.0, "decode 16x1024": 5.0}
    own = table(triton=us).with_entry(linear().size_key, "triton", entry({}))
    write_table(tmp_path / "t.json", own)
    found = read_table(tmp_path / "t.json")
    order = ["decode 1x1024", "decode 16x1024", "decode 16x8192", "prompt 512"]
    assert [name for name, _ in found.rows[attention().size_key]["triton"].us] == order
    timings = found.timings(attention())
    assert timings.steps == tuple(order) and timings.tokens == (1, 16, 16, 512)
    assert timings.us == (("triton", (3.0, 5.0, 7.0, 9.0)),)
    assert kinds_of(found) == {}  # the cost model knows linear layers and experts alone


@pytest.mark.parametrize(
    ("field", "column", "message"),
    [
        ("us", "16", "'16' is no step"),
        ("us", "decode 16", "is no step"),
        ("noise", "prompt x", "is no step"),
        ("skewed_us", "prompt 512", "attention has no skewed_us"),
        ("quantised_us", "prompt 512", "attention has no quantised_us"),
    ],
)
def test_a_row_of_attention_with_anything_else_is_refused(tmp_path, field, column, message):
    write_table(tmp_path / "t.json", table(triton={"prompt 512": 1.0}))
    content = json.loads((tmp_path / "t.json").read_text())
    content["rows"][attention().size_key]["triton"].setdefault(field, {})[column] = 1.0
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_table(tmp_path / "t.json")


def test_a_step_is_no_number_of_tokens_of_a_linear_layer(tmp_path):
    own = Table(Chip(H100), "").with_entry(linear().size_key, "triton", entry({"prompt 512": 1.0}))
    write_table(tmp_path / "t.json", own)
    with pytest.raises(ConfigError, match="is no table of measured kernels"):
        read_table(tmp_path / "t.json")


def test_a_later_run_measures_the_steps_that_are_missing():
    (job, _) = plan([attention()], H100, LIBS["all"]).jobs
    done = dict.fromkeys(job.tokens[2:], 1.0)
    own = Table(Chip(H100), "").with_entry(
        attention().size_key, job.backend, replace(entry(done), version=job.version)
    )
    (left,) = without_done([job], own)
    assert left.tokens == job.tokens[:2]


# ---------------------------------------------------------------- the choice


def timings(steps=("decode 1x1024", "decode 64x1024", "prompt 512"), noise=0.0, **us) -> Timings:
    tokens = tuple(Step.parse(step).num_tokens for step in steps)
    noises = tuple((name, (noise,) * len(steps)) for name in us) if noise else ()
    return Timings("t.json", tokens, tuple(us.items()), noise=noises, steps=tuple(steps))


def chosen(known: Timings | None, wishes="-", libs="all"):
    return ask(attention(), "90", libs, wishes, timings=known)


def test_the_backend_with_the_lowest_mean_over_all_steps_serves_all_of_them():
    decision = chosen(timings(triton=(10, 20, 30), flashinfer=(12, 10, 20)))
    assert decision.chosen == "flashinfer" and decision.origin.rank == RANK_MEASURED
    assert decision.winner.grade is Grade.MEASURED and decision.winner.parts == ()
    assert decision.origin.text == "measured: t.json"
    # Slower for one step that counts as much as two together.
    assert chosen(timings(triton=(10, 20, 30), flashinfer=(30, 15, 22))).chosen == "triton"


def test_what_comes_first_stays_for_small_differences_and_for_noise():
    close = {"triton": (10, 10, 10), "flashinfer": (9.8, 9.8, 9.8)}
    assert chosen(timings(**close)).chosen == "triton"
    clear = {"triton": (10, 10, 10), "flashinfer": (9.2, 9.2, 9.2)}
    assert chosen(timings(**clear)).chosen == "flashinfer"
    assert chosen(timings(**clear, noise=0.02)).chosen == "flashinfer"
    assert chosen(timings(**clear, noise=0.06)).chosen == "triton"


def test_only_steps_that_all_were_timed_for_count():
    known = timings(triton=(10, None, 30), flashinfer=(9, 1, 28))
    assert chosen(known).chosen == "flashinfer"
    known = timings(triton=(10, None, 30), flashinfer=(11, 1, 31))
    assert chosen(known).chosen == "triton"


@pytest.mark.parametrize(
    "known",
    [
        timings(("decode 1x8", "decode 2x8"), triton=(9, 9), flashinfer=(1, 1)),
        timings(("prompt 8", "mixed 8+1x8"), triton=(9, 9), flashinfer=(1, 1)),
        timings(triton=(9, 9, None), flashinfer=(1, 1, 1)),
        timings(flashinfer=(1, 1, 1)),
        timings(torch=(1, 1, 1)),
    ],
)
def test_what_says_too_little_changes_nothing(known):
    decision = chosen(known)
    assert decision.chosen == "triton" == chosen(None).chosen
    assert decision.origin == chosen(None).origin


def test_what_cannot_run_is_not_chosen_however_fast():
    known = timings(triton=(10, 10, 10), flashinfer=(1, 1, 1))
    assert chosen(known, libs="none").chosen == "triton"
    version = versions_here("attention", "bf16", H100, LIBS["all"])["flashinfer"]
    place = "flashinfer", version, "sm_90", attention().size_key
    add_failure(Failure(*place, "library", "hung", "2026-11-24"))
    libs = with_quarantine(LIBS["all"], H100)
    assert libs.quarantined and chosen(known, libs=libs).chosen == "triton"
    assert chosen(known, "--attention-backend triton").origin.rank == RANK_FLAG


def test_texts_and_json_tell_the_steps_and_the_regret():
    known = timings(triton=(10.0, 20.0, 30.0), flashinfer=(12.0, 10.0, 20.0))
    decision = chosen(known, "--attention-backend triton")
    line = text_report.expected_line(decision)
    assert line.startswith("10 us for decode 1x1024, 20 for decode 64x1024, 30 for prompt 512; ")
    assert "44.2% over the fastest measured, at most 100.0% (flashinfer for decode 64x1024)" in line
    written = json_report.report(
        H100, LIBS["all"], {}, [("model.layers.0.self_attn.attn", decision)]
    )
    assert written["decisions"][0]["expected"]["worst_tokens"] == "decode 64x1024"
    (_, again), *_ = json_report.parse_report(json.loads(json.dumps(written))).records
    assert again.timings == known and again == decision
    written["decisions"][0]["timings"]["steps"][0] = "decode 2x1024"
    with pytest.raises(ConfigError, match=r"timings\.steps are not steps of as many tokens"):
        json_report.parse_report(written)


# ---------------------------------------------------------------- measured here


def test_kernels_of_the_cpu_are_checked_timed_and_chosen_by(tmp_path):
    libs = installed_kernel_libs(installed_device())
    planned = plan([TINY], installed_device(), libs).jobs
    assert {job.backend for job in planned} == {"cpu", "torch"}
    jobs = [replace(job, tokens=SHORT) for job in planned]
    out, path = io.StringIO(), tmp_path / "t.json"
    run = Run(CPU, Table(Chip(CPU, 2), "CPU"), path, Limits(), Progress(out))
    assert not run.carry_out(jobs) and not run.failures, out.getvalue()
    row = read_table(path).rows[TINY.size_key]
    for own in row.values():
        assert {name for name, _ in own.us} == {name for name, _ in own.noise} == set(SHORT)
        assert 0 < own.error < 2e-4
    known = read_table(path).timings(TINY)
    decision = ask(TINY, "cpu", libs, timings=known)
    means = {name: sum(dict(own.us).values()) for name, own in row.items()}
    assert means["cpu"] < means["torch"] and decision.chosen == "cpu"
    assert decision.origin.rank == RANK_MEASURED and decision.winner.grade is Grade.MEASURED
    page = tuned_report.page(read_table(path), [(decision, "cpu")])
    assert "attention 4/2 heads of 16 fp32, fp32 cache -> cpu" in page
    assert all(f"{name}  cpu " in page for name in SHORT)


@pytest.mark.parametrize("name", ["decode 3x40", "mixed 17+2x20"])
def test_what_a_captured_graph_reads_gives_the_same_result(name):
    outputs = []
    for is_captured in (False, True):
        case = attention_trials.StepCase(TINY, Step.parse(name), torch.device("cpu"), num_layers=2)
        if is_captured:
            case.read_as_captured()
        first, second = (run() for run in case.runs("torch"))
        assert first.isfinite().all() and not torch.equal(first, second)  # caches differ
        outputs.append(first)
    assert torch.equal(*outputs)


def test_a_kernel_that_fails_is_entered_for_the_problem(tmp_path):
    (job, *_) = plan([TINY], CPU, LIBS["all"]).jobs
    odd = replace(TINY, head_dim=12)  # which its spec refuses
    wrong = replace(job, problem=odd, tokens=SHORT)
    run = Run(CPU, Table(Chip(CPU, 2), ""), tmp_path / "t.json", Limits(), Progress(io.StringIO()))
    assert not run.carry_out([wrong])
    (failure,) = run.failures
    assert (failure.backend, failure.size_key) == ("cpu", odd.size_key)


# ---------------------------------------------------------------- the command


def test_a_single_size_is_asked_for_by_its_heads(capsys):
    assert question.layer_of("attention:32/8x128", "bf16")[1] == AttentionProblem(
        32, 8, 128, "bf16"
    )
    fp8 = question.layer_of("attention:32/8x128:fp8", "bf16")[1]
    assert fp8 == AttentionProblem(32, 8, 128, "fp8", "bf16")
    assert main(["kernels", "tune", "--layer", "attention:4/2x16", "--plan"]) == 0
    out = capsys.readouterr().out
    assert "2 kernels to measure" in out and "torch  decode 1x1024, prompt 512, " in out
    assert main(["kernels", "tune", "Qwen3-8B-FP8", "--tp", "2", "--kv-cache-dtype", "fp8",
                 "--backend", "torch", "--plan"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "attention 16/4 heads of 128 fp32, fp8 cache  torch  decode" in out


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("attention:32/5x128", "heads are a multiple of KV heads"),
        ("attention:0/0x128", "heads are a multiple of KV heads"),
        ("attention:32x128", "or attention:HEADS/KV_HEADSxDIM"),
        ("attention:32/8x128:fp9", "cache 'fp9' is unknown: it takes"),
    ],
)
def test_an_attention_that_cannot_be_is_refused(layer, message):
    with pytest.raises(ConfigError, match=message):
        question.layer_of(layer, "bf16")


def test_a_row_of_other_versions_is_an_estimate_and_says_so():
    known = Known((table(triton=dict.fromkeys(MAIN_STEPS, 9.0),
                         flashinfer=dict.fromkeys(MAIN_STEPS, 8.0)),))  # fmt: skip
    decision = Selection(H100, LIBS["all"], Policy(), known).decide("attn", attention())
    assert decision.chosen == "flashinfer" and decision.winner.grade is Grade.ESTIMATED
    assert "in another version" in decision.origin.text
