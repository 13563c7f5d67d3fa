"""FP8 block GEMM on a GPU: ours beside DeepGEMM and FlashInfer, and the copy bandwidth.

    python benchmarks/kernels/bench_fp8_block_gemm.py --library vllm/lib/libvllm_kernels.so \
        --out benchmarks/results/h100

Each figure is the median of CUDA-graph replays over several copies of the weight, so that none is
found in the L2 cache. `+q` means that quantising bf16 activations is included. Every kernel is
compared with a float32 reference before it is timed.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import tvm_ffi
from gpu_results import write_results
from gpu_timing import replay_microseconds
from torch import Tensor

SHAPES = [(4096, 4096), (24576, 4096), (4096, 12288), (7168, 16384), (6144, 4096), (7168, 4096)]
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
MAX_SKINNY_TOKENS, MAX_SPLIT_TOKENS = 16, 512
SKINNY_SHAPES = [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16), (4, 4), (4, 8)]
# (tile_m, tile_n, thread blocks of a cluster, whether they split K)
SPLIT_TILINGS = [(m, n, c, True) for m, n in ((64, 64), (128, 64), (128, 128)) for c in (2, 4)]
STAYING_TILES = [(64, 32), (64, 64), (128, 64), (128, 128), (256, 128)]
TILINGS = [*SPLIT_TILINGS, *((m, n, c, False) for m, n in STAYING_TILES for c in (1, 2))]
L2_BYTES = 100 << 20
MAX_ERROR = 6e-3


def quantised_blocks(n: int, k: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn(n, k, device="cuda")
    blocks = weight.view(n // 128, 128, k // 128, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    return (blocks / scales[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn), scales


def quantised_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    groups = x.float().view(m, k // 128, 128)
    scales = groups.abs().amax(2).clamp(min=1e-10) / 448
    return (groups / scales[:, :, None]).view(m, k).to(torch.float8_e4m3fn), scales


def reference(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    q, s = quantised_tokens(x)
    a = q.float() * s.repeat_interleave(128, 1)
    b = weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return a @ b.T


def copy_bandwidth() -> float:
    """Bytes read and written per second by a kernel that copies 1 GiB."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (replay_microseconds([lambda: torch.neg(source, out=target)]) * 1e-6)


def on_stream(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with tvm_ffi.use_torch_stream():
            return call()

    return run


def error_of(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


class Case:
    """One (N, K, M) with enough copies of the weight to defeat the L2 cache."""

    def __init__(self, n: int, k: int, m: int):
        copies = max(2, min(16, -(-2 * L2_BYTES // (n * k))))
        self.weights = [quantised_blocks(n, k) for _ in range(copies)]
        self.x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self.outs = [torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
                     for _ in self.weights]  # fmt: skip
        self.errors: list[float] = []
        self.expected = reference(self.x, *self.weights[0])

    def time(self, make: Callable[[Tensor, Tensor, Tensor], Callable[[], object]]) -> float:
        """Microseconds of `make(weight, scales, out)`'s call; AssertionError if it is wrong."""
        calls = [make(w, s, out) for (w, s), out in zip(self.weights, self.outs)]
        self.outs[0].fill_(float("nan"))
        calls[0]()
        torch.cuda.synchronize()
        error = error_of(self.outs[0], self.expected)
        assert error < MAX_ERROR, f"relative error {error}"
        self.errors.append(error)
        return replay_microseconds(calls)


def skinny(library: tvm_ffi.Module, x: Tensor, shape: tuple[int, int], quantises: bool):
    given = (x, None) if quantises else quantised_tokens(x)

    def make(weight: Tensor, scales: Tensor, out: Tensor):
        return on_stream(
            lambda: library.skinny_fp8_block_gemm(*given, weight, scales, None, out, *shape)
        )

    return make


def cutlass(library: tvm_ffi.Module, x: Tensor, tiling: tuple[int, int, int, bool] | None):
    q, scales = quantised_tokens(x)
    scales = scales.t().contiguous().t()

    def make(weight: Tensor, weight_scales: Tensor, out: Tensor):
        operands = (q, scales, weight, weight_scales, None, out)
        if tiling is None:
            return on_stream(lambda: library.cutlass_fp8_block_gemm(*operands))
        return on_stream(lambda: library.sm90_fp8_block_gemm(*operands, *tiling))

    return make


def collective(library: tvm_ffi.Module, x: Tensor, which: int):
    """CUTLASS's own collective for SM90; its TMA wants rows of scales 16 bytes aligned."""
    q, scales = quantised_tokens(x)
    scales = scales.t().contiguous().t()

    def make(weight: Tensor, weight_scales: Tensor, out: Tensor):
        return on_stream(
            lambda: library.cutlass_collective(q, scales, weight, weight_scales, out, which)
        )

    return make


def deep_gemm_call(x: Tensor):
    import deep_gemm

    q, s = quantised_tokens(x)
    if hasattr(deep_gemm, "get_mn_major_tma_aligned_tensor"):
        s = deep_gemm.get_mn_major_tma_aligned_tensor(s)

    def make(weight: Tensor, scales: Tensor, out: Tensor):
        return lambda: deep_gemm.fp8_gemm_nt((q, s), (weight, scales), out, disable_ue8m0_cast=True)

    return make


def flashinfer_call(x: Tensor):
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    def make(weight: Tensor, scales: Tensor, out: Tensor):
        def call() -> None:
            out.copy_(fp8_blockscale_gemm_sm90(x, weight, None, scales, out_dtype=out.dtype))

        return call

    return make


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--collective", type=Path, help="library with CUTLASS's own collective")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true", help="every shape and tiling of ours")
    parser.add_argument("--peers", nargs="*", default=["deep_gemm", "flashinfer"])
    parser.add_argument("--ours", nargs="*", default=["skinny", "skinny+q", "cutlass"])
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    args = parser.parse_args()
    torch.manual_seed(0)
    library = tvm_ffi.load_module(str(args.library))
    other = tvm_ffi.load_module(str(args.collective)) if args.collective else None
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}, copy {bandwidth / 1e12:.2f} TB/s")
    rows = []
    for n, k in SHAPES[: args.shapes]:
        for m in args.tokens:
            rows.append(measure(library, other, args, n, k, m, bandwidth))
    if args.out:
        write_results(args.out, "fp8_block_gemm.json", copy_bytes_per_s=bandwidth, rows=rows)
    return 0


def our_calls(library: tvm_ffi.Module, args, x: Tensor) -> dict[str, Callable]:
    """By name, what makes the calls of our kernels for x."""
    calls: dict[str, Callable] = {}
    if x.shape[0] <= MAX_SKINNY_TOKENS:
        for shape in SKINNY_SHAPES if args.sweep else [(0, 0)]:
            suffix = f" {shape[0]}x{shape[1]}" * args.sweep
            calls["skinny" + suffix] = skinny(library, x, shape, False)
            calls["skinny+q" + suffix] = skinny(library, x, shape, True)
    for tiling in TILINGS if args.sweep else [None]:
        if tiling is not None and tiling[3] and x.shape[0] > MAX_SPLIT_TOKENS:
            continue
        suffix = "" if tiling is None else " {}x{} {}{}".format(*tiling[:3], "ks"[not tiling[3]])
        calls["cutlass" + suffix] = cutlass(library, x, tiling)
    return {name: call for name, call in calls.items() if name.split()[0] in args.ours}


def measure(
    library: tvm_ffi.Module, other: tvm_ffi.Module | None, args, n: int, k: int, m: int,
    bandwidth: float,
) -> dict:  # fmt: skip
    case = Case(n, k, m)
    times = {name: case.time(call) for name, call in our_calls(library, args, case.x).items()}
    best = min(times, key=times.__getitem__, default="")
    for name, call in (("deep_gemm", deep_gemm_call), ("flashinfer", flashinfer_call)):
        if name in args.peers:
            times[name] = case.time(call(case.x))
    if other is not None:
        for which in range(2):
            if m % 4 == 0:
                times[f"collective {which}"] = case.time(collective(other, case.x, which))
    floor = n * k / bandwidth * 1e6
    flops = 2 * n * k * m
    shown = sorted(times, key=times.__getitem__)[:6] if args.sweep else list(times)
    shown += [name for name in times if name not in shown and name.split()[0] not in args.ours]
    text = "  ".join(f"{name} {times[name]:.2f}" for name in shown)
    print(f"{n:6d} x {k:5d}  M={m:<5d} {text}  us; {floor / times[best]:4.0%} of copy bandwidth, "
          f"{flops / times[best] / 1e6:.0f} TFLOP/s", flush=True)  # fmt: skip
    return {"n": n, "k": k, "m": m, "us": times, "best": best}


if __name__ == "__main__":
    sys.exit(main())
