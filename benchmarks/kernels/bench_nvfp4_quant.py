"""Times the NVFP4 quantisers against the bandwidth of a copy, measured in the same run.

    python benchmarks/kernels/bench_nvfp4_quant.py [--library SO] [--ladder SO] [--also SO ...]
                                                   [--out DIR] [--quick]

Each figure is the median of CUDA-graph replays; a graph calls the kernel on one set of buffers
after another, together more than four times L2, so that inputs come from DRAM. Bytes are those
that must move: the input read once, codes and scales (with their filling) written once. `of copy`
compares with torch's copy of the same number of bytes, timed in the same way, `of 1 GB` with a
copy of 1 GB.

The library is the installed one unless given. --ladder adds a build of the same kernels that
converts with the threshold ladder (nvcc -DVLLM_CONVERT_WITH_LADDER -include e2m1_ladder.cuh);
--also adds builds with other launch constants. All must write the same bytes.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tvm_ffi
from gpu_results import write_results
from gpu_timing import copy_microseconds, replay_microseconds
from torch import Tensor

from vllm.ops.nvfp4 import max_grouped_scale_rows
from vllm.platforms import native

SHAPES = [
    *((m, k) for k in (4096, 7168) for m in (1, 16, 128, 1024, 4096, 8192)),
    (16384, 4096),
    (16384, 7168),
    (32768, 8192),
]
QUICK_SHAPES = [(1024, 4096), (8192, 4096), (8192, 7168)]
GOAL_BYTES = 64 << 20  # inputs from here on are to reach 90 % of the copy
NUM_EXPERTS = 64
MAX_SETS = 512


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


@dataclass(frozen=True)
class Buffers:
    """Everything that one call may touch, made for one shape [m, k]."""

    x: Tensor  # [m, k]
    wide: Tensor  # [m, 2 k]
    global_scale: Tensor
    global_scales: Tensor
    offsets: Tensor
    q: Tensor
    linear: Tensor
    swizzled: Tensor
    grouped: Tensor


@dataclass(frozen=True)
class Case:
    name: str
    inputs: int  # elements read for each one written
    scales: str  # the buffer written
    call: Callable[[tvm_ffi.Module, Buffers], object]


CASES = (
    Case(
        "quant linear",
        1,
        "linear",
        lambda lib, b: lib.nvfp4_quant(b.x, b.global_scale, b.q, b.linear, False),
    ),
    Case(
        "quant swizzled",
        1,
        "swizzled",
        lambda lib, b: lib.nvfp4_quant(b.x, b.global_scale, b.q, b.swizzled, True),
    ),
    Case(
        "quant 64 experts",
        1,
        "grouped",
        lambda lib, b: lib.nvfp4_quant_grouped(
            b.x, b.global_scales, b.offsets, None, 1, b.q, b.grouped
        ),
    ),
    Case(
        "silu+quant linear",
        2,
        "linear",
        lambda lib, b: lib.silu_and_mul_nvfp4_quant(b.wide, b.global_scale, b.q, b.linear, False),
    ),
    Case(
        "silu+quant swizzled",
        2,
        "swizzled",
        lambda lib, b: lib.silu_and_mul_nvfp4_quant(b.wide, b.global_scale, b.q, b.swizzled, True),
    ),
    Case(
        "silu+quant 64 experts",
        2,
        "grouped",
        lambda lib, b: lib.silu_and_mul_nvfp4_quant_grouped(
            b.wide, b.global_scales, b.offsets, b.q, b.grouped
        ),
    ),
)


@dataclass(frozen=True)
class Row:
    case: str
    m: int
    k: int
    build: str
    microseconds: float
    gb_s: float
    of_copy: float
    of_large_copy: float
    has_goal: bool


def make_buffers(m: int, k: int, seed: int) -> Buffers:
    torch.manual_seed(seed)
    groups, device = k // 16, "cuda"
    wide = torch.randn(m, 2 * k, device=device, dtype=torch.bfloat16)
    counts = torch.full((NUM_EXPERTS,), m // NUM_EXPERTS)
    counts[: m % NUM_EXPERTS] += 1
    offsets = torch.cat([torch.zeros(1, dtype=counts.dtype), counts.cumsum(0)]).int()
    grouped_rows = max_grouped_scale_rows(m, NUM_EXPERTS)
    byte = {"dtype": torch.uint8, "device": device}
    return Buffers(
        x=wide.view(2 * m, k)[:m],
        wide=wide,
        global_scale=torch.full((1,), 448.0, device=device),
        global_scales=torch.full((NUM_EXPERTS,), 448.0, device=device),
        offsets=offsets.to(device),
        q=torch.zeros(m, k // 2, **byte),
        linear=torch.zeros(m, groups, **byte),
        swizzled=torch.zeros(round_up(m, 128), round_up(groups, 4), **byte),
        grouped=torch.zeros(grouped_rows, round_up(groups, 4), **byte),
    )


def bytes_moved(case: Case, buffers: Buffers) -> int:
    m, k = buffers.x.shape
    rows = {"linear": m, "swizzled": round_up(m, 128)}.get(case.scales)
    if rows is None:
        rows = sum(round_up(count, 128) for count in buffers.offsets.diff().tolist())
    return case.inputs * 2 * m * k + buffers.q.numel() + rows * buffers.linear.shape[1]


def check_equal(case: Case, builds: dict[str, tvm_ffi.Module], buffers: Buffers) -> None:
    """All builds write the same bytes."""
    written: list[tuple[Tensor, Tensor]] = []
    for library in builds.values():
        for tensor in (buffers.q, getattr(buffers, case.scales)):
            tensor.fill_(0x7F)
        case.call(library, buffers)
        written.append((buffers.q.clone(), getattr(buffers, case.scales).clone()))
    for name, (q, scales) in zip(builds, written):
        if not (q.equal(written[0][0]) and scales.equal(written[0][1])):
            raise SystemExit(f"{case.name}: {name} writes other bytes than {next(iter(builds))}")


def measure(
    builds: dict[str, tvm_ffi.Module], shapes: list[tuple[int, int]], num_replays: int
) -> Iterator[Row]:
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    large = 1 << 30
    large_gb_s = large / copy_microseconds(large, 2, num_replays) / 1e3
    print(f"{torch.cuda.get_device_name()}, L2 {l2 >> 20} MB, copy of 1 GB {large_gb_s:.0f} GB/s")
    print(f"{'case':<22}{'M':>6}{'K':>6} {'build':<18}{'us':>9}{'GB/s':>7}  of copy  of 1 GB")
    for m, k in shapes:
        num_sets = min(MAX_SETS, max(2, -(-4 * l2 // (2 * m * k))))
        buffers = [make_buffers(m, k, seed) for seed in range(num_sets)]
        for case in CASES:
            check_equal(case, builds, buffers[0])
            num_bytes = bytes_moved(case, buffers[0])
            copy_us = copy_microseconds(num_bytes, num_sets, num_replays)
            for name, library in builds.items():
                runs = [
                    lambda library=library, b=b, case=case: case.call(library, b) for b in buffers
                ]
                us = replay_microseconds(runs, num_replays)
                gb_s = num_bytes / us / 1e3
                has_goal = case.inputs * 2 * m * k >= GOAL_BYTES
                row = Row(
                    case.name, m, k, name, us, gb_s, copy_us / us, gb_s / large_gb_s, has_goal
                )
                print(
                    f"{row.case:<22}{m:>6}{k:>6} {name:<18}{us:>9.2f}{gb_s:>7.0f}"
                    f"{row.of_copy:>9.1%}{row.of_large_copy:>9.1%}",
                    flush=True,
                )
                yield row
        del buffers
        torch.cuda.empty_cache()


def find_builds(given: argparse.Namespace) -> dict[str, tvm_ffi.Module]:
    library = tvm_ffi.load_module(str(given.library)) if given.library else native.load()
    builds = {"software": library}
    if given.ladder:
        builds["ladder"] = tvm_ffi.load_module(str(given.ladder))
    return builds | {path.stem: tvm_ffi.load_module(str(path)) for path in given.also}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", type=Path, help="instead of the installed library")
    parser.add_argument("--ladder", type=Path, help="a build that converts with the ladder")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="builds to compare")
    parser.add_argument("--out", type=Path, help="folder that receives nvfp4_quant.json")
    parser.add_argument("--quick", action="store_true", help="three shapes")
    given = parser.parse_args()
    shapes = QUICK_SHAPES if given.quick else SHAPES
    rows = list(measure(find_builds(given), shapes, 7 if given.quick else 21))
    slow = [r for r in rows if r.build == "software" and r.has_goal and r.of_copy < 0.9]
    print(f"\nsoftware under 90 % of an equal copy, inputs of 64 MB or more: {len(slow)}")
    for row in slow:
        print(f"  {row.case} M={row.m} K={row.k}: {row.of_copy:.1%}")
    if given.out:
        write_results(given.out, "nvfp4_quant.json", rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
