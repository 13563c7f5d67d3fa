"""Ranks together give the tokens that one gives, and say so when one of them is gone."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from slow import quick
from tiny_configs import ARCHITECTURES

from vllm import LLM, SamplingParams
from vllm.core.outputs import SchedulerOutput
from vllm.distributed import world
from vllm.distributed.groups import PeerError, wait_for
from vllm.distributed.layout import Layout
from vllm.errors import ConfigError, EngineDeadError, VllmError
from vllm.sampling_params import StructuredOutputsParams

UNEVEN = {"hidden_size": 180, "intermediate_size": 300, "head_dim": 24, "num_hidden_layers": 2}
EXPERTS = UNEVEN | {"moe_intermediate_size": 76}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.3, min_tokens=9),
    SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, ignore_eos=True),
]
PROMPTS = [[(7 * i + 3 + length) % 90 + 3 for i in range(length)] for length in (44, 28, 12, 60)]


# Few tokens a step and few blocks: prompts come in chunks, and requests are preempted.
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "max_model_len": 128,
    "num_gpu_blocks_override": 8,
    "skip_tokenizer_init": True,
}


def load(folder, **options) -> LLM:
    return LLM(folder, **OPTIONS | options)


def outputs(llm: LLM):
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = llm.generate(inputs, PARAMS, use_tqdm=False)
    logprobs = [
        [entry.logprob for entry in position.values()]
        for position in [*found[0].outputs[0].logprobs, *found[3].prompt_logprobs[1:]]
    ]
    return [output.outputs[0].token_ids for output in found], logprobs


def layers(llm: LLM) -> list[str]:
    """Those whose kernels are shown, by name."""
    decisions = llm.llm_engine.core.executor.kernels()["decisions"]
    return sorted(layer for decision in decisions for layer in decision["layers"])


def check(folder, alone=None, **options) -> LLM:
    """An engine of several ranks that gave what one rank gives. alone: options of both."""
    one = load(folder, **alone or {})
    wanted, wanted_logprobs = outputs(one)
    llm = load(folder, **(alone or {}) | options)
    assert layers(llm) == layers(one)
    tokens, logprobs = outputs(llm)
    assert tokens == wanted
    for ours, theirs in zip(logprobs, wanted_logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4)
    scheduler = llm.llm_engine.core.scheduler
    # With windows all fit; tests/models/test_window_caches.py preempts those.
    assert scheduler.num_preemptions > 0 or scheduler.blocks.has_windows
    return llm


def test_two_tensor_parallel_ranks_and_one_that_is_killed(checkpoint):
    folder = checkpoint("llama-tied-biased", vocab_size=97)
    llm = check(folder, tensor_parallel_size=2)
    executor = llm.llm_engine.core.executor
    assert executor.kernels()["device"]
    os.kill(executor._handles[1].process._process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(tensor-parallel 1\): killed by SIGKILL"):
        outputs(llm)
    assert executor._handles[0].process.end(0) != "it closed its connection", "the others end too"


@pytest.mark.slow
def test_scale_blocks_that_shards_cut_and_a_rank_that_hangs(checkpoint):
    folder, seconds = checkpoint("qwen3", **UNEVEN), 4.0
    options = {"tensor_parallel_size": 2, "distributed_timeout_seconds": seconds}
    llm = check(folder, alone={"quantization": "fp8"}, **options)
    os.kill(llm.llm_engine.core.executor._handles[1].process._process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    words = r"^rank 1 \(.*\) gave no answer; rank 0 .*: all-reduce with rank 1 .*imed"
    with pytest.raises(EngineDeadError, match=words):
        outputs(llm)
    assert seconds - 1 < time.monotonic() - begin < 3 * seconds


@pytest.mark.slow
def test_a_message_that_a_hanging_rank_does_not_take_ends_the_engine(checkpoint):
    llm = load(checkpoint("llama"), tensor_parallel_size=2, distributed_timeout_seconds=2.0)
    executor = llm.llm_engine.core.executor
    os.kill(executor._handles[1].process._process.pid, signal.SIGSTOP)
    too_much = {"a request": torch.zeros(1 << 20, dtype=torch.int32)}
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"^rank 1 \(.*\) gave no answer within 2 s"):
        executor.execute_model(SchedulerOutput(), too_much)
    assert time.monotonic() - begin < 10


# When all but the model is there, and ranks are connected.
_SLOW = """
import builtins, time
original = builtins.__import__
def importing(name, globals=None, *args, **options):
    module = original(name, globals, *args, **options)
    if globals and globals.get("__name__") == "vllm.model_executor.models.decoder":
        builtins.__import__ = original
        time.sleep(5)
    return module
builtins.__import__ = importing
"""


@pytest.mark.slow
def test_a_rank_may_read_for_longer_than_a_step_may_take(checkpoint, in_second_rank):
    """Also where ranks agree on what re-quantising costs, layer by layer."""
    in_second_rank(_SLOW)
    lossy = {"quantization": "fp8", "linear_backend": "emulate:deep_gemm@sm_100"}
    load(checkpoint("llama"), tensor_parallel_size=2, distributed_timeout_seconds=2.0, **lossy)


def test_merged_weights_are_cut_head_by_head(checkpoint):
    """q, k and v are one tensor in the checkpoint, as are gate and up."""
    llm = check(checkpoint("phi3", vocab_size=97), tensor_parallel_size=2)
    assert llm.llm_engine.core.executor.kernels()["device"]


# Where two tokens of the default weights are as likely to the sixth digit.
SEEDS = {"exaone4": 1}
# Groups of its layers share blocks, of which one request takes more than 8.
MORE_BLOCKS = {"num_gpu_blocks_override": 10}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_ranks_give_the_tokens_of_one(checkpoint, name):
    alone = MORE_BLOCKS if name.startswith("llama4") else None
    check(checkpoint(name, seed=SEEDS.get(name, 0)), alone, tensor_parallel_size=2)


def test_heads_over_latents_that_every_rank_has(checkpoint):
    llm = check(checkpoint("deepseek_v3"), tensor_parallel_size=2)
    names = layers(llm)
    assert any(name.endswith("fused_qkv_a_proj") for name in names)


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_whose_input_the_router_scales(checkpoint, monkeypatch, is_whole):
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "naive")
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": is_whole}
    check(checkpoint("llama4"), MORE_BLOCKS, **options)


@pytest.mark.slow
def test_whole_experts_on_each_rank_by_all_to_all(checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "naive")
    folder = checkpoint("qwen3_moe", **EXPERTS)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    check(folder, alone={"quantization": "fp8"}, **options)


@pytest.mark.parametrize("name", quick(["glm4_moe-normed", "minimax_m2"], ["minimax_m2"]))
@pytest.mark.parametrize("shares", quick(["parts of experts", "whole experts"], ["whole experts"]))
def test_sigmoid_routers_choose_alike_on_two_ranks(checkpoint, monkeypatch, name, shares):
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "naive")
    whole = shares == "whole experts"
    # Both ranks have the one KV head, whose norm counts it once.
    changes = {} if whole else {"num_key_value_heads": 1}
    folder = checkpoint(name, **changes)
    check(folder, tensor_parallel_size=2, enable_expert_parallel=whole)


@pytest.mark.parametrize("name", quick(["nemotron_h", "nemotron_h-latent"], ["nemotron_h-latent"]))
def test_mamba2_heads_and_experts_of_latents_on_two_ranks(checkpoint, name):
    check(checkpoint(name), tensor_parallel_size=2)


@pytest.mark.slow
def test_two_stages_of_two_ranks_with_whole_experts(checkpoint):
    options = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    check(checkpoint("qwen3_5_moe"), **options, enable_expert_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_delta_net_heads_and_a_shared_expert_with_scale_blocks_that_shards_cut(checkpoint, name):
    folder = checkpoint(name)
    check(folder, alone={"quantization": "fp8"}, tensor_parallel_size=2)


@pytest.mark.slow
def test_two_stages_follow_a_grammar(text_checkpoint):
    llm = check(text_checkpoint, {"skip_tokenizer_init": False}, pipeline_parallel_size=2)
    grammar = StructuredOutputsParams(regex="(ab){3,9}c")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=32, structured_outputs=grammar)
    text = llm.generate("jumps over", params, use_tqdm=False)[0].outputs[0].text
    assert text.removesuffix("c").replace("ab", "") == ""


def test_ranks_of_a_machine_share_its_memory_for_recurrent_states(checkpoint):
    folder, one, two = checkpoint("qwen3_5"), Layout(), Layout(tensor_size=2)
    needed = {}
    for layout in (one, two):
        size = layout.tensor_size
        options = {"skip_tokenizer_init": True, "max_num_seqs": 2**20, "load_format": "dummy"}
        options["hf_overrides"] = {"linear_value_head_dim": 256}
        with pytest.raises(VllmError, match="so many recurrent states need") as caught:
            LLM(folder, tensor_parallel_size=size, **options)
        needed[size] = float(
            re.search(r"and ([0-9.]+) GiB of memory are free", str(caught.value))[1]
        )
    assert needed[2] == pytest.approx(needed[1] / 2, rel=0.2)


class NeverOver:
    """An event of a GPU that waits for ever."""

    def query(self) -> bool:
        return False


def test_a_wait_for_a_gpu_whose_peer_is_stuck_ends():
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"not over after 0\.2 s"):
        wait_for(NeverOver(), 0.2)
    assert 0.2 <= time.monotonic() - begin < 5


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "llama",
            {"tensor_parallel_size": 4},
            r"num_attention_heads = 6 .* tp = 4: take a divisor",
        ),
        ("llama", {"tensor_parallel_size": 0}, "--tensor-parallel-size 0"),
        ("llama", {"tensor_parallel_size": "2"}, "tensor_parallel_size='2': it takes a whole"),
        (
            "llama",
            {"pipeline_parallel_size": 2.0},
            r"pipeline_parallel_size=2\.0: it takes a whole",
        ),
        ("llama", {"pipeline_parallel_size": 4}, "3 layers"),
        ("llama", {"enable_expert_parallel": True}, "has no experts"),
        ("llama", {"data_parallel_size": 2}, "vllm serve --data-parallel-size 2"),
        ("qwen3_moe", {"data_parallel_size": 4, "enable_expert_parallel": True}, "ep = 4"),
        ("llama", {"distributed_executor_backend": "rey"}, "did you mean ray"),
        (
            "llama",
            {"distributed_executor_backend": "uni", "pipeline_parallel_size": 2},
            "uni runs one rank",
        ),
        ("llama", {"distributed_timeout_seconds": 0.0}, "--distributed-timeout-seconds"),
        ("llama", {"distributed_timeout_seconds": "5"}, "distributed_timeout_seconds='5'"),
        ("llama", {"distributed_executor_backend": 3}, "distributed_executor_backend=3"),
    ],
)
def test_what_cannot_be_spread_is_refused_before_anything_starts(checkpoint, name, options, words):
    with pytest.raises(ConfigError, match=words):
        load(checkpoint(name), **options)


def test_an_unknown_all_to_all_backend_is_refused(checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "deepep")
    with pytest.raises(ConfigError, match="naive, allgather_reducescatter, deepep_high"):
        load(checkpoint("qwen3_moe"), tensor_parallel_size=2, enable_expert_parallel=True)


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_low_latency"])
def test_a_library_that_is_missing_is_told_of_before_weights_are_read(
    checkpoint, monkeypatch, backend
):
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", backend)
    with pytest.raises(ConfigError, match=f"^VLLM_ALL2ALL_BACKEND={backend} needs DeepEP"):
        load(checkpoint("qwen3_moe"), tensor_parallel_size=2, enable_expert_parallel=True)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_gpus_without_nccl_are_refused():
    with pytest.raises(ConfigError, match="several GPUs need NCCL"):
        world.join(Layout(0, tensor_size=2), False, ("127.0.0.1", 1), "cuda", 1.0, {})


@pytest.fixture
def in_second_rank(tmp_path, monkeypatch):
    """in_second_rank(code): rank 1 runs this before anything of ours."""

    def arrange(code: str) -> None:
        lines = "\n    ".join(code.splitlines())
        source = f"import sys\nif sys.orig_argv[-1] == 'vllm-rank-1':\n    {lines}\n"
        (tmp_path / "sitecustomize.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return arrange


# Once all but the model is there, only 100 MB more.
_LITTLE_MEMORY = """
import builtins, resource
original = builtins.__import__
def importing(name, globals=None, *args, **options):
    module = original(name, globals, *args, **options)
    if globals and globals.get("__name__") == "vllm.model_executor.models.decoder":
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + 100 * 2**20
        _, hardest = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hardest))
    return module
builtins.__import__ = importing
"""


@pytest.mark.slow
def test_a_rank_without_memory_is_named(checkpoint, in_second_rank):
    in_second_rank(_LITTLE_MEMORY)
    options = {"load_format": "dummy", "hf_overrides": {"vocab_size": 1 << 20}}
    with pytest.raises(VllmError, match=r"rank 1 \(tensor-parallel 1\): .*allocate"):
        load(checkpoint("llama"), tensor_parallel_size=2, **options)
