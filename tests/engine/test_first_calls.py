"""A kernel that fails at its first call is quarantined by name, whatever it computes."""

import pytest
import torch
from torch import Tensor

from vllm import LLM
from vllm.distributed.groups import PeerError
from vllm.errors import KernelFailedError
from vllm.kernels.backends import cpu
from vllm.kernels.jit.ready import running
from vllm.kernels.spec import DEFAULT_ORDER, Candidate, Decision, Device
from vllm.kernels.tune_quarantine import read_failures
from vllm.ops.paged_attention import PagedAttention
from vllm.worker.first_calls import FirstCalls
from vllm.worker.step_inputs import StepInputs

CPU = torch.device("cpu")
FAULT = "CUDA error: an illegal memory access was encountered"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


def load(checkpoint, name: str = "llama", **options) -> LLM:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    return LLM(checkpoint(name), skip_tokenizer_init=True, **limits, **options)


def failing(error: Exception):
    """A maker of kernels that raise it when they are called."""

    def make(problem, tensors, candidate):
        def kernel(*given):
            raise error

        return kernel

    return make


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
    calls = FirstCalls(engine.runner.model, engine.selection)
    waits = []

    def wait() -> None:
        waits.append(1)
        raise PeerError("a step was not over after 60 s: a rank timed out")

    monkeypatch.setattr(calls, "_wait", wait)
    with pytest.raises(KernelFailedError, match="did not end within 60 s"):
        calls.of_weights(1, 1)
    assert len(waits) == len(read_failures()) == 1


def test_when_the_gpu_is_lost_nothing_else_is_called(engine, monkeypatch):
    calls = FirstCalls(engine.runner.model, engine.selection)
    waits = []

    def wait() -> None:
        waits.append(1)
        raise RuntimeError(FAULT)

    monkeypatch.setattr(calls, "_wait", wait)
    with pytest.raises(KernelFailedError, match="illegal memory access"):
        calls.of_weights(1, 1)
    assert len(waits) == 2 and len(read_failures()) == 1


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
        calls.of_attention(inputs, [(64, 1, 64), (4, 4, 32)])
    assert asked == [(64, 1), (4, 4)]  # all layers are alike
    (failure,) = read_failures()
    assert failure.size_key.startswith("attention ") and "with 4 tokens" in failure.reason


def test_of_a_split_the_part_that_computes_so_many_tokens_is_blamed(engine):
    problem = next(d.problem for _, d in engine.selection.records if d.problem.family == "linear")
    parts = ((16, "skinny"), (64, "triton"), (None, "torch"))
    candidates = tuple(Candidate(name, problem.act[0]) for name in ("skinny", "triton", "torch"))
    split = Candidate("all", problem.act[0], parts=parts)
    device = Device.parse("sm_90")
    decision = Decision(problem, device, "all", DEFAULT_ORDER, (split, *candidates))
    found = [running(decision, n) for n in (1, 16, 17, 64, 65)]
    assert found == ["skinny", "skinny", "triton", "triton", "torch"]
