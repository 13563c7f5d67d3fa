"""Where the time of decode steps goes: layers of kernels, and steps of tiny models on the CPU."""

import pytest
import torch

from vllm import LLM, SamplingParams
from vllm.entrypoints.step_bench import StepBench, check_fits
from vllm.errors import ConfigError
from vllm.kernels.report.roofline import BETWEEN, Bandwidth, KernelTime, Roofline, text, timed_rows
from vllm.kernels.step_bytes import DecodeStep, layer_kinds
from vllm.worker.kernel_spans import Span
from vllm.worker.layer_marks import NORMS, DeviceMarkers, HostClock, marked
from vllm.worker.step_profile import MORE_STEPS, kernel_times, layers_of_kernels, without_graphs

MARKER = f"at::cuda::(anonymous namespace)::{DeviceMarkers.KERNEL}(long)"


def spans(*names: str, us: int = 10, stream: int = 7) -> list[Span]:
    """One after another, with gaps."""
    starts = range(0, 2000 * us * len(names), 2000 * us)
    return [Span(name, stream, at, at + 1000 * us) for name, at in zip(names, starts)]


# ---------------------------------------------------------------- layers of kernels


def test_markers_tell_the_layer_of_each_launch_of_a_kernel():
    step = spans("copy", MARKER, "gemm", MARKER, "norm", MARKER, "quant", "gemm", MARKER, "copy")
    known = layers_of_kernels(step[::-1], ["qkv", "", "o", ""])
    assert known == {"copy": ["", ""], "gemm": ["qkv", "o"], "norm": [""], "quant": ["o"]}


def test_a_profile_that_lost_a_marker_says_nothing():
    assert layers_of_kernels(spans(MARKER, "gemm"), ["qkv", ""]) == {}


def test_the_nth_launch_in_a_step_is_of_the_nth_layer():
    known = {"gemm": ["qkv", "o"], "norm": [""], "attention": ["attn"]}
    recorded = spans(*["norm", "gemm", "attention", "gemm"] * 3)
    times = {(t.layer, t.kernel): t for t in kernel_times(recorded, known, 3)}
    assert times.keys() == {("", "norm"), ("qkv", "gemm"), ("attn", "attention"), ("o", "gemm")}
    assert {t.us for t in times.values()} == {10}
    assert {t.launches for t in times.values()} == {1}


def test_a_kernel_of_several_layers_that_is_launched_more_often_is_of_none():
    known = {"gemm": ["qkv", "o"], "attention": ["attn"]}
    recorded = spans("gemm", "gemm", "gemm", "attention", "attention")
    found = {(t.layer, t.kernel): t.launches for t in kernel_times(recorded, known, 1)}
    assert found == {("", "gemm"): 3, ("attn", "attention"): 2}


def test_what_a_kernel_waits_for_the_one_before_it_is_not_its_time():
    early = [Span("a", 7, 0, 100_000), Span("b", 7, 20_000, 130_000)]
    assert [t.us for t in kernel_times(early, {}, 1)] == [100, 30]


# ---------------------------------------------------------------- marks


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(checkpoint("qwen3_moe"), skip_tokenizer_init=True, max_num_seqs=8)


class Order:
    """Labels as layers begin and end."""

    def __init__(self):
        self.labels = []

    def begin(self, label):
        self.labels.append(label)

    def end(self, label):
        assert self.labels[-1] == label


def test_every_layer_that_asked_for_a_kernel_is_marked_and_nothing_stays(llm):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def tokens():
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        return output.outputs[0].token_ids

    core, before = llm.llm_engine.core, tokens()
    model, order = core.runner.model, Order()
    attributes = {module: dict(vars(module)) for module in model.modules()}
    with marked(model, order):
        assert tokens() == before
    assert set(order.labels) > {name for name, _ in core.selection.records}
    # Two norms a layer and the last; heads' norms are part of the rotation. Four steps.
    assert order.labels.count(NORMS) == 4 * (2 * len(model.model.layers) + 1)
    assert {module: dict(vars(module)) for module in model.modules()} == attributes
    order.labels.clear()
    assert tokens() == before and not order.labels


def test_an_error_in_a_layer_ends_its_mark(llm):
    model, clock = llm.llm_engine.core.runner.model, HostClock()
    with marked(model, clock), pytest.raises(Exception, match=r".*"):
        model.lm_head.multiply(torch.zeros(1, 3))
    assert clock.calls == {"lm_head": 1}


def test_graphs_are_there_again_after_eager_steps(llm):
    runner = llm.llm_engine.core.runner
    runner._graphs, before = object(), runner._graphs
    try:
        kept = runner._graphs
        with without_graphs(runner):
            assert runner._graphs is None
        assert runner._graphs is kept
    finally:
        runner._graphs = before


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("batch", [1, 5])
def test_rows_and_what_is_between_them_are_the_step(llm, batch):
    engine = llm.llm_engine
    profile = StepBench(engine).measure(batch, 40, 6, by_kernel=True)
    # The prompt, the tokens of the first steps, and half of those that are timed.
    assert 40 < profile.context < 40 + 6 + MORE_STEPS + batch
    step = DecodeStep(batch, profile.context)
    problems = [(name, decision.problem) for name, decision in engine.core.selection.records]
    decoder = engine.config.model_config.decoder
    kinds = layer_kinds(problems, decoder.items(), step, 1, "fp32")
    rows = timed_rows(kinds, profile.kernels, Bandwidth(1e9, "given"), {})
    found = Roofline(step, Bandwidth(1e9, "given"), rows, profile.step_us)
    shown = found.to_json()
    total = sum(row["us"] for row in shown["rows"]) + shown["between_us"]
    assert total == pytest.approx(shown["step_us"], abs=0.01)
    assert shown["between_us"] > 0
    by_name = {row.name: row for row in rows}
    assert by_name.keys() >= {kind.name for kind in kinds}
    num_layers = len(engine.core.runner.model.model.layers)
    for name in ("self_attn.qkv_proj", "self_attn.attn", "mlp.gate", "mlp.experts"):
        assert by_name[name].launches == by_name[name].num_layers == num_layers
        assert by_name[name].us > 0
    assert by_name["lm_head"].launches == 1
    lines = text(found).splitlines()
    assert [line for line in lines if line.startswith(BETWEEN)]
    assert not engine.core.has_work and not engine.has_unfinished


@pytest.mark.parametrize(
    "name",
    ["gpt_oss", "gemma4-experts", "mimo_v2_flash", "deepseek_v3", "qwen3_5_moe",
     "nemotron_h-latent"],
)  # fmt: skip
def test_every_layer_of_any_architecture_has_its_time(name, checkpoint):
    engine = LLM(checkpoint(name), skip_tokenizer_init=True, max_num_seqs=4).llm_engine
    profile = StepBench(engine).measure(2, 20, 2, by_kernel=True)
    problems = [(layer, decision.problem) for layer, decision in engine.core.selection.records]
    decoder = engine.config.model_config.decoder
    kinds = layer_kinds(problems, decoder.items(), DecodeStep(2, 20), 1, "fp32")
    names = [kind.name for kind in kinds]
    assert len(set(names)) == len(names)
    launches = {time.layer: time.launches for time in profile.kernels}
    assert all(launches[layer] >= 1 for kind in kinds for layer in kind.layers)


def test_without_kernels_steps_are_only_timed(llm):
    profile = StepBench(llm.llm_engine).measure(2, 8, 3, by_kernel=False)
    assert profile.step_us > 0 and profile.kernels == () and profile.eager_step_us is None


def test_requests_that_do_not_fit_are_refused(llm, checkpoint):
    config = llm.llm_engine.config
    with pytest.raises(ConfigError, match="more than the 512 of --max-model-len"):
        check_fits(config, 1, 500, 16)
    check_fits(config, 1, 400, 16)
    small = LLM(
        checkpoint("llama"), skip_tokenizer_init=True, num_gpu_blocks_override=20, max_model_len=300
    )
    with pytest.raises(ConfigError, match="the KV cache does not hold so many tokens"):
        StepBench(small.llm_engine).measure(4, 100, 4, by_kernel=True)
    assert not small.llm_engine.core.has_work
    assert StepBench(small.llm_engine).measure(1, 100, 4, by_kernel=True).kernels


def test_layers_without_kernels_and_overlap_are_told(llm):
    records = llm.llm_engine.core.selection.records
    step, bandwidth = DecodeStep(1, 10), Bandwidth(1e9, "")
    problems = [(name, decision.problem) for name, decision in records]
    kinds = layer_kinds(problems, [], step, 1, "fp32")
    times = [KernelTime(problems[0][0], "a", 30.0, 1), KernelTime("", "ns::b<1>(int)", 9.0, 2)]
    rows = timed_rows(kinds, times, bandwidth, {})
    lines = text(Roofline(step, bandwidth, rows, 35.0, 20.0, 50.0)).splitlines()
    others = ", ".join(kind.name for kind in kinds[1:])
    assert lines[-4] == f"no kernel is known to be of {others}: rows with names have them"
    assert lines[-1].startswith("kernels take longer than the step")
    assert lines[-5].startswith("step ") and lines[-6].split()[-2:] == ["-4.0", "-11.4%"]


def test_small_kernels_of_no_layer_are_one_row():
    times = [KernelTime("", "void ns::big<1>(int)", 1000.0, 2)]
    times += [KernelTime("", f"ns::small_{i}<2>(float)", 1.0, 1) for i in range(5)]
    rows = timed_rows([], [*times, KernelTime(NORMS, "norm", 50.0, 3)], Bandwidth(1e12, ""), {})
    assert [(row.name, row.us) for row in rows] == [
        ("big", 1000.0), (NORMS, 50.0), ("other kernels", 5.0)
    ]  # fmt: skip
    assert rows[2].kernel == "small_0, small_1, small_2, 2 more" and rows[2].launches == 5
