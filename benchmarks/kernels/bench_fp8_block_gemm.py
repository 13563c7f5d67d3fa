"""FP8 block GEMM on a GPU: ours beside DeepGEMM and FlashInfer, and the copy bandwidth.

    python benchmarks/kernels/bench_fp8_block_gemm.py --library vllm/lib/libvllm_kernels.so \
        --out benchmarks/results/h100

Every kernel is compared with a float32 reference, then timed in rounds: in each, all kernels of a
size in random order, each after a pause, since a chip at its power limit slows down whoever comes
after a hungry one. A figure is the median of the rounds; each round's is the median of CUDA-graph
replays over several copies of the weight, so that none is found in the L2 cache. `+q` means that
quantising bf16 activations is included. `--sustained` also runs each kernel for a while and reads
clock and power from nvidia-smi. FlashInfer compiles its kernel at the first call unless it lies
built in its data/aot.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import tvm_ffi
from gpu_results import write_results
from gpu_timing import replay_microseconds
from torch import Tensor

SHAPES = [(4096, 4096), (24576, 4096), (4096, 12288), (7168, 16384), (6144, 4096), (7168, 4096)]
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
MAX_SKINNY_TOKENS, MAX_SPLIT_TOKENS = 16, 128
SKINNY_SHAPES = [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16), (4, 4), (4, 8)]
# (tile_m, tile_n, thread blocks of a cluster, whether they split K)
SPLIT_TILINGS = [(m, n, c, True) for m, n in ((64, 32), (128, 64)) for c in (2, 4)]
STAYING_TILES = [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (256, 128)]
TILINGS = [*SPLIT_TILINGS, *((m, n, c, False) for m, n in STAYING_TILES for c in (1, 2))]
L2_BYTES = 100 << 20
MAX_ERROR = 6e-3
PAUSE_SECONDS = 0.02
OURS = ("skinny", "skinny+q", "cutlass", "cutlass+q", "triton")
OF_BF16 = ("skinny+q", "cutlass+q", "flashinfer")  # what quantises its activations itself


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
        self.expected = reference(self.x, *self.weights[0])

    def calls(self, make: "Make") -> list[Callable[[], object]]:
        """A call for each copy of the weight; AssertionError if the first is wrong."""
        calls = [make(w, s, out) for (w, s), out in zip(self.weights, self.outs)]
        self.outs[0].fill_(float("nan"))
        calls[0]()
        torch.cuda.synchronize()
        error = error_of(self.outs[0], self.expected)
        assert error < MAX_ERROR, f"relative error {error}"
        return calls


Make = Callable[[Tensor, Tensor, Tensor], Callable[[], object]]


def median_times(calls: dict[str, list], num_rounds: int) -> dict[str, float]:
    """Microseconds of a call of each kernel."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name in random.sample(list(calls), len(calls)):
            time.sleep(PAUSE_SECONDS)
            samples[name].append(replay_microseconds(calls[name]))
    return {name: statistics.median(found) for name, found in samples.items()}


def sustained(calls: list[Callable[[], object]], seconds: float) -> dict[str, float]:
    """Microseconds of a call, MHz and W after `seconds` / 2 of nothing else."""
    query = "--query-gpu=clocks.sm,power.draw.instant"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "--loop-ms=20"]
    end, times = time.monotonic() + seconds / 2, []
    while time.monotonic() < end:
        replay_microseconds(calls)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as monitor:
        end += seconds / 2
        while time.monotonic() < end:
            times.append(replay_microseconds(calls))
        monitor.terminate()
        lines = [line.split(",") for line in monitor.stdout][:-1]  # the last may be cut
    clock, power = (statistics.mean(float(line[i]) for line in lines) for i in (0, 1))
    return {"us": statistics.median(times), "mhz": clock, "watts": power}


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


def quantised_cutlass(library: tvm_ffi.Module, x: Tensor):
    """Our quantiser of bf16 activations, then the GEMM: two launches."""
    m, k = x.shape
    q = torch.empty(m, k, device="cuda", dtype=torch.float8_e4m3fn)
    scales = torch.empty(k // 128, -(-m // 4) * 4, device="cuda").t()[:m]

    def make(weight: Tensor, weight_scales: Tensor, out: Tensor):
        def call() -> None:
            library.fp8_quant_group(x, q, scales, 128, 1e-10, False)
            library.cutlass_fp8_block_gemm(q, scales, weight, weight_scales, None, out)

        return on_stream(call)

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


def triton_call(x: Tensor):
    from vllm.kernels.triton.linear import fp8_block_gemm

    q, s = quantised_tokens(x)

    def make(weight: Tensor, scales: Tensor, out: Tensor):
        return lambda: fp8_block_gemm(q, s, weight, scales, None, (128, 128), out)

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
        return lambda: fp8_blockscale_gemm_sm90(x, weight, None, scales, out=out)

    return make


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--collective", type=Path, help="library with CUTLASS's own collective")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true", help="every shape and tiling of ours")
    parser.add_argument("--peers", nargs="*", default=["deep_gemm", "flashinfer"])
    parser.add_argument("--ours", nargs="*", default=OURS)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sustained", type=float, default=0.0, help="seconds of each kernel")
    return parser.parse_args()


def main() -> int:
    args = options()
    torch.manual_seed(0)
    random.seed(0)
    library = tvm_ffi.load_module(str(args.library))
    other = tvm_ffi.load_module(str(args.collective)) if args.collective else None
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}, copy {bandwidth / 1e12:.2f} TB/s")
    rows = []
    name = "fp8_block_gemm_sweep.json" if args.sweep else "fp8_block_gemm.json"
    for n, k in SHAPES[: args.shapes]:
        for m in args.tokens:
            rows.append(measure(library, other, args, n, k, m, bandwidth))
        if args.out:  # after each shape: what is measured is kept if the rest is cut off
            write_results(args.out, name, copy_bytes_per_s=bandwidth, rows=rows)
    return 0


def our_calls(library: tvm_ffi.Module, args, x: Tensor) -> dict[str, Make]:
    """By name, what makes the calls of our kernels for x."""
    calls: dict[str, Make] = {}
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
    if "cutlass+q" in args.ours:
        calls["cutlass+q"] = quantised_cutlass(library, x)
    if "triton" in args.ours:
        calls["triton"] = triton_call(x)
    return {name: call for name, call in calls.items() if name.split()[0] in args.ours}


def peer_calls(other: tvm_ffi.Module | None, args, x: Tensor) -> dict[str, Make]:
    peers = {"deep_gemm": deep_gemm_call, "flashinfer": flashinfer_call}
    calls = {name: call(x) for name, call in peers.items() if name in args.peers}
    if other is not None and x.shape[0] % 4 == 0:
        calls |= {f"collective {which}": collective(other, x, which) for which in range(2)}
    return calls


def ratios(times: dict[str, float]) -> dict[str, float]:
    """How many times faster than a library our best is that starts from the same inputs."""
    found = {}
    for peer in ("deep_gemm", "flashinfer"):
        ours = [us for name, us in times.items() if name.split()[0] in ("skinny", "cutlass")]
        if peer in OF_BF16:
            found["flashinfer (ours without quantising)"] = times.get(peer, 0.0) / min(
                ours, default=1
            )
            ours = [us for name, us in times.items() if name.split()[0] in OF_BF16[:2]]
        if peer in times and ours:
            found[peer] = times[peer] / min(ours)
    return {peer: ratio for peer, ratio in found.items() if ratio > 0}


def line_of(row: dict) -> str:
    shown = sorted(row["us"], key=row["us"].__getitem__)[:8]
    times = "  ".join(f"{name} {row['us'][name]:.2f}" for name in shown)
    ratios = ", ".join(f"{ratio:.2f} x {peer}" for peer, ratio in row["times_faster_than"].items())
    return (f"{row['n']:6d} x {row['k']:5d}  M={row['m']:<5d} {times}  us; "
            f"{row['of_copy_bandwidth']:4.0%} of copy bandwidth, {row['tflop_per_s']:.0f} TFLOP/s; "
            f"{ratios} {row.get('sustained', '')}")  # fmt: skip


def measure(
    library: tvm_ffi.Module, other: tvm_ffi.Module | None, args, n: int, k: int, m: int,
    bandwidth: float,
) -> dict:  # fmt: skip
    case = Case(n, k, m)
    makes = our_calls(library, args, case.x) | peer_calls(other, args, case.x)
    calls = {name: case.calls(make) for name, make in makes.items()}
    times = median_times(calls, args.rounds)
    alone = {name: us for name, us in times.items() if name.split()[0] in ("skinny", "cutlass")}
    best = min(alone or times, key=times.__getitem__)
    row = {
        "n": n, "k": k, "m": m, "us": times, "best": best,
        "tflop_per_s": 2 * n * k * m / times[best] / 1e6,
        "gb_per_s": (n * k + m * k + 2 * m * n) / times[best] / 1e3,
        "of_copy_bandwidth": n * k / bandwidth * 1e6 / times[best],
        "times_faster_than": ratios(times),
    }  # fmt: skip
    if args.sustained:
        row["sustained"] = {name: sustained(runs, args.sustained) for name, runs in calls.items()}
    print(line_of(row), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
