"""What `explain` predicts for a Hopper chip without a GPU is what the engine builds on it."""

import gc
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from children import NO_GPU, environment
from machines import write_distribution, write_package
from tiny_models import build_model

from vllm import LLM, SamplingParams
from vllm.errors import ConfigError
from vllm.kernels import registry
from vllm.kernels.backends import shared
from vllm.kernels.report.question import GPUS
from vllm.kernels.select.decision import NoKernelError
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.quantize import quantize_checkpoint
from vllm.ops.gemm_ops import cutlass_fp8_block_gemm
from vllm.platforms.probe import probe_chip

pytestmark = pytest.mark.gpu
# Its layers have sizes of Qwen3-30B-A3B and of the shared expert of Qwen3.5-35B-A3B, for which
# this build ships measurements.
SIZES = {
    "hidden_size": 2048, "intermediate_size": 512, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 1024, "num_hidden_layers": 2,
}  # fmt: skip
WISHES = [
    "-",
    *(f"--linear-backend {name}" for name in registry.backend_names("linear")),
    "VLLM_USE_DEEP_GEMM=0",
    "VLLM_USE_DEEP_GEMM=1",
    "VLLM_USE_DEEP_GEMM_E8M0=1",
    "VLLM_USE_DEEP_GEMM=1 VLLM_USE_DEEP_GEMM_E8M0=1",
    "VLLM_USE_DEEP_GEMM_E8M0=0",
    "VLLM_LINEAR_BACKEND=cutlass",
    "--kernel *.down_proj=cutlass",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    plain, quantized = (tmp_path_factory.mktemp(name) for name in ("bf16", "fp8"))
    build_model("qwen3", **SIZES).to(torch.bfloat16).save_pretrained(plain)
    quantize_checkpoint(plain, quantized / "model", "fp8-block")
    return str(quantized / "model")


def predicted(folder: str, wishes: str) -> tuple[dict, int]:
    """The report of `explain` in a process that sees no GPU, and its exit code: 1 for a wish that
    no layer can follow, 2 with {} for one that means none."""
    chip = next((name for name, known in GPUS.items() if known.is_like(probe_chip())), "sm_90")
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "kernels", "explain", folder,
             "--device", chip, "--json"]  # fmt: skip
    for word in wishes.split() if wishes != "-" else []:
        words += ["--env", word] if word.startswith("VLLM_") else [word]
    env = environment(**NO_GPU)
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 2 or done.stdout, done.stderr
    return json.loads(done.stdout or "{}"), done.returncode


def engine(folder: str, wishes: str, dump: Path, patch: pytest.MonkeyPatch) -> LLM:
    options = {}
    words = iter(wishes.split() if wishes != "-" else [])
    for word in words:
        if word.startswith("VLLM_"):
            patch.setenv(*word.split("="))
        elif word == "--kernel":
            options["kernel"] = (next(words),)
        else:
            options[word[2:].replace("-", "_")] = next(words)
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(folder, skip_tokenizer_init=True, max_num_seqs=4, max_model_len=256,
               num_gpu_blocks_override=100, enforce_eager=True, dump_decisions=dump,
               **options)  # fmt: skip


def files_of(kernel) -> set[str]:
    """The backend files whose code a kernel is made of; not of what stands in for it until it is
    compiled, nor of torch."""
    for name in ("parts", "multiply", "compiled"):
        inner = getattr(kernel, name, ())
        own = [part for _, part in inner] if name == "parts" else [inner]
        if inner and own[0].__module__.startswith("vllm."):
            return set().union(*map(files_of, own))
    module = kernel.__module__
    if module == shared.__name__:
        gemm = inspect.getclosurevars(kernel).nonlocals["gemm"]
        return {"cutlass" if gemm is cutlass_fp8_block_gemm else gemm.__module__.rpartition(".")[2]}
    return {module.rpartition(".")[2] if "flashinfer" not in module else "flashinfer"}


def built(llm: LLM) -> dict[str, set[str]]:
    modules = llm.llm_engine.core.runner.model.modules()
    return {m.prefix: files_of(m.kernel) for m in modules if isinstance(m, Linear)}


def files_named(decision: dict) -> set[str]:
    winner = next(c for c in decision["candidates"] if c["backend"] == decision["chosen"])
    names = [name for _, name in winner["parts"]] or [decision["chosen"]]
    return {name.partition("-")[0] for name in names}


@pytest.mark.parametrize("wishes", WISHES)
def test_the_engine_builds_what_explain_predicted(folder, wishes, tmp_path, monkeypatch):
    report, code = predicted(folder, wishes)
    dump = tmp_path / "decisions.json"
    if code:
        with pytest.raises(ConfigError if code == 2 else NoKernelError):
            engine(folder, wishes, dump, monkeypatch)
        return
    llm = engine(folder, wishes, dump, monkeypatch)
    made = json.loads(dump.read_text())
    assert made["decisions"] == report["decisions"]
    kernels = built(llm)
    for decision in report["decisions"]:
        for layer in decision["layers"] if decision["problem"]["family"] == "linear" else ():
            assert kernels[layer] == files_named(decision), layer
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(3, 40))}]
    assert len(llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids) == 4
    is_ceil = "E8M0=1" in wishes and any("deep_gemm" in files for files in kernels.values())
    assert bool(made["ledger"]["entries"]) == (is_ceil or "ue8m0" in wishes)


def test_shipped_measurements_decide_on_this_chip(folder):
    """DeepGEMM has not been measured for all of these sizes on every chip. Where it would have been
    taken, the variable decided, whatever that costs."""
    variable, decided = "VLLM_USE_DEEP_GEMM=0", []
    for wishes in (variable, "-"):
        report, _ = predicted(folder, wishes)
        fp8 = [d for d in report["decisions"] if d["problem"].get("weight", "").startswith("fp8")]
        by_table = [d for d in fp8 if d["origin"]["rank"] == 6]
        others = [d for d in fp8 if d["origin"]["rank"] != 6]
        assert fp8 and (wishes == "-" or all(d["origin"]["text"] == variable for d in others))
        assert all(d["expected"]["worst_regret"] <= 0.10 for d in by_table)
        decided += by_table
    assert decided


@pytest.mark.parametrize(
    ("code", "reason"),
    [("import ctypes; ctypes.string_at(0)", "SIGSEGV"), ("import time; time.sleep(1e6)", "end")],
)
def test_the_engine_starts_beside_a_library_that_faults_or_hangs(folder, tmp_path, code, reason):
    """In a process of its own: this one has loaded the real library."""
    write_package(tmp_path, "deep_gemm", code)
    write_distribution(tmp_path, "sgl-deep-gemm", "9.9")
    dump = str(tmp_path / "d")
    script = f"""
from vllm import LLM, SamplingParams
from vllm.platforms import libraries
libraries.TRIAL_SECONDS = 20.0
if __name__ == "__main__":
    llm = LLM({folder!r}, skip_tokenizer_init=True, max_num_seqs=4, max_model_len=256,
              num_gpu_blocks_override=100, enforce_eager=True, dump_decisions={dump!r})
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    llm.generate([{{"prompt_token_ids": [1, 2, 3]}}], params, use_tqdm=False)
"""
    env = environment(tmp_path, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    (tmp_path / "start.py").write_text(script)
    done = subprocess.run([sys.executable, str(tmp_path / "start.py")], capture_output=True,
                          text=True, env=env, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stderr
    decisions = json.loads(Path(dump).read_text())["decisions"]
    for decision in decisions:
        if decision["problem"].get("weight", "").startswith("fp8"):
            assert "deep_gemm" not in decision["chosen"]
            (told,) = [c for c in decision["candidates"] if c["backend"] == "deep_gemm"]
            assert [r["why"] for r in told["reasons"]] == ["library"]
            assert reason in told["reasons"][0]["text"]
