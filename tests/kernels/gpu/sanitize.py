"""Runs compute-sanitizer over every native GPU kernel, on few and small shapes.

    make build-cuda TORCH_CUDA_ARCH_LIST=9.0a \
        CMAKE_ARGS="-DCMAKE_CUDA_FLAGS=-DVLLM_RACECHECK -DVLLM_OUTPUT_DIR=$PWD/build/racecheck"
    python tests/kernels/gpu/sanitize.py [FAMILY ...] > benchmarks/results/h100/sanitizer.txt

The first library serves racecheck, where it is there: in its Hopper GEMM every lane of a warp
arrives at the barrier that hands a stage back. Usually one lane does for all, which __syncwarp and
wgmma's wait order, but racecheck takes that arrival for the lane's own, and the other lanes' reads
of scales for unordered.

Values are the business of the tests beside this file. Only kernels of this project are watched; the
caching of GPU memory is off, so that each tensor is an allocation of its own. A launch that reaches
past its output on purpose comes last: a run in which memcheck does not find it has found nothing.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from vllm import _custom_ops as quant
from vllm.ops.fp4_ops import (
    scaled_fp4_quant_grouped,
    silu_and_mul_scaled_fp4_quant,
    silu_and_mul_scaled_fp4_quant_grouped,
)
from vllm.ops.fp8_quant import (
    ScaleLayout,
    per_token_group_fp8_quant,
    rms_norm_group_quant,
    silu_and_mul_group_quant,
)
from vllm.platforms import native

FP8 = torch.float8_e4m3fn
SECONDS_PER_RUN = 100
TOOLS = ("memcheck", "racecheck")
ROOT = Path(__file__).parents[3]
FOR_RACECHECK = ROOT / "build" / "racecheck"
PLANTED_RACE = ("racecheck", "planted_error")  # a reach past the output is none
# Of sm90_fp8_block.cu, which chooses them for larger sizes than a sanitizer gets through.
TALL_TILINGS = [(256, 128, 1, False), (256, 128, 2, False)]
# Ragged, aligned, one row, and more rows than a tile has.
SHAPES = [(1, 576), (33, 1040), (130, 512)]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def fp8(*shape: int) -> Tensor:
    return randn(*shape).to(FP8)


# ---------------------------------------------------------------- one function per kernel family


def fp8_quant() -> None:
    for m, k in [*SHAPES, (5, 100), (1, 16384)]:
        x = randn(m, k)
        quant.scaled_fp8_quant(x)
        quant.scaled_fp8_quant(x, torch.ones(1, device="cuda"))
        quant.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        for layout in ScaleLayout:
            per_token_group_fp8_quant(x, layout=layout)
            silu_and_mul_group_quant(randn(m, 2 * k), layout=layout)
            weight = torch.ones(k, device="cuda")
            rms_norm_group_quant(x, weight, 1e-6, randn(m, k), layout=layout)
    # Several rows to a block.
    rms_norm_group_quant(randn(1100, 4096), torch.ones(4096, device="cuda"), 1e-6)


def nvfp4_quant() -> None:
    scale, scales = torch.ones(1, device="cuda"), torch.ones(4, device="cuda")
    for m, k in SHAPES:
        offsets = torch.tensor([0, 0, m // 2, m // 2, m], device="cuda", dtype=torch.int32)
        for is_swizzled in (False, True):
            quant.scaled_fp4_quant(randn(m, k), scale, is_swizzled)
            silu_and_mul_scaled_fp4_quant(randn(m, 2 * k), scale, is_swizzled)
        scaled_fp4_quant_grouped(randn(m, k), scales, offsets)
        pairs = torch.randperm(m, device="cuda", dtype=torch.int32)
        scaled_fp4_quant_grouped(randn(-(-m // 3), k), scales, offsets, pairs, 3)
        silu_and_mul_scaled_fp4_quant_grouped(randn(m, 2 * k), scales, offsets)


def layers() -> None:
    from vllm.kernels import cuda_ops
    from vllm.ops.paged_attention import CacheTarget

    cache = torch.randn(64, 64, device="cuda")
    for m, k in [*SHAPES, (3, 63), (2, 8200)]:
        weight, x = torch.ones(k, device="cuda"), randn(m, k)
        cuda_ops.rms_norm(x, weight, 1e-6)
        cuda_ops.fused_add_rms_norm(x, randn(m, k), weight, 1e-6)
        cuda_ops.silu_and_mul(randn(m, 2 * k))
        ids = torch.arange(m, device="cuda")
        cuda_ops.embedding(ids, x)
        heads, norm = randn(m, 7, 80), torch.ones(80, device="cuda")
        cuda_ops.rotary_embedding(ids % 64, heads[:, :5], heads[:, 5:], cache)
        cuda_ops.qk_norm_rotary(ids % 64, heads[:, :5], heads[:, 5:], norm, norm, cache, 1e-6)
        query, key, value = randn(m, 9, 80).split((5, 2, 2), 1)
        for stored in (key.dtype, torch.float8_e4m3fn):
            caches = (torch.zeros(-(-m // 16), 16, 2, 80, device="cuda").to(stored) for _ in "kv")
            target = CacheTarget(value, *caches, ids, 1.0, 1.0)
            cuda_ops.rotary_into_cache(ids % 64, query, key, target, cache, (norm, norm), 1e-6)


def sampling() -> None:
    from vllm.kernels import cuda_ops

    for vocab in (5, 4097, 50257):  # a row within a thread block's memory, and beyond it
        logits, ones = randn(2, vocab, dtype=torch.float32), torch.ones(2, device="cuda")
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (40, 0.9, 0.01)):
            top_ks = torch.full((2,), top_k, device="cuda")
            settings = (ones, top_ks, ones * top_p, ones * min_p, ones.double() * 0.5)
            cuda_ops.sample_tokens(logits, *settings)


def skinny_gemm() -> None:
    gemm = native.load().skinny_fp8_block_gemm
    for m in (1, 9, 16):
        for n, k in ((576, 576), (1001, 1040)):
            b, scales = fp8(n, k), torch.ones(-(-n // 128), -(-k // 128), device="cuda")
            out, bias = randn(m, n), torch.ones(n, device="cuda")
            gemm(randn(m, k), None, b, scales, bias, out, 0, 0)
            gemm(fp8(m, k), torch.ones(m, -(-k // 128), device="cuda"), b, scales, None, out, 0, 0)


def dense_operands(m: int, n: int, k: int) -> tuple[Tensor | None, ...]:
    scales = torch.ones(-(-n // 128), -(-k // 128), device="cuda")
    a_scales = torch.ones(m, -(-k // 128), device="cuda")
    return fp8(m, k), a_scales, fp8(n, k), scales, None, randn(m, n)


def sm90_gemm() -> None:
    """Every row of the table of tilings, with more blocks of columns than a ring has stages."""
    library = native.load()
    sizes = [(m, n, 1552) for m in (1, 33, 100, 200, 300) for n in (576, 1001, 4240)]
    for size in [*sizes, (33, 264, 8192), (100, 264, 8192), (200, 264, 8192), (600, 512, 1552)]:
        library.cutlass_fp8_block_gemm(*dense_operands(*size))
    for tiling in TALL_TILINGS:
        library.sm90_fp8_block_gemm(*dense_operands(600, 512, 1552), *tiling)


def grouped_operands(rows: list[int]) -> tuple[Tensor, ...]:
    n, k = 264, 1424
    m, bounds = sum(rows), [sum(rows[:i]) for i in range(len(rows) + 1)]
    offsets = torch.tensor(bounds, device="cuda", dtype=torch.int32)
    scales = torch.ones(len(rows), -(-n // 128), -(-k // 128), device="cuda")
    a_scales = torch.ones(m, -(-k // 128), device="cuda")
    return fp8(m, k), a_scales, fp8(len(rows), n, k), scales, offsets, randn(m, n)


def grouped_gemm() -> None:
    gemm = native.load().cutlass_fp8_block_gemm_grouped
    for rows in ([5], [0, 70, 1, 0], [200, 3, 300]):
        gemm(*grouped_operands(rows))


def planted_error() -> None:
    """Promises the last expert more rows than there are: their results lie past the output."""
    *operands, offsets, out = grouped_operands([60, 4])
    offsets[-1] += 60
    native.load().cutlass_fp8_block_gemm_grouped(*operands, offsets, out)


FAMILIES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (fp8_quant, nvfp4_quant, layers, sampling, skinny_gemm, sm90_gemm, grouped_gemm)
}


# ---------------------------------------------------------------- the runs


def launch(name: str, folder: str) -> None:
    """Under the sanitizer: all launches of one family, of the library in `folder`."""
    native.LIBRARY_DIR = Path(folder)
    torch.manual_seed(0)
    (planted_error if name == "planted_error" else FAMILIES[name])()
    torch.cuda.synchronize()
    print(f"launched {name}", flush=True)


def watch(tool: str, name: str, folder: Path) -> str:
    """One line: what the tool found in a family."""
    options = ("--tool", tool, "--kernel-name", "kernel_substring=vllm", "--print-limit", "3")
    command = ["compute-sanitizer", *options, sys.executable, __file__, "--launch", name, folder]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_PER_RUN,
        )
    except subprocess.TimeoutExpired:
        return f"{tool:10} {name:14} NOT FINISHED in {SECONDS_PER_RUN} s"
    text = done.stdout
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
    if f"launched {name}" not in text and name != "planted_error":
        found.append(f"NOT LAUNCHED: {' | '.join(text.splitlines()[-4:])}")
    unusual = [line for line in text.splitlines() if line.startswith("========= ")][1:4]
    is_clean = all(re.match(r"0 (errors|hazards)", one) for one in found) and bool(found)
    details = "" if is_clean else "".join(f"\n    {line}" for line in unusual)
    return f"{tool:10} {name:14} {'; '.join(found)} ({time.monotonic() - start:.0f} s){details}"


def main() -> None:
    if sys.argv[1:2] == ["--launch"]:
        launch(*sys.argv[2:])
        return
    folders = dict.fromkeys(TOOLS, native.LIBRARY_DIR)
    if FOR_RACECHECK.exists():
        folders["racecheck"] = FOR_RACECHECK
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True)
    print(version.stdout.strip().splitlines()[-1])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print(f"kernels watched: those with `vllm` in their names; {SECONDS_PER_RUN} s each at most")
    print(f"racecheck: library of {folders['racecheck'].relative_to(ROOT)}")
    wanted = sys.argv[1:] or [*FAMILIES, "planted_error"]
    runs = [(t, name, folders[t]) for t in TOOLS for name in wanted if (t, name) != PLANTED_RACE]
    with ThreadPoolExecutor(8) as pool:
        for line in pool.map(watch, *zip(*runs)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
