"""Sums of few rows over two GPUs: NCCL, torch's one-shot sum over symmetric memory, and ours.

usage: python benchmarks/kernels/bench_custom_all_reduce.py [--out benchmarks/results/h200]

A graph of 72 sums, as a step of Qwen3-8B has; microseconds of one, the median of 20 replays, on the
slower rank. `with norm` is our sum with the addition to the residual and the RMSNorm that follow;
`then norm` our sum and the kernel that does only that; likewise of the norm that quantises. Sums of
NCCL, torch and ours are compared first.
"""

import argparse
import multiprocessing
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_results import write_results

from vllm.distributed import world
from vllm.distributed.custom_all_reduce import make_custom_all_reduce
from vllm.distributed.layout import Layout
from vllm.kernels.activations import InputQuant
from vllm.ops.fp8_quant import ScaleLayout

DIM, ROWS, NUM_SUMS, NUM_REPLAYS = 4096, (1, 8, 32, 64, 128, 256), 72, 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    args = parser.parse_args()
    listener = world.listen()
    address = listener.getsockname()[:2]
    store = world.host_store(listener)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        of_ranks = pool.starmap(measure, [(rank, address) for rank in range(2)])
    del store
    found = {
        f"{rows} rows": {way: round(max(times[rows][way] for times in of_ranks), 2) for way in ways}
        for rows, ways in of_ranks[0].items()
    }
    for rows, ways in found.items():
        print(rows, ways)
    write_results(args.out, "peer_sum.json", dim=DIM, microseconds=found)


def measure(rank: int, address: tuple[str, int]) -> dict[int, dict[str, float]]:
    torch.cuda.set_device(rank)
    group = world.join(Layout(rank, tensor_size=2), False, address, "cuda", 60.0, {}).tensor
    sums = make_custom_all_reduce(group, DIM, torch.bfloat16)
    assert sums is not None, "see the log above"
    found = {rows: {w: time_of(f) for w, f in ways(group, sums, rows).items()} for rows in ROWS}
    world.leave()
    return found


def ways(group, sums, rows: int) -> dict[str, Callable[[], object]]:
    from torch.distributed import _symmetric_memory as symmetric

    from vllm.kernels.device_ops import usable_ops

    x = torch.randn(rows, DIM, device="cuda", dtype=torch.bfloat16)
    y, residual, weight = x.clone(), torch.zeros_like(x), torch.ones(DIM, device="cuda")
    shared = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    symmetric.rendezvous(shared, group.handle.group_name)
    one_shot, name = torch.ops.symm_mem.one_shot_all_reduce_copy, group.handle.group_name
    wanted = x.clone()
    dist.all_reduce(wanted, group=group.handle)
    assert torch.equal(sums.all_reduce(x.clone()), wanted)
    assert torch.equal(one_shot(shared, x, "sum", name), wanted)
    y.zero_()  # sums of sums stay finite

    def then_norm() -> None:
        sums.all_reduce(y)
        usable_ops("cuda").fused_add_rms_norm(y, residual, weight, 1e-6)

    quant = InputQuant(ScaleLayout.TMA_ALIGNED)

    def then_quantising_norm() -> None:
        sums.all_reduce(y)
        quant.add_rms_norm(y, residual, weight, 1e-6)

    return {
        "nccl": lambda: dist.all_reduce(y, group=group.handle),
        "torch one shot": lambda: one_shot(shared, y, "sum", name),
        "ours": lambda: sums.all_reduce(y),
        "ours then norm": then_norm,
        "ours with norm": lambda: sums.add_rms_norm(y, residual, weight, 1e-6),
        "ours then quantising norm": then_quantising_norm,
        "ours with quantising norm": lambda: quant.sum_and_norm(sums, y, residual, weight, 1e-6),
    }


def time_of(one: Callable[[], object]) -> float:
    """Microseconds."""
    one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(NUM_SUMS):
            one()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(NUM_REPLAYS + 3):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / NUM_SUMS)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
