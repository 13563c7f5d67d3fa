"""csrc's NVFP4 quantiser, compiled for the CPU, against the torch reference: bit for bit."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm import LLM, SamplingParams
from vllm.entrypoints.demo import demo_model_path
from vllm.model_executor.layers.linear import Linear
from vllm.ops.nvfp4 import (
    E4M3,
    nvfp4_global_scale,
    nvfp4_quantize,
)

SOURCE = Path(__file__).with_name("nvfp4_groups.cu")
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, by the sea, "]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    path = tmp_path_factory.mktemp("nvfp4") / "groups"
    subprocess.run([nvcc, "-std=c++20", "-O3", "-arch=sm_90a", SOURCE, "-o", path], check=True)
    return path


def native(program, x: torch.Tensor, global_scale: float):
    """(codes uint8 [M, K / 2], scales E4M3 [M, K / 16]) of x [M, K] by csrc."""
    written = subprocess.run(
        [program, float(global_scale).hex()],
        input=x.float().contiguous().numpy().tobytes(),
        capture_output=True,
        check=True,
    ).stdout
    groups = torch.from_numpy(np.frombuffer(written, np.uint8).copy()).view(-1, 9)
    return groups[:, :8].reshape(x.shape[0], -1), groups[:, 8].reshape(x.shape[0], -1).view(E4M3)


def assert_same(program, x: torch.Tensor, global_scale: torch.Tensor):
    codes, scales = nvfp4_quantize(x, global_scale.view(1))
    found_codes, found_scales = native(program, x, float(global_scale))
    assert torch.equal(found_scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(found_codes, codes)
    return codes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_of_the_demo_model_get_the_same_codes_and_scales(program, dtype):
    llm = LLM(demo_model_path(), max_model_len=256, max_num_seqs=4, dtype=dtype)
    captured: dict[str, list[torch.Tensor]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, inputs: captured.setdefault(layer.prefix, []).append(inputs[0].clone())
        )
        for layer in llm.llm_engine.core.runner.model.modules()
        if isinstance(layer, Linear)
    ]
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    for hook in hooks:
        hook.remove()
    assert len(captured) == 30 * 4 + 1
    seen = torch.zeros(16, dtype=torch.int64)
    for inputs in captured.values():
        x = torch.cat(inputs)
        codes = assert_same(program, x, nvfp4_global_scale(x.abs().max()))
        seen += torch.bincount(torch.cat((codes & 15, codes >> 4)).flatten(), minlength=16)
    assert bool((seen > 0).all()), "every code must occur for this to test them all"


@pytest.mark.slow
def test_values_at_the_limits_get_the_same_codes_and_scales(program):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096, 64), generator=generator).int()
    x = bits.view(torch.float32)  # NaN, infinities and subnormals among them
    x[0], x[1], x[2, ::2] = 0.0, -0.0, float("nan")
    for scale in (1.0, 448 * 6 / 3.7, 1e-30, 1e30):
        assert_same(program, x, torch.tensor(scale))
