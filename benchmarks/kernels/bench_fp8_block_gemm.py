"""FP8 block GEMM on a GPU: ours beside DeepGEMM and FlashInfer, and the copy bandwidth.

    python benchmarks/kernels/bench_fp8_block_gemm.py --out benchmarks/results/h100 --minutes 8

Every kernel of a size is compared with a float32 reference first; what is absent or wrong of other
libraries is left out, with the reason, and what is wrong of ours ends the run. Then they are timed
in rounds: in each, all kernels of the size in random order, each after a pause, since a chip at its
power limit slows down whoever comes after a hungry one. A figure is the median of the rounds; each
round's is the median of CUDA-graph replays over several copies of the weight, so that none is found
in the L2 cache. `+q` means that quantising bf16 activations is included. Results are written after
each size. `--sustained` also runs each kernel for a while and reads clock and power by nvidia-smi.
FlashInfer compiles its kernel at the first call unless it lies built in its data/aot.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tvm_ffi
from fp8_block_calls import (
    Call,
    Make,
    collective,
    cutlass,
    deep_gemm_call,
    flashinfer_call,
    quantised_blocks,
    quantised_cutlass,
    reference,
    skinny,
    triton_call,
)
from gpu_results import write_results
from gpu_timing import copy_bandwidth, replay_microseconds
from torch import Tensor

LIBRARY = Path(__file__).parents[2] / "vllm" / "lib" / "libvllm_kernels.so"
SHAPES = [(4096, 4096), (24576, 4096), (4096, 12288), (7168, 16384)]
TOKENS = (1, 8, 16, 32, 64, 128, 192, 256, 1024, 4096)
MAX_SKINNY_TOKENS, MAX_SPLIT_TOKENS = 16, 128
SKINNY_SHAPES = [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16), (4, 4), (4, 8)]
# (tile_m, tile_n, thread blocks of a cluster, whether they split K)
SPLIT_TILINGS = [(m, n, c, True) for m, n in ((64, 32), (128, 64)) for c in (2, 4)]
STAYING_TILES = [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (256, 128)]
TILINGS = [*SPLIT_TILINGS, *((m, n, c, False) for m, n in STAYING_TILES for c in (1, 2))]
L2_BYTES = 100 << 20
MAX_ERROR = 6e-3
PAUSE_SECONDS = 0.02
OURS = ("skinny", "skinny+q", "cutlass", "cutlass+q")
OF_BF16 = ("skinny+q", "cutlass+q", "flashinfer")  # what quantises its activations itself
PEERS = {"deep_gemm": deep_gemm_call, "flashinfer": flashinfer_call}


def error_of(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def make_weights(n: int, k: int) -> list[tuple[Tensor, Tensor]]:
    """Enough copies to defeat the L2 cache."""
    copies = max(2, min(16, -(-2 * L2_BYTES // (n * k))))
    return [quantised_blocks(n, k) for _ in range(copies)]


class Case:
    """So many tokens, and the weights of a shape."""

    def __init__(self, weights: list[tuple[Tensor, Tensor]], m: int):
        n, k = weights[0][0].shape
        self.weights = weights
        self.x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self.outs = [torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
                     for _ in weights]  # fmt: skip
        self.expected = reference(self.x, *weights[0])

    def calls(self, make: Make) -> list[Call]:
        """A call for each copy of the weight; AssertionError if the first is wrong."""
        calls = [make(w, s, out) for (w, s), out in zip(self.weights, self.outs)]
        self.outs[0].fill_(float("nan"))
        calls[0]()
        torch.cuda.synchronize()
        error = error_of(self.outs[0], self.expected)
        assert error < MAX_ERROR, f"relative error {error}"
        return calls


def median_times(calls: dict[str, list[Call]], num_rounds: int) -> dict[str, float]:
    """Microseconds of a call of each kernel."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name in random.sample(list(calls), len(calls)):
            time.sleep(PAUSE_SECONDS)
            samples[name].append(replay_microseconds(calls[name]))
    return {name: statistics.median(found) for name, found in samples.items()}


def sustained(calls: list[Call], seconds: float) -> dict[str, float]:
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


def our_makes(library: tvm_ffi.Module, args: argparse.Namespace, x: Tensor) -> dict[str, Make]:
    """By name, what makes the calls of our kernels for x."""
    makes: dict[str, Make] = {}
    if x.shape[0] <= MAX_SKINNY_TOKENS:
        for shape in SKINNY_SHAPES if args.sweep else [(0, 0)]:
            suffix = f" {shape[0]}x{shape[1]}" * args.sweep
            makes["skinny" + suffix] = skinny(library, x, shape, False)
            makes["skinny+q" + suffix] = skinny(library, x, shape, True)
    for tiling in TILINGS if args.sweep else [None]:
        if tiling is not None and tiling[3] and x.shape[0] > MAX_SPLIT_TOKENS:
            continue
        suffix = "" if tiling is None else " {}x{} {}{}".format(*tiling[:3], "ks"[not tiling[3]])
        makes["cutlass" + suffix] = cutlass(library, x, tiling)
    if "cutlass+q" in args.ours:
        makes["cutlass+q"] = quantised_cutlass(library, x)
    if "triton" in args.ours:
        makes["triton"] = triton_call(x)
    return {name: make for name, make in makes.items() if name.split()[0] in args.ours}


@dataclass
class Bench:
    args: argparse.Namespace
    library: tvm_ffi.Module
    collective: tvm_ffi.Module | None
    bandwidth: float
    left_out: dict[str, str] = field(default_factory=dict)  # why, by kernel and size

    def peer_calls(self, case: Case, size: str) -> dict[str, list[Call]]:
        """Of other libraries, those that are there and right."""
        calls = {}
        for name in self.args.peers:
            if name in self.left_out:
                continue
            try:
                calls[name] = case.calls(PEERS[name](case.x))
            except ImportError as error:
                self.leave_out(name, error)
            except Exception as error:  # a library's own, of any kind
                self.leave_out(f"{name}, {size}", error)
        if self.collective is not None and case.x.shape[0] % 4 == 0:
            for which in range(2):
                made = collective(self.collective, case.x, which)
                calls[f"collective {which}"] = case.calls(made)
        return calls

    def leave_out(self, what: str, error: Exception) -> None:
        self.left_out[what] = f"{type(error).__name__}: {error}"[:300]
        print(f"left out: {what}: {self.left_out[what]}", flush=True)

    def measure(self, weights: list[tuple[Tensor, Tensor]], m: int) -> dict:
        n, k = weights[0][0].shape
        case = Case(weights, m)
        ours = our_makes(self.library, self.args, case.x)
        calls = {name: case.calls(make) for name, make in ours.items()}
        calls |= self.peer_calls(case, f"{n} x {k}, M={m}")
        times = median_times(calls, self.args.rounds)
        alone = {name: us for name, us in times.items() if name.split()[0] in ("skinny", "cutlass")}
        best = min(alone or times, key=times.__getitem__)
        row = {
            "n": n, "k": k, "m": m, "us": times, "best": best,
            "tflop_per_s": 2 * n * k * m / times[best] / 1e6,
            "gb_per_s": (n * k + m * k + 2 * m * n) / times[best] / 1e3,
            "of_copy_bandwidth": n * k / self.bandwidth * 1e6 / times[best],
            "times_faster_than": ratios(times),
        }  # fmt: skip
        if self.args.sustained:
            seconds = self.args.sustained
            row["sustained"] = {name: sustained(runs, seconds) for name, runs in calls.items()}
        return row


def ratios(times: dict[str, float]) -> dict[str, float]:
    """How many times faster than a library our best is that starts from the same inputs."""
    found = {}
    for peer in PEERS:
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
    return (f"{row['n']:6d} x {row['k']:5d}  M={row['m']:<5d} {times}  us; weights at "
            f"{row['of_copy_bandwidth']:4.0%} of copy bandwidth, {row['tflop_per_s']:.0f} TFLOP/s; "
            f"{ratios} {row.get('sustained', '')}")  # fmt: skip


def shape_of(text: str) -> tuple[int, int]:
    sizes = [int(part) for part in text.split("x") if part.isdecimal()]
    if len(sizes) != 2 or any(size == 0 or size % 128 for size in sizes):
        raise argparse.ArgumentTypeError(
            f"given {text}; accepted: multiples of 128 such as 4096x12288"
        )
    return sizes[0], sizes[1]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--collective", type=Path, help="library with CUTLASS's own collective")
    parser.add_argument("--out", type=Path, help="folder that receives fp8_block_gemm.json")
    parser.add_argument("--sweep", action="store_true", help="every shape and tiling of ours")
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=PEERS)
    parser.add_argument("--ours", nargs="*", default=OURS, choices=[*OURS, "triton"])
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--shapes", type=shape_of, nargs="*", default=SHAPES, metavar="NxK")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10.0,
                        help="after which no further size is begun")  # fmt: skip
    parser.add_argument("--sustained", type=float, default=0.0, help="seconds of each kernel")
    return parser.parse_args()


def main() -> int:
    args = options()
    end = time.monotonic() + 60 * args.minutes
    torch.manual_seed(0)
    random.seed(0)
    library = tvm_ffi.load_module(str(args.library))
    other = tvm_ffi.load_module(str(args.collective)) if args.collective else None
    bench = Bench(args, library, other, copy_bandwidth() * 1e6)
    print(f"{torch.cuda.get_device_name()}, copy {bench.bandwidth / 1e12:.2f} TB/s")
    name = "fp8_block_gemm_sweep.json" if args.sweep else "fp8_block_gemm.json"
    rows: list[dict] = []
    missing = [(n, k, m) for n, k in args.shapes for m in args.tokens]
    for n, k in args.shapes:
        weights: list[tuple[Tensor, Tensor]] = []
        for m in args.tokens:
            if time.monotonic() > end:
                break
            weights = weights or make_weights(n, k)
            rows.append(bench.measure(weights, m))
            missing.remove((n, k, m))
            print(line_of(rows[-1]), flush=True)
            if args.out:  # what is measured is kept if the rest is cut off
                write_results(args.out, name, copy_bytes_per_s=bench.bandwidth,
                              left_out=bench.left_out, not_measured=missing, rows=rows)  # fmt: skip
    if missing:
        print(f"not measured in {args.minutes:g} minutes: {len(missing)} sizes, from {missing[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
