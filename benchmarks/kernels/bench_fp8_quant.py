"""Times the FP8 quantisers against the bandwidth of a copy, measured in the same run.

    python benchmarks/kernels/bench_fp8_quant.py [--out DIR] [--quick]

Each figure is the median of CUDA-graph replays; a graph calls the kernel on one set of buffers
after another, together more than four times L2 where memory allows, so inputs come from DRAM
("cold"). Bytes are those that must move: inputs read once, outputs written once; per tensor two
reads. `of copy` compares with torch's copy of the same number of bytes, timed in the same way,
`of 1 GB` with a copy of 1 GB. Others, where they import: the torch reference as it is and through
torch.compile (Inductor writes Triton), and a plain Triton kernel of the same task.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_results import write_results
from gpu_timing import copy_microseconds, replay_microseconds
from torch import Tensor

from vllm.ops import torch_ops
from vllm.ops.fp8_quant import ScaleLayout
from vllm.utils.fp8 import FP8, MIN_AMAX
from vllm.utils.math_utils import cdiv, round_up

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

GROUP = 128
MAX_SETS = 1024
SHAPES = [(m, k) for k in (4096, 7168, 12288) for m in (16, 128, 1024, 4096, 8192)]
QUICK_SHAPES = [(1024, 4096), (4096, 7168)]
OTHERS_SHAPES = [(128, 7168), (1024, 7168), (8192, 7168)]  # compiling for a shape takes seconds
Run = Callable[[], object]


@dataclass(frozen=True)
class Buffers:
    """Everything that one call may touch, made for one shape."""

    x: Tensor
    wide: Tensor
    residual: Tensor
    weight: Tensor
    q: Tensor
    scales: Tensor
    aligned: Tensor
    packed: Tensor
    token_scales: Tensor
    one: Tensor


@dataclass(frozen=True)
class Case:
    name: str
    num_bytes: Callable[[int, int], float]
    """Of an M and K, in bfloat16."""
    ours: Callable[[Buffers], object]
    reference: Callable[[Buffers], object] | None = None


@dataclass(frozen=True)
class Row:
    case: str
    m: int
    k: int
    provider: str
    microseconds: float
    gb_s: float
    of_copy: float
    of_large_copy: float
    is_cold: bool


def make_buffers(m: int, k: int, seed: int) -> Buffers:
    torch.manual_seed(seed)
    groups, rows, device = cdiv(k, GROUP), round_up(m, 4), "cuda"
    wide = torch.randn(m, 2 * k, device=device).bfloat16()
    return Buffers(
        x=wide.view(2 * m, k)[:m],
        wide=wide,
        residual=torch.randn(m, k, device=device).bfloat16(),
        weight=torch.rand(k, device=device) + 0.5,
        q=torch.empty(m, k, dtype=FP8, device=device),
        scales=torch.empty(m, groups, device=device),
        aligned=torch.empty(groups, rows, device=device).t(),
        packed=torch.empty(cdiv(groups, 4), rows, dtype=torch.int32, device=device).t(),
        token_scales=torch.empty(m, device=device),
        one=torch.ones(1, device=device),
    )


# ---------------------------------------------------------------- what is timed


def reference_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of the reference for K that is a multiple of the group, without its allocation
    of layouts: what torch and torch.compile run."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1).clamp_min(MIN_AMAX) / torch.full((), 448.0, device=x.device)
    q = (groups / scales.unsqueeze(-1)).clamp(-448.0, 448.0).to(FP8)
    return q.flatten(-2), scales


def reference_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = residual + x
    return total, *reference_groups(torch_ops.rms_norm(total, weight, 1e-6))


def scale_bytes(m: int, k: int) -> float:
    return 4 * m * cdiv(k, GROUP)


def cases() -> Iterator[Case]:
    op = torch.ops.vllm
    for layout, field in (
        (ScaleLayout.ROW_MAJOR, "scales"),
        (ScaleLayout.TMA_ALIGNED, "aligned"),
        (ScaleLayout.PACKED_UE8M0, "packed"),
    ):
        is_packed = layout is ScaleLayout.PACKED_UE8M0
        is_plain = layout is ScaleLayout.ROW_MAJOR
        rest = (GROUP, MIN_AMAX, is_packed)
        yield Case(
            f"group {layout.value}",
            lambda m, k: 3 * m * k + scale_bytes(m, k),
            lambda b, field=field, rest=rest: op.fp8_quant_group(
                b.x, b.q, getattr(b, field), *rest
            ),
            (lambda b: reference_groups(b.x)) if is_plain else None,
        )
        yield Case(
            f"silu+group {layout.value}",
            lambda m, k: 5 * m * k + scale_bytes(m, k),
            lambda b, field=field, rest=rest: op.silu_and_mul_fp8_quant_group(
                b.wide, b.q, getattr(b, field), *rest
            ),
            (lambda b: reference_groups(torch_ops.silu_and_mul(b.wide))) if is_plain else None,
        )
        yield Case(
            f"add+norm+group {layout.value}",
            lambda m, k: 7 * m * k + scale_bytes(m, k) + 4 * k,
            lambda b, field=field, rest=rest: op.rms_norm_fp8_quant_group(
                b.x, b.residual, b.weight, 1e-6, None, b.q, getattr(b, field), *rest
            ),
            (lambda b: reference_norm(b.x, b.residual, b.weight)) if is_plain else None,
        )
    yield Case(
        "norm+group row-major",
        lambda m, k: 3 * m * k + scale_bytes(m, k) + 4 * k,
        lambda b: op.rms_norm_fp8_quant_group(
            b.x, None, b.weight, 1e-6, None, b.q, b.scales, GROUP, MIN_AMAX, False
        ),
    )
    yield Case(
        "per token",
        lambda m, k: 3 * m * k + 4 * m,
        lambda b: op.fp8_quant_token(b.x, b.q, b.token_scales, MIN_AMAX, None),
    )
    yield Case("static", lambda m, k: 3 * m * k, lambda b: op.fp8_quant_static(b.x, b.one, b.q))
    yield Case(
        "per tensor (2 reads)",
        lambda m, k: 5 * m * k,
        lambda b: op.fp8_quant_tensor(b.x, b.q, b.one, MIN_AMAX),
    )


if triton is not None:

    @triton.jit
    def group_quant_kernel(x, q, scales, eps, size: tl.constexpr):
        """One program per row and group, as such kernels are often written."""
        start = tl.program_id(0).to(tl.int64)
        offsets = start * size + tl.arange(0, size)
        values = tl.load(x + offsets).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(values)), eps) / 448.0
        tl.store(q + offsets, (values / scale).to(q.dtype.element_ty))
        tl.store(scales + start, scale)


def triton_groups(b: Buffers) -> None:
    group_quant_kernel[(b.scales.numel(),)](b.x, b.q, b.scales, MIN_AMAX, size=GROUP, num_warps=1)


def providers(case: Case, has_others: bool) -> Iterator[tuple[str, Callable]]:
    yield "ours", case.ours
    if not has_others or case.reference is None:
        return
    yield "torch", case.reference
    if triton is not None:
        yield "torch.compile", torch.compile(case.reference, dynamic=False)
        if case.name == "group row-major":
            yield "triton", triton_groups


def measure(
    shapes: list[tuple[int, int]], num_replays: int, keep: Callable[[list[Row]], None]
) -> list[Row]:
    """keep: called after each shape with all rows so far."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    large = 1 << 30
    large_gb_s = large / copy_microseconds(large, 2, num_replays) / 1e3
    print(f"{torch.cuda.get_device_name()}, L2 {l2 >> 20} MB, copy of 1 GB {large_gb_s:.0f} GB/s")
    print(f"{'case':<28}{'M':>6}{'K':>7} {'provider':<14}{'us':>9}{'GB/s':>7}  of copy  of 1 GB")
    rows: list[Row] = []
    for m, k in shapes:
        num_sets = min(MAX_SETS, max(2, cdiv(4 * l2, 3 * m * k)))
        buffers = [make_buffers(m, k, seed) for seed in range(num_sets)]
        is_cold = 3 * m * k * num_sets >= 2 * l2
        for case in cases():
            num_bytes = int(case.num_bytes(m, k))
            copy_us = copy_microseconds(num_bytes, num_sets, num_replays)
            for provider, run in providers(case, (m, k) in OTHERS_SHAPES):
                us = time_provider(run, buffers, provider, num_replays)
                gb_s = num_bytes / us / 1e3
                row = Row(
                    case.name, m, k, provider, us, gb_s, copy_us / us, gb_s / large_gb_s, is_cold
                )
                rows.append(row)
                print(
                    f"{row.case:<28}{m:>6}{k:>7} {provider:<14}{us:>9.2f}{gb_s:>7.0f}"
                    f"{row.of_copy:>9.1%}{row.of_large_copy:>9.1%}{'' if is_cold else '  warm'}",
                    flush=True,
                )
        del buffers
        torch.cuda.empty_cache()
        keep(rows)
    return rows


def time_provider(run: Callable, buffers: list[Buffers], provider: str, num_replays: int) -> float:
    # torch allocates what lies between its kernels: few sets keep its graphs small.
    chosen = buffers if provider in ("ours", "triton") else buffers[:16]
    return replay_microseconds([lambda b=b: run(b) for b in chosen], num_replays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder that receives fp8_quant.json")
    parser.add_argument("--quick", action="store_true", help="two shapes, ours alone")
    arguments = parser.parse_args()
    shapes = QUICK_SHAPES if arguments.quick else SHAPES

    def keep(rows: list[Row]) -> None:
        if arguments.out:
            write_results(arguments.out, "fp8_quant.json", rows=[asdict(row) for row in rows])

    rows = measure(shapes, 5 if arguments.quick else 21, keep)
    slow = [row for row in rows if row.provider == "ours" and row.m >= 1024 and row.of_copy < 0.9]
    print(f"\nours under 90 % of an equal copy at M >= 1024: {len(slow)}")
    for row in slow:
        print(f"  {row.case} M={row.m} K={row.k}: {row.of_copy:.1%}")


if __name__ == "__main__":
    main()
