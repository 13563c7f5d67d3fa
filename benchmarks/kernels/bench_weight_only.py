"""Weight-only GEMM on a GPU: our kernel and the widened weight beside torch's bf16 GEMM.

    python benchmarks/kernels/bench_weight_only.py --out benchmarks/results/h100

A figure is the median of CUDA-graph replays over several copies of the weight, so that none is
found in the L2 cache. `kernel` is csrc/gemm/weight_only, `wide` widens the weight into memory and
multiplies with torch, `bf16` is torch with a weight that was bf16 all along, and `humming` the
kernels of humming-kernels, where it is installed and works. `w4a8` is our kernel for int4 by FP8
activations, with the quantisation of x per token that comes before it (on 9.0 it multiplies in
fp16, and says nothing of the chips that it is for). `of_copy`: bytes of the packed weight that the
kernel reads a second, of those that a copy reads and writes. --sweep times every shape of the
kernel that was compiled (tiles of rows per warp x thread blocks that share columns), --parts
several sizes of the part of a weight that is widened at a time.
"""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_results import write_results
from gpu_timing import copy_bandwidth, replay_microseconds
from torch import Tensor

from vllm._custom_ops import scaled_fp8_quant
from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.backends.marlin import WIDE_BYTES, most_tokens
from vllm.kernels.interface import LinearKernel, LinearTensors
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem
from vllm.ops.weight_only_layout import (
    PackedWeight,
    pack_weight,
    widen_weight,
)
from vllm.ops.weight_only_ops import multiply, multiply_wide
from vllm.platforms import native
from vllm.platforms.libraries import library_state

# Llama-3.1-8B: QKV, output, gate-up, down; Qwen3-8B: gate-up, down.
SIZES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (24576, 4096), (4096, 12288)]
FORMATS = ("fp8-block", "fp8-channel", "nvfp4", "int4-group[128]")
FEW, SOME, MANY = (1, 8, 16), (32, 64, 128, 256, 512), (1024, 4096)
SHAPES = list(product((1, 2), (1, 2, 4, 8)))
PART_MIB = (32, 64, 128, 256)
COLD_BYTES = 120 << 20  # more than the L2 cache holds
MAX_ERROR = 5e-3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of weight_only.json")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--tokens", nargs="+", type=int, default=(*FEW, *SOME, *MANY))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    humming = library_state("humming")
    version = None if humming is None else str(humming)
    print(f"humming {'is not installed' if humming is None else humming}")
    copy = copy_bandwidth() * 1e6
    most = ", ".join(f"{most_tokens(WeightFormat.parse(f).element)} of {f}" for f in args.formats)
    print(f"copy {copy / 1e12:.2f} TB/s; most tokens of the kernel: {most}")
    rows = []
    for n, k in SIZES:
        plain = bf16_times(n, k, args.tokens)
        for name in args.formats:
            case = Case(name, n, k, with_humming=humming is not None and not humming.broken)
            for m in args.tokens:
                row = {"format": name, "n": n, "k": k, "m": m, **case.times(m, args)}
                row["us"]["bf16"] = plain[m]
                if "kernel" in row["us"]:
                    row["of_copy"] = case.num_bytes / row["us"]["kernel"] * 1e6 / copy
                rows.append(row)
                show(row)
            del case
            torch.cuda.empty_cache()
            if args.out:  # what is measured is kept if the rest is cut off
                write_results(
                    args.out, "weight_only.json", copy_bytes_per_s=copy, humming=version, rows=rows
                )


def bf16_times(n: int, k: int, tokens: tuple[int, ...]) -> dict[int, float]:
    weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies(2 * n * k))]
    found = {}
    for m in tokens:
        x = torch.randn(m, k, device="cuda").bfloat16()
        found[m] = replay_microseconds([lambda w=w, x=x: torch.mm(x, w.t()) for w in weights])
    return found


def copies(num_bytes: int) -> int:
    return max(2, -(-COLD_BYTES // num_bytes) + 1)


class Case:
    """One weight, and copies of it."""

    def __init__(self, name: str, n: int, k: int, with_humming: bool):
        tensors = random_tensors(name, n, k)
        self.weight = pack_weight(tensors)
        parts = (self.weight.codes, self.weight.scales, self.weight.row_factors)
        self.num_bytes = sum(part.nbytes for part in parts if part is not None)
        self.weights = [copy_of(self.weight) for _ in range(copies(self.num_bytes))]
        self.by_fp8: list[PackedWeight] = []
        if tensors.format.element == "int4" and "marlin_w4a8_gemm" in native.gpu_archs():
            packed = pack_weight(tensors, by_fp8=True)
            self.by_fp8 = [copy_of(packed) for _ in self.weights]
        self.humming: list[LinearKernel] = []
        while with_humming and len(self.humming) < len(self.weights):
            self.humming.append(humming_kernel(tensors))
        self.wide = widen_weight(self.weight)

    def times(self, m: int, args: argparse.Namespace) -> dict[str, Any]:
        x = torch.randn(m, self.weight.num_columns, device="cuda").bfloat16()
        expected = x.float() @ self.wide.T
        us: dict[str, float] = {}
        found: dict[str, Any] = {"us": us}
        if m <= max(SOME):
            us["kernel"] = self._time(lambda w: multiply(x, w), expected)
        if m >= min(SOME):
            us["wide"] = self._time(lambda w: multiply_wide(x, w, None, WIDE_BYTES), expected)
        if self.by_fp8:
            q, scales = scaled_fp8_quant(x, use_per_token_if_dynamic=True)
            rounded = q.float() * scales @ self.wide.T
            us["w4a8"] = self._time(lambda w: multiply(x, w), rounded, self.by_fp8)
        if self.humming:
            us["humming"] = self._time(lambda call: call(x), expected, self.humming)
        if args.sweep and m <= max(SOME):
            shapes = SHAPES if m <= max(FEW) else SHAPES[len(SHAPES) // 2 :]
            found["sweep"] = {
                f"{rows}x{splits}": self._time(
                    lambda w, r=rows, s=splits: multiply(x, w, None, r, s), expected
                )
                for rows, splits in shapes
            }
        if args.parts and m >= min(MANY):
            found["parts"] = {
                mib: self._time(lambda w, b=mib << 20: multiply_wide(x, w, None, b), expected)
                for mib in PART_MIB
            }
        return found

    def _time(self, call: Any, expected: Tensor, weights: Sequence[Any] = ()) -> float:
        weights = weights or self.weights
        error = (call(weights[0]).float() - expected).norm() / expected.norm()
        assert error < MAX_ERROR, f"relative error {error}"
        return replay_microseconds([lambda w=w: call(w) for w in weights], num_replays=10)


def humming_kernel(tensors: LinearTensors) -> LinearKernel:
    n, k = tensors.weight.shape[0], tensors.weight.shape[1] * (2 if tensors.is_packed else 1)
    form = Scales.FLOAT32 if tensors.format.scale == "block" else Scales.ACTIVATION
    winner = Candidate("humming", None, scales=form)
    problem = LinearProblem(n, k, tensors.format)
    kernel: LinearKernel = registry.backend("humming").linear(problem, tensors, winner)
    return kernel


def random_tensors(name: str, n: int, k: int) -> LinearTensors:
    weight_format = WeightFormat.parse(name)
    columns = k if weight_format.element == "fp8" else k // 2
    codes = torch.randint(0, 256, (n, columns), dtype=torch.uint8, device="cuda")
    tensors = LinearTensors(weight_format, codes, (n,))

    def scales(rows: int, columns: int) -> Tensor:
        return torch.rand(rows, columns, device="cuda") + 0.5

    if weight_format.element == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0
        tensors.weight = codes.view(torch.float8_e4m3fn)
        is_block = weight_format.scale == "block"
        tensors.scales = scales(n // 128, k // 128) if is_block else scales(n, 1)
    elif name == "nvfp4":
        tensors.scales = scales(n, k // 16).to(torch.float8_e4m3fn)
        tensors.global_scales = torch.ones(1, device="cuda")
    else:
        tensors.scales = scales(n, k // weight_format.block[1])
        tensors.zero_points = torch.randint(
            0, 16, tensors.scales.shape, dtype=torch.uint8, device="cuda"
        )
    return tensors


def copy_of(weight: PackedWeight) -> PackedWeight:
    from dataclasses import replace

    parts = {name: getattr(weight, name) for name in ("codes", "scales", "row_factors")}
    return replace(weight, **{name: p if p is None else p.clone() for name, p in parts.items()})


def show(row: dict[str, Any]) -> None:
    us = "  ".join(f"{name} {value:8.1f}" for name, value in row["us"].items())
    share = f"{row['of_copy']:5.2f}" if "of_copy" in row else "     "
    text = f"{row['format']:16}{row['n']:6}x{row['k']:<6}{row['m']:5}  {share}  {us}"
    for name in ("sweep", "parts"):
        if name in row:
            text += "  | " + " ".join(f"{key}:{value:.1f}" for key, value in row[name].items())
    print(text, flush=True)


if __name__ == "__main__":
    main()
