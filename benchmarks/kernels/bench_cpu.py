"""Times the native CPU kernels on SmolLM2-135M's shapes, beside this machine's own ceilings.

    python benchmarks/kernels/bench_cpu.py [--isa avx2] [--weights int4] [--json FILE]

Every figure is a median. Bandwidths count the bytes a kernel must touch (weights, scales, cache);
ceilings are torch's: summing and copying 256 MB, and a 2048^3 float32 matmul.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from vllm.ops import cpu_ops
from vllm.platforms import native

HIDDEN, INTERMEDIATE, NUM_LAYERS, VOCAB = 576, 1536, 30, 49152
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_K = 9, 3, 64, 128
BATCHES = (1, 8, 32, 256, 1500)
CONTEXTS = (128, 1500)
CACHE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Ceilings:
    read_gb_s: float
    copy_gb_s: float
    matmul_gflop_s: float


@dataclass(frozen=True)
class Row:
    name: str
    microseconds: float
    num_bytes: int
    num_flops: int

    def describe(self, ceilings: Ceilings) -> str:
        gb_s = self.num_bytes / self.microseconds / 1e3
        gflop_s = self.num_flops / self.microseconds / 1e3
        return (
            f"{self.name:<44}{self.microseconds:>12.1f}{gb_s:>9.1f}"
            f"{gb_s / ceilings.read_gb_s:>7.0%}{gflop_s:>10.1f}"
            f"{gflop_s / ceilings.matmul_gflop_s:>7.0%}"
        )


def median_seconds(run: Callable[[], object], min_seconds: float) -> float:
    """Median of single calls: of three at least, and of more for `min_seconds`."""
    run()
    samples: list[float] = []
    while len(samples) < 3 or (sum(samples) < min_seconds and len(samples) < 2000):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def measure_ceilings() -> Ceilings:
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    square = torch.randn(2048, 2048)
    product = torch.empty_like(square)
    read = median_seconds(source.sum, 0.5)
    copy = median_seconds(lambda: target.copy_(source), 0.5)
    matmul = median_seconds(lambda: torch.mm(square, square, out=product), 0.5)
    return Ceilings(size / read / 1e9, 2 * size / copy / 1e9, 2 * 2048**3 / matmul / 1e9)


def make_fp8(n: int, k: int) -> cpu_ops.LinearWeight:
    weight = torch.randn(n, k).clamp(-4, 4).mul(100).to(torch.float8_e4m3fn)
    scales = torch.rand(n, -(-k // BLOCK_K)) * 1e-3
    return cpu_ops.pack_linear(weight, scales, BLOCK_K)


def make_codes(
    n: int, k: int, group: int, has_zero_points: bool = False, is_e2m1: bool = False
) -> cpu_ops.LinearWeight:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    shape = (n, k // group)
    scales = torch.rand(shape).half().float()
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8) if has_zero_points else None
    return cpu_ops.pack_linear_codes(codes, scales, group, None, zeros, None, is_e2m1)


def make_nvfp4(n: int, k: int) -> cpu_ops.LinearWeight:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.rand(n, k // 16).to(torch.float8_e4m3fn)
    return cpu_ops.pack_linear_codes(
        codes, scales, 16, row_factors=torch.full((n,), 1e-3), is_e2m1=True
    )


# 576 columns are not whole groups of 128, so that w4a16 takes groups of 64.
WEIGHTS: dict[str, Callable[[int, int], cpu_ops.LinearWeight]] = {
    "fp8": make_fp8,
    "int4": partial(make_codes, group=64),
    "int4-zero-points": partial(make_codes, group=32, has_zero_points=True),
    "mxfp4": partial(make_codes, group=32, is_e2m1=True),
    "nvfp4": make_nvfp4,
}


def make_layers(weights: str) -> dict[str, list[cpu_ops.LinearWeight]]:
    """One packed weight per layer, so that a pass over all of them runs out of cache."""
    make = WEIGHTS[weights]
    shapes = {
        "qkv": ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }
    layers = {name: [make(n, k) for _ in range(NUM_LAYERS)] for name, (n, k) in shapes.items()}
    layers["lm_head"] = [cpu_ops.pack_linear(torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16))]
    return layers


def time_passes(weights: list[cpu_ops.LinearWeight], m: int, min_seconds: float) -> float:
    """Median seconds of one pass over `weights` in order."""
    inputs = {w.num_inputs: torch.randn(m, w.num_inputs) for w in weights}
    outputs = {w.num_outputs: torch.empty(m, w.num_outputs) for w in weights}
    calls = [(inputs[w.num_inputs], w, outputs[w.num_outputs]) for w in weights]

    def run_all() -> None:
        for x, packed, out in calls:
            cpu_ops.linear(x, packed, out)

    return median_seconds(run_all, min_seconds)


def bench_linear(layers: dict[str, list[cpu_ops.LinearWeight]], min_seconds: float) -> list[Row]:
    """Each shape over its own 30 layers, then the whole model in the order of a step.

    A shape's 30 layers may fit the last-level cache; the whole model (163 MB in FP8) may not.
    """
    rows = []
    for m in BATCHES:
        # A prefill computes one row of logits per request.
        names = [name for name in layers if name != "lm_head" or m <= 32]
        for name in names:
            first = layers[name][0]
            rows.append(
                Row(
                    f"linear {name} {first.num_outputs}x{first.num_inputs} M={m}",
                    time_passes(layers[name], m, min_seconds) / len(layers[name]) * 1e6,
                    first.num_bytes,
                    2 * m * first.num_outputs * first.num_inputs,
                )
            )
        blocks = zip(*(layers[name] for name in names if name != "lm_head"))
        step = [packed for block in blocks for packed in block]
        if "lm_head" in names:
            step += layers["lm_head"]
        rows.append(
            Row(
                f"linear whole model{'' if 'lm_head' in names else ', no lm_head'} M={m}",
                time_passes(step, m, min_seconds) * 1e6,
                sum(packed.num_bytes for packed in step),
                2 * m * sum(p.num_outputs * p.num_inputs for p in step),
            )
        )
    return rows


def bench_attention(dtype: torch.dtype, block_size: int, min_seconds: float) -> list[Row]:
    """Decode at several batch sizes and contexts, then a whole prompt: one layer of 30 rotated."""
    rows = []
    name = str(dtype).removeprefix("torch.")
    cases = [(batch, context, 1) for context in CONTEXTS for batch in (1, 8, 32)]
    for batch, context, query_len in [*cases, (1, 1500, 1500)]:
        per_request = -(-context // block_size)
        num_caches = max(1, min(NUM_LAYERS, 256 // batch))
        shape = (batch * per_request, NUM_KV_HEADS)
        caches = [
            (
                torch.randn(*shape, HEAD_DIM, block_size).to(dtype),
                torch.randn(*shape, block_size, HEAD_DIM).to(dtype),
            )
            for _ in range(num_caches)
        ]
        query = torch.randn(batch * query_len, NUM_HEADS, HEAD_DIM)
        out = torch.empty_like(query)
        tables = torch.randperm(shape[0], dtype=torch.int32).view(batch, per_request)
        starts = torch.arange(0, (batch + 1) * query_len, query_len, dtype=torch.int32)
        lens = torch.full((batch,), context, dtype=torch.int32)

        def run_all(
            caches: list[tuple[torch.Tensor, torch.Tensor]] = caches,
            query: torch.Tensor = query,
            tables: torch.Tensor = tables,
            starts: torch.Tensor = starts,
            lens: torch.Tensor = lens,
            out: torch.Tensor = out,
        ) -> None:
            for k, v in caches:
                cpu_ops.paged_attention(query, k, v, tables, starts, lens, 0.125, out=out)

        pairs = sum(range(context - query_len + 1, context + 1)) * batch * NUM_HEADS
        rows.append(
            Row(
                f"attention {name} b{batch} context {context} query {query_len}",
                median_seconds(run_all, min_seconds) / num_caches * 1e6,
                2 * batch * context * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize,
                4 * HEAD_DIM * pairs,
            )
        )
    return rows


def layer_cases(m: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Row-wise layers at batch m: name -> (call, bytes read and written)."""
    x, residual, weight = torch.randn(m, HIDDEN), torch.randn(m, HIDDEN), torch.ones(HIDDEN)
    gate_up, gate_out = torch.randn(m, 2 * INTERMEDIATE), torch.empty(m, INTERMEDIATE)
    qkv = torch.randn(m, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    query, key = qkv[:, :NUM_HEADS], qkv[:, NUM_HEADS:-NUM_KV_HEADS]
    value = qkv[:, -NUM_KV_HEADS:]
    cos_sin, positions = torch.randn(2048, HEAD_DIM), torch.arange(m)
    shape = (-(-m // 16), NUM_KV_HEADS)
    k_cache = torch.zeros(*shape, HEAD_DIM, 16, dtype=torch.bfloat16)
    v_cache = torch.zeros(*shape, 16, HEAD_DIM, dtype=torch.bfloat16)
    return {
        "fused_add_rms_norm": (
            lambda: cpu_ops.fused_add_rms_norm(x, residual, weight, 1e-5),
            16 * x.numel(),
        ),
        "silu_and_mul": (
            lambda: cpu_ops.silu_and_mul(gate_up, gate_out),
            4 * (gate_up.numel() + gate_out.numel()),
        ),
        "rotary_embedding": (
            lambda: cpu_ops.rotary_embedding(positions, query, key, cos_sin),
            8 * (query.numel() + key.numel()),
        ),
        "reshape_and_cache bfloat16": (
            lambda: cpu_ops.reshape_and_cache(key, value, k_cache, v_cache, positions),
            6 * (key.numel() + value.numel()),
        ),
    }


def bench_layers(min_seconds: float) -> list[Row]:
    return [
        Row(f"{name} M={m}", median_seconds(run, min_seconds) * 1e6, num_bytes, 0)
        for m in BATCHES
        for name, (run, num_bytes) in layer_cases(m).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", choices=("avx512_bf16", "avx512", "avx2", "portable"))
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--only", choices=("linear", "attention", "layers"))
    parser.add_argument("--weights", choices=WEIGHTS, default="fp8", help="of linear layers")
    parser.add_argument("--seconds", type=float, default=0.3, help="least time for each median")
    args = parser.parse_args()
    torch.manual_seed(0)
    library = native.load(args.isa)
    dtype = CACHE_DTYPES[args.cache_dtype]
    ceilings = measure_ceilings()
    rows: list[Row] = []
    if args.only in (None, "linear"):
        rows += bench_linear(make_layers(args.weights), args.seconds)
    if args.only in (None, "attention"):
        rows += bench_attention(dtype, args.block_size, args.seconds)
    if args.only in (None, "layers"):
        rows += bench_layers(args.seconds / 10)
    print(
        f"{library.cpu_isa()}, {library.cpu_num_threads()} threads: "
        f"read {ceilings.read_gb_s:.1f} GB/s, copy {ceilings.copy_gb_s:.1f} GB/s, "
        f"float32 matmul {ceilings.matmul_gflop_s:.0f} GFLOP/s"
    )
    print(f"{'':<44}{'us':>12}{'GB/s':>9}{'read':>7}{'GFLOP/s':>10}{'mm':>7}")
    for row in rows:
        print(row.describe(ceilings))
    if args.json:
        result = {
            "isa": library.cpu_isa(),
            "weights": args.weights,
            "num_threads": library.cpu_num_threads(),
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "block_size": args.block_size,
            "ceilings": asdict(ceilings),
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
