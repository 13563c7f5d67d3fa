"""Ranks of one engine take the same kernels, or do not start and say what differs between them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_layouts import e4m3, store
from machines import write_distribution, write_package

from vllm import LLM, SamplingParams
from vllm.errors import ConfigError, KernelFailedError
from vllm.kernels import own_backend, registry
from vllm.kernels.evidence.quarantine import read_failures
from vllm.kernels.evidence.tables import Entry, Table, write_table
from vllm.platforms.probe import probe_chip

# A copy of the CPU's kernel. What it computes, and what it takes, may depend on the rank.
BACKEND = """
import sys
from vllm.kernels.backends import cpu
from vllm.kernels.select.reason import Reason, Why
from vllm.kernels.select.spec import KernelSpec

IS_SECOND = sys.orig_argv[-1] == "vllm-rank-1"

def check(problem):
    return [Reason(Why.SHAPE, "not here")] if {takes_none} else []

class Mine:
    SPECS = (
        KernelSpec("mine", "linear", frozenset({{"cpu"}}), frozenset({{"fp32"}}),
                   frozenset({{"fp32"}}), check=check),
    )

    def linear(self, problem, tensors, candidate):
        kernel = cpu.linear(problem, tensors, candidate)
        return lambda x: kernel(x) * ({factor})

mine = Mine()
"""


@pytest.fixture(autouse=True)
def backends_of_this_process():
    """Those of files are gone after the test."""
    yield
    registry._own.clear()
    own_backend._loaded.clear()
    for cached in (registry.backend_names, registry.specs, registry.built):
        cached.cache_clear()


@pytest.fixture
def of_ranks(tmp_path, monkeypatch):
    """of_ranks(rank 0's code, rank 1's code): what each rank runs before anything of ours."""

    def arrange(*codes: str) -> None:
        lines = ["import os, sys"]
        for rank, code in enumerate(codes):
            lines.append(f"if sys.orig_argv[-1] == 'vllm-rank-{rank}':")
            lines += [f"    {line}" for line in code.splitlines() or ["pass"]]
        (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return arrange


@pytest.fixture
def caches(tmp_path, of_ranks) -> tuple[Path, Path]:
    """Of each rank its own, as on two machines."""
    folders = tmp_path / "first", tmp_path / "second"
    of_ranks(*(f"os.environ['VLLM_CACHE_ROOT'] = {str(folder)!r}" for folder in folders))
    return folders


def load(folder, **options) -> LLM:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    return LLM(folder, skip_tokenizer_init=True, tensor_parallel_size=2, **limits, **options)


def decisions(llm: LLM, part: str) -> list[dict]:
    found = llm.llm_engine.core.executor.kernels()["decisions"]
    return [d for d in found if any(part in layer for layer in d["layers"])]


def tokens(llm: LLM) -> list[int]:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 4, 3]}
    return list(llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids)


def refusal(folder, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, **options)
    return str(caught.value)


# ---------------------------------------------------------------- facts


@pytest.mark.slow
def test_another_variable_is_named_with_its_rank(checkpoint, of_ranks):
    of_ranks("", "os.environ['VLLM_USE_DEEP_GEMM'] = '0'")
    text = refusal(checkpoint("llama"))
    assert (
        "rank 1 (tensor-parallel 1) has VLLM_USE_DEEP_GEMM=0, rank 0 has none (variables)" in text
    )


@pytest.mark.slow
def test_another_version_of_a_library_is_named_with_its_rank(checkpoint, of_ranks, tmp_path):
    for folder, version in (("first", "0.1.3"), ("second", "0.1.5")):
        write_package(tmp_path / folder, "deep_gemm")
        write_distribution(tmp_path / folder, "sgl-deep-gemm", version)
    of_ranks(*(f"sys.path.insert(0, {str(tmp_path / name)!r})" for name in ("first", "second")))
    text = refusal(checkpoint("llama"))
    assert text.startswith("rank 1 (tensor-parallel 1) has deep_gemm 0.1.5, rank 0 has deep_gemm")
    assert "rank 0 has deep_gemm 0.1.3 (libraries): start all ranks with the same" in text
    assert text.count("deep_gemm") == 2, "what is equal is not told"


@pytest.mark.slow
def test_a_table_that_only_one_rank_has_is_named_with_it(checkpoint, caches):
    chip = probe_chip()
    rows = {"fp32:8x8 fp32 none": {"cpu": Entry("torch 0", "2026-11-24", ((1, 5.0),))}}
    own, others = (folder / "kernel_tables" / chip.file_name for folder in caches)
    others.parent.mkdir(parents=True)
    write_table(others, Table(chip, "a CPU", rows))
    text = refusal(checkpoint("llama"))
    assert f"rank 1 (tensor-parallel 1) has {chip.file_name} " in text
    assert "rank 0 has none (tables of measured kernels)" in text
    # One with the same rows does, wherever it is.
    own.parent.mkdir(parents=True)
    own.write_bytes(others.read_bytes())
    assert len(tokens(load(checkpoint("llama")))) == 8


# ---------------------------------------------------------------- decisions


@pytest.mark.slow
def test_a_backend_that_is_chosen_on_one_rank_alone_is_named_with_its_layer(
    checkpoint, of_ranks, tmp_path
):
    file = tmp_path / "mine.py"
    file.write_text(BACKEND.format(takes_none="IS_SECOND", factor="1.0"))
    text = refusal(checkpoint("llama"), kernel=[f"*.down_proj={file}:mine"], on_unmet="fallback")
    assert "rank 1 (tensor-parallel 1) has cpu, activations none, scales any" in text
    assert "rank 0 has mine, " in text
    assert "(linear kernel of model.layers.0.mlp.down_proj)" in text


def test_a_kernel_that_is_wrong_on_one_rank_serves_on_none(
    checkpoint, caches, tmp_path, monkeypatch
):
    file, folder = tmp_path / "mine.py", checkpoint("llama")
    file.write_text(BACKEND.format(takes_none="False", factor="1.03 if IS_SECOND else 1.0"))
    options = {"kernel": [f"*.down_proj={file}:mine"], "on_unmet": "fallback"}
    with pytest.raises(KernelFailedError, match=r"rank 1 \(.*kernel mine failed"):
        load(folder, **options)
    known = []
    for cache in caches:
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache))
        known.append({failure.backend for failure in read_failures()})
    assert known == [set(), {"mine"}]
    llm = load(folder, **options)
    for decision in decisions(llm, ".down_proj"):
        assert decision["chosen"] == "cpu"
        mine = next(c for c in decision["candidates"] if c["backend"] == "mine")
        assert mine["reasons"][0]["text"].startswith("quarantined on ")
        assert mine["reasons"][0]["text"].endswith(", on rank 1")
    assert len(tokens(llm)) == 8


# ---------------------------------------------------------------- at load

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip


def blocks(weight: np.ndarray):
    """Of E4M3 codes with scales that are powers of two, but in the last 128 of 256 rows: there
    UE8M0 scales move a code to the middle between two others."""
    rows, columns = weight.shape
    scales = np.full((-(-rows // 128), -(-columns // 128)), 2.0**-8, np.float32)
    codes = e4m3(np.clip(np.round(weight * 2**8), -8, 8))
    if rows == 256:
        scales[1] *= 0.945
        codes[128:] = 1.125
    stored = {"weight": codes, "weight_scale_inv": torch.from_numpy(scales)}
    return stored, codes.float().numpy() * np.repeat(scales, 128, 0)[:rows, :1]


@pytest.mark.slow
def test_a_weight_that_loses_too_much_on_one_rank_has_another_kernel_on_all(checkpoint, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    store(checkpoint("llama", **SIZES), folder, blocks, BLOCKS)
    llm = load(folder, linear_backend="emulate:sm_100", max_requant_error=0.03)
    shown = llm.llm_engine.core.executor.kernels()
    ledger = {e["layer"]: e["relative_error"] for e in shown["ledger"]["entries"]}
    assert set(ledger.values()) == {0.0}, "rank 0 itself has lost nothing"
    (lossy,) = decisions(llm, ".gate_up_proj")
    assert lossy["chosen"] != "deep_gemm" and lossy["problem"]["requant_error"] > 0.05
    assert {d["chosen"] for d in decisions(llm, ".down_proj")} == {"deep_gemm"}
    assert len(tokens(llm)) == 8
