"""Linear layers of many rows on the CPU, beside torch's product of the same sizes.

    python benchmarks/kernels/bench_cpu_linear.py [--rows 32 128 512] [--json FILE]

Sizes are those of one decoder layer of SmolLM2-135M and of Qwen2.5-0.5B, activations bfloat16 and
float32. Per engine and size the time is the least of --rounds, all of them taking turns, so that
a machine that others use shows what each can do. A layer's weights fit the last-level cache. torch
has the same weights in bfloat16 (oneDNN) or float32.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bench_cpu import WEIGHTS, make_codes
from torch import Tensor

from vllm.ops import cpu_ops
from vllm.platforms import native

SIZES = {
    "SmolLM2-135M": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "Qwen2.5-0.5B": ((1152, 896), (896, 896), (9728, 896), (896, 4864)),
}
KINDS = {
    "fp8": WEIGHTS["fp8"],
    "int4": lambda n, k: make_codes(n, k, group=64),
    "mxfp4": WEIGHTS["mxfp4"],
    "nvfp4": WEIGHTS["nvfp4"],
    "bf16": lambda n, k: cpu_ops.pack_linear(torch.randn(n, k).bfloat16()),
}
Run = Callable[[Tensor], object]


def engines(n: int, k: int) -> dict[str, Run]:
    weights = {dtype: torch.randn(n, k).to(dtype) for dtype in (torch.bfloat16, torch.float32)}
    found: dict[str, Run] = {
        kind: partial(cpu_ops.linear, packed=make(n, k)) for kind, make in KINDS.items()
    }
    found["torch"] = lambda x: torch.nn.functional.linear(x, weights[x.dtype])
    return found


def least_seconds(runs: dict[str, Run], x: Tensor, rounds: int) -> dict[str, float]:
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(x)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(dtype: torch.dtype, num_rows: list[int], rounds: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for model, sizes in SIZES.items():
        times: dict[tuple[int, str], float] = {}
        for n, k in sizes:
            runs = engines(n, k)
            for m in num_rows:
                for name, seconds in least_seconds(
                    runs, torch.randn(m, k).to(dtype), rounds
                ).items():
                    times[m, name] = times.get((m, name), 0.0) + seconds
        for (m, name), seconds in times.items():
            flops = 2 * m * sum(n * k for n, k in sizes)
            row = {"model": model, "activations": str(dtype).removeprefix("torch."), "rows": m}
            row |= {"weights": name, "microseconds": round(seconds * 1e6, 1)}
            found.append(row | {"gflop_s": round(flops / seconds / 1e9, 1)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--isa", help="as VLLM_CPU_ISA")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    library = native.load(args.isa)
    rows = [
        row
        for dtype in (torch.bfloat16, torch.float32)
        for row in measure(dtype, args.rows, args.rounds)
    ]
    print(
        f"{library.cpu_isa()}, {library.cpu_num_threads()} threads; GFLOP/s, in brackets of torch's"
    )
    by_key: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        key = row["model"], row["activations"], row["rows"]
        by_key.setdefault(key, {})[str(row["weights"])] = float(str(row["gflop_s"]))
    for (model, activations, num_rows), speeds in by_key.items():
        cells = [f"{name} {v:.0f} ({v / speeds['torch']:.2f})" for name, v in speeds.items()]
        print(f"{model} {activations} M={num_rows}: {', '.join(cells)}")
    if args.json:
        found = {"isa": library.cpu_isa(), "torch": torch.__version__, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
