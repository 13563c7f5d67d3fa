"""A kernel that fails at its first call is quarantined by name, whatever it computes."""

from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import selection_cases
import torch
from torch import Tensor

from vllm import LLM
from vllm.distributed.all2all import NaiveAll2All
from vllm.distributed.groups import PeerError
from vllm.errors import ConfigError, KernelFailedError, VllmError
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.backends import cpu, deep_gemm, emulation
from vllm.kernels.evidence.quarantine import read_failures
from vllm.kernels.jit.ready import ready_sizes, running
from vllm.kernels.select.decision import Candidate, Decision
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.reason import DEFAULT_ORDER
from vllm.machine import Device
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.ops.paged_attention import PagedAttention
from vllm.worker import first_calls
from vllm.worker.first_calls import FirstCalls, _ends
from vllm.worker.step_inputs import StepInputs

CPU = torch.device("cpu")
FAULT = "CUDA error: an illegal memory access was encountered"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


def load(checkpoint, name: str = "llama", **options) -> LLM:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    return LLM(checkpoint(name), skip_tokenizer_init=True, **limits, **options)


def linear() -> LinearProblem:
    block = WeightFormat.parse("fp8-block")
    return LinearProblem(4096, 4096, block, (ActScheme.DYNAMIC_GROUP128,))


def failing(error: Exception):
    """A maker of kernels that raise it when they are called."""

    def make(problem, tensors, candidate):
        def kernel(*given):
            raise error

        return kernel

    return make


def caused_by(cause: Exception) -> Exception:
    error = RuntimeError("Ninja build failed")
    error.__cause__ = cause
    return error


def chosen(llm: LLM, family: str) -> set[str]:
    records = llm.llm_engine.core.executor.selection.records
    return {decision.chosen for _, decision in records if decision.problem.family == family}


@pytest.mark.parametrize(("family", "name"), [("linear", "llama"), ("moe", "qwen3_moe")])
def test_the_next_start_chooses_another_kernel(checkpoint, monkeypatch, family, name):
    monkeypatch.setattr(cpu, family, failing(RuntimeError(FAULT)))
    with pytest.raises(KernelFailedError) as caught:
        load(checkpoint, name)
    text = str(caught.value)
    assert "kernel cpu failed for model.layers.0." in text and FAULT in text
    assert "with 1 tokens" in text and "vllm kernels quarantine --clear" in text
    entered = read_failures()
    assert {f.backend for f in entered} == {"cpu"}
    assert all(f.why == "library" and FAULT in f.reason for f in entered)
    # All that fail are entered at once.
    count = {"linear": 5, "moe": 1}[family]
    assert len({f.size_key for f in entered}) == text.count("kernel cpu failed") == count
    llm = load(checkpoint, name)
    assert "torch" in chosen(llm, family)
    if family == "moe":
        assert "cpu" in chosen(llm, "linear")
    rejected = [
        reason.text
        for _, decision in llm.llm_engine.core.executor.selection.records
        if decision.problem.family == family
        for candidate in decision.candidates
        if candidate.backend == "cpu"
        for reason in candidate.reasons
    ]
    assert any("quarantined on" in text and FAULT in text for text in rejected)


@pytest.mark.parametrize(
    "error", [caused_by(CalledProcessError(1, "nvcc")), RuntimeError("quota of 8 killed lanes")]
)
def test_a_compiler_that_refuses_a_kernel_speaks_against_it(checkpoint, monkeypatch, error):
    monkeypatch.setattr(cpu, "linear", failing(error))
    with pytest.raises(KernelFailedError):
        load(checkpoint)
    assert read_failures()


def test_one_that_was_asked_for_is_refused_from_then_on(checkpoint, monkeypatch):
    monkeypatch.setattr(cpu, "linear", failing(RuntimeError(FAULT)))
    for expected in (KernelFailedError, Exception):
        with pytest.raises(expected, match="illegal memory access"):
            load(checkpoint, linear_backend="cpu")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        OSError(28, "No space left on device"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        CalledProcessError(1, "gcc"),
        ModuleNotFoundError("No module named 'nvidia'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate"),
        caused_by(OSError(122, "Disk quota exceeded")),
        caused_by(CalledProcessError(-9, "nvcc")),
        caused_by(CalledProcessError(127, "ninja")),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    ],
)
def test_what_is_the_machines_fault_speaks_against_no_kernel(checkpoint, monkeypatch, error):
    monkeypatch.setattr(cpu, "linear", failing(error))
    with pytest.raises(Exception) as caught:
        load(checkpoint)
    assert not isinstance(caught.value, KernelFailedError)
    assert not read_failures()


# ---------------------------------------------------------------- of one engine's layers


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        return load(checkpoint).llm_engine.core.executor


def test_a_kernel_that_hangs_is_entered_and_nothing_else_is_called(engine, monkeypatch):
    calls = FirstCalls(engine.runner.model, engine.selection, hang_seconds=7)
    waits = []

    def wait() -> None:
        waits.append(1)
        if len(waits) > 1:
            raise PeerError("a step was not over after 7 s: a rank timed out")

    monkeypatch.setattr(calls, "_wait", wait)
    with pytest.raises(KernelFailedError, match="did not end within 7 s"):
        calls.of_weights(1, 1)
    assert len(waits) == 2 and len(read_failures()) == 1


def test_when_the_gpu_is_lost_nothing_else_is_called(engine, monkeypatch):
    calls = FirstCalls(engine.runner.model, engine.selection)
    waits = []

    def wait() -> None:
        waits.append(1)
        if len(waits) > 3:
            raise RuntimeError(FAULT)

    monkeypatch.setattr(calls, "_wait", wait)
    with pytest.raises(KernelFailedError, match="illegal memory access"):
        calls.of_weights(1, 1)
    (failure,) = read_failures()
    assert len(waits) == 5 and failure.size_key.startswith("fp32:224x48")  # the third layer's


def test_what_ran_before_is_blamed_on_no_kernel(engine, monkeypatch):
    calls = FirstCalls(engine.runner.model, engine.selection)

    def wait() -> None:
        raise RuntimeError(FAULT)

    monkeypatch.setattr(calls, "_wait", wait)
    for call in (lambda: calls.of_weights(1, 1), lambda: calls.of_attention(None, [])):
        with pytest.raises(VllmError, match=f"before kernels were tried failed: .*{FAULT}") as e:
            call()
        assert not isinstance(e.value, KernelFailedError) and not read_failures()


def test_a_mistake_of_the_user_is_no_failure_of_a_kernel(checkpoint, monkeypatch):
    monkeypatch.setattr(cpu, "linear", failing(ConfigError("a wrong flag")))
    with pytest.raises(ConfigError, match="a wrong flag"):
        load(checkpoint)
    assert not read_failures()


def test_emulated_kernels_are_not_called(checkpoint, monkeypatch):
    monkeypatch.setattr(emulation, "linear", failing(RuntimeError(FAULT)))
    load(checkpoint, linear_backend="emulate:cutlass@sm_90", quantization="fp8")
    assert not read_failures()


def test_where_the_file_cannot_be_written_that_is_told_beside_the_failure(
    checkpoint, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    monkeypatch.setattr(cpu, "linear", failing(RuntimeError(FAULT)))
    with pytest.raises(VllmError, match=f"(?s){FAULT}.*quarantine.json cannot be written") as e:
        load(checkpoint)
    assert not isinstance(e.value, KernelFailedError)


def test_layers_are_called_with_every_size_that_may_be_another_kernel(engine, monkeypatch):
    called = []
    monkeypatch.setattr(
        FirstCalls, "_call", lambda self, layer, _, count, call: called.append((layer, count)) or 1
    )
    calls = FirstCalls(engine.runner.model, engine.selection)
    calls.of_weights(1000, 5)
    assert [count for layer, count in called if layer.endswith("qkv_proj")] == [1, 1000]
    # Rows that somebody reads: of each request, or of a prompt whose logprobs are wanted.
    assert [count for layer, count in called if layer == "lm_head"] == [1, 64]
    calls.of_weights(1000, 100)
    assert called[-1] == ("lm_head", 100)
    split = Candidate("all", ActScheme.NONE, parts=((16, "skinny"), (64, "triton"), (None, "cpu")))
    decision = Decision(linear(), Device.parse("sm_90"), "all", DEFAULT_ORDER, (split,))
    assert _ends(decision, 1000) == [1, 16, 17, 64, 65, 1000] and _ends(decision, 20) == [
        1,
        16,
        17,
        20,
    ]


def test_experts_are_called_with_the_tokens_of_all_engines(checkpoint, monkeypatch):
    executor = load(checkpoint, "qwen3_moe").llm_engine.core.executor
    called = []
    monkeypatch.setattr(
        FirstCalls, "_call", lambda self, layer, _, count, call: called.append((layer, count)) or 1
    )
    calls = FirstCalls(executor.runner.model, executor.selection)
    calls.of_weights(100, 5, num_engines=3)
    counts = [count for layer, count in called if layer.endswith("experts")]
    assert counts == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 300]


def test_attention_is_called_for_prompts_and_for_decoding(engine, monkeypatch):
    calls = FirstCalls(engine.runner.model, engine.selection)
    inputs = StepInputs(64, 4, 1, 16, CPU)
    asked = []

    def noted(self, q: Tensor, k: Tensor, v: Tensor, batch) -> Tensor:
        asked.append((len(q), len(batch.seq_lens)))
        if len(q) == 4:
            raise RuntimeError(FAULT)
        return q

    monkeypatch.setattr(PagedAttention, "__call__", noted)
    with pytest.raises(KernelFailedError, match=r"\.self_attn\.attn.* with 4 tokens"):
        calls.of_attention(inputs, [(64, 1, 64), (4, 4, 32), (3, 1, 3)])
    assert asked == [(64, 1), (4, 4)]  # all layers are alike
    (failure,) = read_failures()
    assert failure.size_key.startswith("attention ") and "with 4 tokens" in failure.reason


def test_what_writes_the_cache_fails_by_its_own_name(engine, monkeypatch):
    def broken(*given) -> None:
        raise RuntimeError(FAULT)

    for layer in engine.runner.model.modules():
        if isinstance(layer, Attention):
            monkeypatch.setattr(layer.kernel, "_write", broken)
    calls = FirstCalls(engine.runner.model, engine.selection)
    with pytest.raises(KernelFailedError, match="illegal memory access"):
        calls.of_attention(StepInputs(64, 4, 1, 16, CPU), [(4, 4, 32)])
    (failure,) = read_failures()
    assert failure.size_key.startswith("kv_quant ")


def test_what_stands_in_is_blamed_for_what_it_computes():
    problem = linear()
    candidates = [Candidate(name, problem.act[0]) for name in ("deep_gemm", "cutlass")]
    decision = Decision(problem, Device.parse("sm_90"), "deep_gemm", DEFAULT_ORDER, (*candidates,))
    assert running(decision, 64) == "deep_gemm"
    (call,) = deep_gemm.compiled_calls(problem, candidates[0], (1, 1))
    ready = ready_sizes(call.name)
    try:
        ready.set([64, 128], [128])
        assert running(decision, 64) == "cutlass" and running(decision, 65) == "deep_gemm"
    finally:
        ready.__init__()


def test_of_a_split_the_part_that_computes_so_many_tokens_is_blamed(engine):
    problem = next(d.problem for _, d in engine.selection.records if d.problem.family == "linear")
    parts = ((16, "skinny"), (64, "triton"), (None, "torch"))
    candidates = tuple(Candidate(name, problem.act[0]) for name in ("skinny", "triton", "torch"))
    split = Candidate("all", problem.act[0], parts=parts)
    device = Device.parse("sm_90")
    decision = Decision(problem, device, "all", DEFAULT_ORDER, (split, *candidates))
    found = [running(decision, n) for n in (1, 16, 17, 64, 65)]
    assert found == ["skinny", "skinny", "triton", "triton", "torch"]


# ---------------------------------------------------------------- how often each is called


def counts_of(llm: LLM, monkeypatch, *given: int) -> dict[str, list[int]]:
    executor, called = llm.llm_engine.core.executor, {}
    monkeypatch.setattr(
        first_calls, "_multiply", lambda layer, m: called.setdefault(layer.prefix, []).append(m)
    )
    FirstCalls(executor.runner.model, executor.selection).of_weights(*given)
    return called


def test_experts_that_exchange_rows_get_one_for_each_of_a_tokens(checkpoint, monkeypatch):
    llm = load(checkpoint, "qwen3_moe")
    model = llm.llm_engine.core.executor.runner.model
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    assert max(counts_of(llm, monkeypatch, 16, 4, 2)[layers[0].prefix]) == 32
    for layer in layers:
        monkeypatch.setattr(layer, "all2all", object.__new__(NaiveAll2All))
    called = counts_of(llm, monkeypatch, 16, 4, 2)
    assert max(called[layers[0].prefix]) == 32 * layers[0].problem.top_k


def test_layers_of_one_size_with_other_kernels_are_each_called(checkpoint, monkeypatch):
    down = "model.layers.{}.mlp.down_proj".format
    called = counts_of(load(checkpoint, kernel=[f"{down(0)}=torch"]), monkeypatch, 64, 4)
    assert {name for name in called if name.endswith("down_proj")} == {down(0), down(1)}


def test_after_a_failure_a_kernel_is_not_called_again(engine, monkeypatch):
    called = []

    def fails(layer, num_tokens: int) -> None:
        called.append(num_tokens)
        raise RuntimeError(FAULT)

    monkeypatch.setattr(first_calls, "_multiply", fails)
    with pytest.raises(KernelFailedError):
        FirstCalls(engine.runner.model, engine.selection).of_weights(64, 4)
    assert len(called) > 1 and set(called) == {1}


def test_a_rank_is_called_with_its_own_experts():
    asked = []
    layer = SimpleNamespace(
        problem=selection_cases.moe(cut_experts=8),
        all2all=None,
        decision=SimpleNamespace(device=SimpleNamespace(kind="cpu")),
        kernel=lambda x, weights, ids: asked.append((tuple(ids.shape), int(ids.max()))),
    )
    first_calls._multiply(layer, 64)
    assert asked == [((64, 8), 256 // 8 - 1)]
