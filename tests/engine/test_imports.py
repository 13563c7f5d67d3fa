"""What a start must not import: each of these takes a good part of a second, or seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slow import quick

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = {"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton"}
SERVER = {"fastapi", "pydantic", "uvicorn"}
LAZY = {"xgrammar", "ray", "flashinfer", "deep_gemm", "accelerate", "torchvision", "scipy"}


def imported_by(code: str) -> set[str]:
    """Modules that a process has imported after `code`."""
    code += "\nimport json, sys; print(json.dumps([n for n, m in sys.modules.items() if m]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_names_for_scripts_import_nothing_heavy():
    modules = imported_by("from vllm import LLM, SamplingParams")
    assert "vllm.entrypoints.llm" in modules
    assert not modules & ({"torch", "numpy", "transformers"} | COMPILERS | SERVER | LAZY)


@pytest.mark.parametrize(
    "name",
    quick(
        ["llama3-rope", "ministral3", "qwen3_moe", "qwen3_5-multimodal"],
        ["llama3-rope", "qwen3_5-multimodal"],
    ),
)
def test_an_engine_runs_without_transformers_and_without_torchs_compilers(name, checkpoint):
    modules = imported_by(
        f"from vllm import LLM, SamplingParams\n"
        f"llm = LLM({str(checkpoint(name))!r}, skip_tokenizer_init=True, max_num_seqs=2)\n"
        f"llm.generate([[3, 4]], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)"
    )
    assert "torch" in modules
    assert not modules & ({"transformers", "huggingface_hub"} | COMPILERS | SERVER | LAZY)


@pytest.mark.slow
def test_a_tokenizer_brings_no_more_of_torch(text_checkpoint):
    modules = imported_by(
        f"from vllm import LLM\n"
        f"llm = LLM({str(text_checkpoint)!r}, max_num_seqs=2)\n"
        f"llm.generate('one two', use_tqdm=False)"
    )
    assert {"torch", "transformers"} <= modules
    assert not modules & (COMPILERS | SERVER | LAZY)


def test_the_servers_own_process_imports_no_torch():
    modules = imported_by("import vllm.entrypoints.openai.server, vllm.engine.async_llm")
    assert "fastapi" in modules
    assert not modules & ({"torch", "transformers"} | COMPILERS | LAZY)


def test_the_engines_process_starts_with_next_to_nothing():
    """The jobs that run beside imports start when these are there."""
    modules = imported_by("import vllm.engine.process")
    assert not modules & ({"torch", "numpy", "transformers"} | COMPILERS | SERVER | LAZY)
