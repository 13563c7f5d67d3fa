"""Decode steps by kernel on a GPU: every layer is found in a profile of CUDA graphs."""

import gc
from pathlib import Path

import pytest
import torch
from tiny_models import build_model, save

from vllm import LLM
from vllm.entrypoints.step_bench import StepBench
from vllm.kernels.report.roofline import Bandwidth, Roofline, timed_rows
from vllm.kernels.step_bytes import DecodeStep, layer_kinds
from vllm.platforms.bandwidth import memory_bandwidth
from vllm.worker.layer_marks import NORMS

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 512, "num_hidden_layers": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
HYBRID = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
MODELS = {
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_5_moe": HYBRID | EXPERTS | {"shared_expert_intermediate_size": 256},
}


def engine_of(name: str, folder: Path, is_eager: bool):
    save(build_model(name, **SIZES | MODELS[name]).bfloat16(), folder)
    llm = LLM(
        folder, skip_tokenizer_init=True, max_num_seqs=8, kv_cache_memory_bytes=1 << 28,
        enforce_eager=is_eager,
    )  # fmt: skip
    return llm.llm_engine


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_has_its_kernels_and_the_rows_add_up_to_the_step(name, is_eager, tmp_path):
    engine = engine_of(name, tmp_path, is_eager)
    runner, decoder = engine.core.runner, engine.config.model_config.decoder
    graphs = runner._graphs
    assert (graphs is None) == is_eager
    problems = [(layer, decision.problem) for layer, decision in engine.core.selection.records]
    for batch in (1, 8):
        profile = StepBench(engine).measure(batch, 64, 8, by_kernel=True)
        assert runner._graphs is graphs
        kinds = layer_kinds(problems, decoder.items(), DecodeStep(batch, 64), 1, "bf16")
        rows = timed_rows(kinds, profile.kernels, Bandwidth(1e12, "given"), {})
        found = Roofline(DecodeStep(batch, 64), Bandwidth(1e12, "given"), rows, profile.step_us)
        assert found.kernels_us + found.between_us == pytest.approx(profile.step_us)
        assert found.kernels_us > 0 and profile.eager_step_us > 0
        by_name = {row.name: row for row in rows}
        lost = {
            kind.name: {k.kernel for k in profile.kernels if k.layer in ("", *kind.layers)}
            for kind in kinds
            if by_name[kind.name].launches < len(kind.layers)
        }
        assert not lost, f"{name}, batch {batch}: no launch for each layer"
        assert all(by_name[kind.name].us > 0 for kind in kinds)
        assert by_name[NORMS].us > 0
        named = sum(time.us for time in profile.kernels if time.layer)
        assert named > 0.3 * found.kernels_us, [t for t in profile.kernels if not t.layer]
    del engine, runner, graphs
    gc.collect()
    torch.cuda.empty_cache()


def test_a_gpu_copies_at_more_than_a_tenth_of_a_terabyte_a_second():
    first, second = memory_bandwidth("cuda"), memory_bandwidth("cuda")
    assert 1e11 < first < 2e13
    assert first == pytest.approx(second, rel=0.1)
    torch.cuda.empty_cache()
