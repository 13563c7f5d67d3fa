"""Profiles one launch of each kernel with Nsight Compute: what it waits for, in a few lines.

    python benchmarks/kernels/profile_kernels.py sm90_gemm skinny rms_norm_quant --out DIR

writes DIR/profile_NAME.txt. Sizes are MxNxK of products and MxK of quantisers; `--sizes` has
others than the usual ones. Clocks are left alone (`--clock-control none`), caches are empty before
each pass (ncu's own way), and a launch is the fourth of its kind. ncu counts the time of a launch
without what the host and the launch before add: compare its figures with each other, not with those
of the benchmarks. DeepGEMM's kernel stands beside ours where it is installed. Needs ncu, a GPU and
the right to read its counters.
"""

import argparse
import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import torch

SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "WarpStateStats",
            "SchedulerStats", "LaunchStats", "Occupancy")  # fmt: skip
TENSOR_PIPE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
# (what is shown, ncu's names of it, of which the first that it gives counts, factor, unit), with
# base units: nanoseconds, bytes, Hz.
METRICS = [
    ("duration", ("gpu__time_duration.sum",), 1e-3, "us"),
    ("dram", ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
              "dram__throughput.avg.pct_of_peak_sustained_elapsed"), 1, "%"),
    ("dram bytes", ("dram__bytes.sum.per_second",), 1e-9, "GB/s"),
    ("L2", ("lts__throughput.avg.pct_of_peak_sustained_elapsed",), 1, "%"),
    ("L1 and shared", ("l1tex__throughput.avg.pct_of_peak_sustained_active",), 1, "%"),
    ("tensor pipe", (TENSOR_PIPE,), 1, "%"),
    ("issue slots", ("smsp__issue_active.avg.pct_of_peak_sustained_active",
                     "sm__inst_issued.avg.pct_of_peak_sustained_active"), 1, "%"),
    ("instructions", ("smsp__inst_executed.sum", "sm__inst_executed.sum"), 1e-6, "million"),
    ("registers", ("launch__registers_per_thread",), 1, "a thread"),
    ("shared memory", ("launch__shared_mem_per_block",), 2.0**-10, "KiB a block"),
    ("waves", ("launch__waves_per_multiprocessor",), 1, "an SM"),
    ("occupancy", ("sm__warps_active.avg.pct_of_peak_sustained_active",), 1, "%"),
    ("occupancy, most", ("sm__maximum_warps_per_active_cycle_pct",), 1, "%"),
    ("clock of SMs", ("smsp__cycles_elapsed.avg.per_second",
                      "gpc__cycles_elapsed.avg.per_second"), 1e-6, "MHz"),
    ("clock of dram", ("dram__cycles_elapsed.avg.per_second",), 1e-6, "MHz"),
]  # fmt: skip
STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!selected)(\w+)_per_issue_active\.ratio")
NUM_STALLS = 3
WARM_UPS = 3
SECONDS_PER_PROFILE = 300
Call = Callable[[], object]


class CannotProfileError(RuntimeError):
    """Says what is missing, and what to do."""


# ---------------------------------------------------------------- what is launched


def product(variant: str, size: tuple[int, ...]) -> Call:
    import fp8_block_calls as calls

    from vllm.platforms import native

    m, n, k = size
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    makes: dict[str, Callable[[], calls.Make]] = {
        "sm90": lambda: calls.cutlass(native.load(), x, None),
        "skinny": lambda: calls.skinny(native.load(), x, (0, 0), False),
        "skinny+q": lambda: calls.skinny(native.load(), x, (0, 0), True),
        "deep_gemm": lambda: calls.deep_gemm_call(x),
    }
    weight, scales = calls.quantised_blocks(n, k)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return makes[variant]()(weight, scales, out)


def quantiser(variant: str, size: tuple[int, ...]) -> Call:
    import bench_fp8_quant as bench

    case = next(case for case in bench.cases() if case.name == variant)
    buffers = bench.make_buffers(*size, seed=0)
    return lambda: case.ours(buffers)


@dataclass(frozen=True)
class Kernel:
    make: Callable[[str, tuple[int, ...]], Call]
    variants: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]


QUANTISED = ((1024, 4096), (4096, 7168), (8192, 7168))
KERNELS = {
    "sm90_gemm": Kernel(product, ("sm90", "deep_gemm"), ((4096, 4096, 4096), (4096, 7168, 16384))),
    "skinny": Kernel(
        product, ("skinny", "skinny+q", "deep_gemm"), ((16, 4096, 4096), (16, 24576, 4096))
    ),
    "rms_norm_quant": Kernel(
        quantiser, ("add+norm+group row-major", "norm+group row-major"), QUANTISED
    ),
    "silu_quant": Kernel(quantiser, ("silu+group row-major",), QUANTISED),
    "group_quant": Kernel(quantiser, ("group row-major",), QUANTISED),
    "token_quant": Kernel(quantiser, ("per token",), QUANTISED),
}


def launch(name: str, variant: str, size: tuple[int, ...]) -> None:
    """Under ncu: one call between the marks."""
    torch.manual_seed(0)
    call = KERNELS[name].make(variant, size)
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


# ---------------------------------------------------------------- what ncu says


def launches_of(text: str) -> list[dict[str, str]]:
    """Of the output of `ncu --csv --page raw`: ncu's names and values of every launch."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        return []
    rows = list(csv.DictReader(lines[first:]))
    return [row for row in rows if row["ID"]]  # the row without a number has the units


def number_of(values: dict[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        try:
            return float(values[name].replace(",", ""))
        except (KeyError, ValueError):  # ncu writes n/a and words, too
            continue
    return None


def report_of(values: dict[str, str]) -> list[str]:
    """Lines on one launch."""
    lines = [f"  {values.get('Kernel Name', 'a kernel')[:100]}"]
    for label, names, factor, unit in METRICS:
        number = number_of(values, names)
        text = "not given" if number is None else f"{number * factor:.4g} {unit}"
        lines.append(f"    {label:<16}{text}")
    found = {
        match[1]: number_of(values, (name,)) for name in values if (match := STALL.match(name))
    }
    stalls = sorted(((value or 0.0, name) for name, value in found.items()), reverse=True)
    shown = ", ".join(f"{name} {value:.2f}" for value, name in stalls[:NUM_STALLS])
    lines.append(f"    {'stalls':<16}{shown or 'not given'} (warps that wait, per issue)")
    return lines


def profile(ncu: str, name: str, variant: str, size: tuple[int, ...]) -> list[str]:
    """Lines on the launches of one call. Raises CannotProfileError."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    command = [
        ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
        "--print-units", "base", "--metrics", TENSOR_PIPE, *sections,
        sys.executable, __file__, "--launch", name, variant, name_of(size),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS_PER_PROFILE,
    )
    if "ERR_NVGPUCTRPERM" in done.stdout:
        raise CannotProfileError(
            "ncu may not read the GPU's counters here (ERR_NVGPUCTRPERM); run it as root, or ask "
            "for the driver's NVreg_RestrictProfilingToAdminUsers=0, or for CAP_SYS_ADMIN in a "
            "container"
        )
    launches = launches_of(done.stdout)
    if done.returncode != 0 or not launches:
        end = " | ".join(done.stdout.splitlines()[-6:])
        raise CannotProfileError(f"ncu gave no figures (exit code {done.returncode}): {end}")
    return [line for values in launches for line in report_of(values)]


# ---------------------------------------------------------------- the command


def name_of(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


def size_of(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"given {text}; accepted: such as 4096x7168x16384")
    return tuple(map(int, parts))


def check_can_profile() -> str:
    """ncu's path. Raises CannotProfileError."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CannotProfileError(
            "ncu is not on PATH; install Nsight Compute (package nsight-compute) or add "
            "/usr/local/cuda/bin"
        )
    if not torch.cuda.is_available():
        raise CannotProfileError("torch sees no CUDA GPU")
    return ncu


def write_profile(ncu: str, name: str, sizes: list[tuple[int, ...]], out: Path) -> Path:
    kernel = KERNELS[name]
    lines = [
        f"{torch.cuda.get_device_name()}, {datetime.now(UTC).date().isoformat()}, torch "
        f"{torch.__version__}",
        " ".join(["python", *sys.argv]),
    ]
    path = out / f"profile_{name}.txt"
    for size in sizes or kernel.sizes:
        for variant in kernel.variants:
            if variant == "deep_gemm" and find_spec("deep_gemm") is None:
                continue
            added = [f"{variant}, {name_of(size)}", *profile(ncu, name, variant, size)]
            print("\n".join(added), flush=True)
            lines += ["", *added]
            path.write_text("\n".join(lines) + "\n")  # what is there stays if the rest fails
    return path


def options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="+", choices=KERNELS, metavar="|".join(KERNELS))
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the files")
    parser.add_argument("--sizes", type=size_of, nargs="*", default=[])
    args = parser.parse_args(words)
    for name in args.kernels:
        wanted = len(KERNELS[name].sizes[0])
        for size in args.sizes:
            if len(size) != wanted:
                parser.error(f"--sizes: given {name_of(size)}; {name} has {wanted} of them")
    return args


def main() -> int:
    if sys.argv[1:2] == ["--launch"]:
        name, variant, size = sys.argv[2:]
        launch(name, variant, size_of(size))
        return 0
    args = options(sys.argv[1:])
    try:
        ncu = check_can_profile()
        args.out.mkdir(parents=True, exist_ok=True)
        for name in args.kernels:
            print(f"wrote {write_profile(ncu, name, args.sizes, args.out)}")
    except (CannotProfileError, subprocess.TimeoutExpired) as error:
        print(f"profile_kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
