"""Time of one call on a GPU: replays of a captured graph, without the gaps between launches."""

import statistics
from collections.abc import Callable, Sequence

import torch


def replay_microseconds(runs: Sequence[Callable[[], object]], num_replays: int = 20) -> float:
    """Median time of one call, in graphs that make all of `runs` one after another.

    Several runs over buffers of their own keep the caches cold.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs[:3]:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    samples = []
    for _ in range(num_replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(runs))
    return statistics.median(samples)


def copy_microseconds(num_bytes: int, num_sets: int, num_replays: int = 20) -> float:
    """A kernel that reads one half of `num_bytes` and writes the other, over `num_sets` pairs of
    buffers.

    Of floats that it negates: `copy_` is left to the driver, whose copies are a fifth slower.
    """
    half = max(4, num_bytes // 32 * 4)
    pool = torch.randn(num_sets, 2, half, device="cuda")
    return replay_microseconds(
        [lambda pair=pair: torch.neg(pair[0], out=pair[1]) for pair in pool], num_replays
    )


def copy_bandwidth() -> float:
    """Bytes read and written in a microsecond by such a copy of 1 GiB."""
    return (2 << 30) / copy_microseconds(2 << 30, 1)
