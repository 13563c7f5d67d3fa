"""Kernels that fault and hang on a GPU: their process is lost, the next one serves without them."""

import os
import subprocess
import sys

import pytest
import torch
from children import environment

from vllm import LLM
from vllm.errors import KernelFailedError
from vllm.kernels import registry
from vllm.worker import model_runner

pytestmark = pytest.mark.gpu


def serve(family: str, fault: str, backend: str, folder: str) -> None:
    """Body of a process: prints which backend it computed with, or which one failed."""
    model_runner.HANG_SECONDS = 3.0

    def broken(*given):
        if fault == "faults":  # an assertion on the device
            torch.ones(4, device="cuda")[torch.full((4,), 9, device="cuda")]
        else:
            torch.cuda._sleep(1 << 50)

    if fault != "works":
        setattr(registry.backend(backend), family, lambda *given: broken)
    try:
        quantization = "fp8" if family == "linear" else None
        llm = LLM(folder, quantization=quantization, skip_tokenizer_init=True, dtype="bfloat16",
                  gpu_memory_utilization=0.05, max_model_len=128, max_num_seqs=4,
                  max_num_batched_tokens=128)  # fmt: skip
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
        records = llm.llm_engine.core.executor.selection.records
        print(next(d.chosen for _, d in records if d.problem.family == family))
    except KernelFailedError as error:
        print("failed", error)
    sys.stdout.flush()
    os._exit(0)  # a kernel that hangs would be waited for


@pytest.mark.parametrize("family", ["linear", "moe"])
@pytest.mark.parametrize("fault", ["faults", "hangs"])
def test_a_kernel_that_is_lost_is_named_and_not_chosen_again(checkpoint, tmp_path, family, fault):
    folder = checkpoint("qwen3_moe")
    code = "import sys, test_first_calls_on_gpu as t; t.serve(*sys.argv[1:])"
    env = environment(VLLM_CACHE_ROOT=str(tmp_path))

    def start(fate: str, backend: str = "") -> str:
        words = [sys.executable, "-c", code, family, fate, backend, str(folder)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    backend = start("works").splitlines()[-1].split("<=")[0]  # of a split the first
    failed = start(fault, backend)
    assert f"failed kernel {backend} failed for " in failed
    assert ("assert" if fault == "faults" else "did not end within 3 s") in failed
    after = start("works").splitlines()[-1]
    assert after and backend not in after
