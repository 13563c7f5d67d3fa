"""Times the CUDA layers and the sampler, against the bandwidth of a copy measured in the same run.

    python benchmarks/kernels/bench_cuda_ops.py [--out DIR] [--quick]

Each figure is the median of CUDA-graph replays over several sets of buffers, together more than
four times L2 where memory allows. Bytes are those that must move: inputs read once, outputs written
once. `of copy` compares with torch's copy of the same number of bytes, timed in the same way.
The host's time for a call is that of calls with no rows, which launch nothing, and of calls with
one, whose launches it includes.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_results import write_results
from gpu_timing import copy_microseconds, replay_microseconds
from torch import Tensor

from vllm.kernels import cuda_ops as ops
from vllm.kernels.triton.attention import reshape_and_cache
from vllm.ops.paged_attention import CacheTarget
from vllm.utils.math_utils import cdiv

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 32, 8, 128
VOCAB = 151936
MAX_SETS = 128
SAMPLERS: dict[str, tuple[float, int, float, float]] = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "min_p 0.05": (0.8, 0, 1.0, 0.05),
    "top_k 50": (0.8, 50, 1.0, 0.0),
    "top_p 0.9": (0.8, 0, 0.9, 0.0),
    "top_k 50, top_p 0.9": (0.8, 50, 0.9, 0.0),
}


@dataclass(frozen=True)
class Case:
    name: str
    num_rows: int
    num_bytes: int
    make: Callable[[], Callable[[], object]]
    """Fresh buffers and the call on them."""


@dataclass(frozen=True)
class Row:
    case: str
    num_rows: int
    microseconds: float
    gb_s: float
    of_copy: float
    is_cold: bool


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def layer_cases(t: int) -> Iterator[Case]:
    weight = torch.rand(HIDDEN, device="cuda")
    head_weight = torch.rand(HEAD_DIM, device="cuda")
    cache = torch.rand(40960, HEAD_DIM, device="cuda")
    positions = torch.randint(0, 40960, (t,), device="cuda")
    table = bf16(VOCAB, HIDDEN)
    num_heads = HEADS + KV_HEADS

    def norm():
        x, out = bf16(t, HIDDEN), bf16(t, HIDDEN)
        return lambda: ops.rms_norm(x, weight, 1e-6, out=out)

    def add_norm():
        x, residual = bf16(t, HIDDEN), bf16(t, HIDDEN)
        return lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-6)

    def heads() -> tuple[Tensor, Tensor]:
        qkv = bf16(t, num_heads + KV_HEADS, HEAD_DIM)
        return qkv[:, :HEADS], qkv[:, HEADS:num_heads]

    def rotary():
        q, k = heads()
        return lambda: ops.rotary_embedding(positions, q, k, cache)

    def qk_norm_rotary():
        q, k = heads()
        return lambda: ops.qk_norm_rotary(positions, q, k, head_weight, head_weight, cache, 1e-6)

    def into_cache(is_one: bool) -> Callable[[], object]:
        q, k, v = bf16(t, num_heads + KV_HEADS, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
        shape = (cdiv(t, 16), 16, KV_HEADS, HEAD_DIM)
        caches, slots = (bf16(*shape), bf16(*shape)), torch.randperm(t, device="cuda")
        norms, target = (head_weight, head_weight), CacheTarget(v, *caches, slots, 1.0, 1.0)
        if is_one:
            return lambda: ops.rotary_into_cache(positions, q, k, target, cache, norms, 1e-6)

        def two() -> None:
            ops.qk_norm_rotary(positions, q, k, *norms, cache, 1e-6)
            reshape_and_cache(k, v, *caches, slots)

        return two

    def silu():
        x, out = bf16(t, 2 * INTERMEDIATE), bf16(t, INTERMEDIATE)
        return lambda: ops.silu_and_mul(x, out=out)

    def embedding():
        ids, out = torch.randint(0, VOCAB, (t,), device="cuda"), bf16(t, HIDDEN)
        return lambda: ops.embedding(ids, table, out=out)

    rotated = 4 * t * num_heads * HEAD_DIM + 4 * t * HEAD_DIM
    yield Case("rms_norm", t, 4 * t * HIDDEN + 4 * HIDDEN, norm)
    yield Case("fused_add_rms_norm", t, 8 * t * HIDDEN + 4 * HIDDEN, add_norm)
    yield Case("rotary_embedding", t, rotated, rotary)
    yield Case("qk_norm_rotary", t, rotated, qk_norm_rotary)
    written = rotated + 4 * t * KV_HEADS * HEAD_DIM
    yield Case("qk_norm_rotary into the cache", t, written, lambda: into_cache(True))
    yield Case("qk_norm_rotary, then the cache", t, written, lambda: into_cache(False))
    yield Case("silu_and_mul", t, 6 * t * INTERMEDIATE, silu)
    yield Case("embedding", t, 4 * t * HIDDEN, embedding)


def sampling_cases(s: int) -> Iterator[Case]:
    def make(values: tuple[float, int, float, float], dtype: torch.dtype):
        logits = (torch.randn(s, VOCAB, device="cuda") * 3).to(dtype)
        temperature, top_k, top_p, min_p = (torch.full((s,), v, device="cuda") for v in values)
        draws = torch.rand(s, dtype=torch.float64, device="cuda")
        return lambda: ops.sample_tokens(logits, temperature, top_k, top_p, min_p, draws)

    for name, values in SAMPLERS.items():
        yield Case(
            f"sample: {name}", s, 4 * s * VOCAB, lambda values=values: make(values, torch.float32)
        )
    for name in ("greedy", "temperature"):  # what the logits of a bfloat16 model are
        yield Case(
            f"sample: {name}, bfloat16", s, 2 * s * VOCAB,
            lambda name=name: make(SAMPLERS[name], torch.bfloat16),
        )  # fmt: skip

    def argmax():
        logits = torch.randn(s, VOCAB, device="cuda")
        return lambda: logits.argmax(-1)

    yield Case("torch.argmax", s, 4 * s * VOCAB, argmax)


def measure(case: Case, num_replays: int) -> Row:
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    num_sets = min(MAX_SETS, max(2, cdiv(4 * l2, case.num_bytes)))
    us = replay_microseconds([case.make() for _ in range(num_sets)], num_replays)
    copy_us = copy_microseconds(case.num_bytes, num_sets, num_replays)
    is_cold = num_sets * case.num_bytes >= 2 * l2
    torch.cuda.empty_cache()
    return Row(case.name, case.num_rows, us, case.num_bytes / us / 1e3, copy_us / us, is_cold)


def host_microseconds(call: Callable[[], object], num_calls: int = 500) -> float:
    """Best of ten: what is asked of the host, not what else it does."""
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(num_calls):
            call()
        best = min(best, (time.perf_counter() - begin) / num_calls)
    return best * 1e6


def host_times() -> dict[str, float]:
    weight = torch.rand(HIDDEN, device="cuda")

    def norms(num_rows: int, suffix: str) -> dict[str, float]:
        x, residual, out = (bf16(num_rows, HIDDEN) for _ in range(3))
        calls: dict[str, Callable[[], object]] = {
            "rms_norm": lambda: ops.rms_norm(x, weight, 1e-6, out=out),
            "rms_norm that allocates": lambda: ops.rms_norm(x, weight, 1e-6),
            "fused_add_rms_norm": lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-6),
            "torch.add": lambda: torch.add(x, residual, out=out),
        }
        return {f"{name}, {suffix}": host_microseconds(call) for name, call in calls.items()}

    return norms(0, "no launch") | norms(1, "launch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder that receives cuda_ops.json")
    parser.add_argument("--quick", action="store_true", help="few sizes, few replays")
    arguments = parser.parse_args()
    tokens = (1, 3500) if arguments.quick else (1, 16, 64, 256, 1024, 3500, 8192)
    num_replays = 5 if arguments.quick else 21
    cases = [case for t in tokens for case in layer_cases(t)]
    cases += [case for s in (1, 64, 256) for case in sampling_cases(s)]
    print(f"{torch.cuda.get_device_name()}\n{'case':<28}{'rows':>6}{'us':>9}{'GB/s':>7}  of copy")
    rows: list[Row] = []

    def keep(**more: dict) -> None:
        if arguments.out:
            write_results(arguments.out, "cuda_ops.json", rows=[asdict(r) for r in rows], **more)

    for case in cases:
        row = measure(case, num_replays)
        rows.append(row)
        keep()
        print(
            f"{row.case:<28}{row.num_rows:>6}{row.microseconds:>9.2f}{row.gb_s:>7.0f}"
            f"{row.of_copy:>9.1%}{'' if row.is_cold else '  warm'}",
            flush=True,
        )
    hosts = host_times()
    for name, us in hosts.items():
        print(f"host: {name:<40}{us:>7.2f} us")
    keep(host_microseconds=hosts)


if __name__ == "__main__":
    main()
