"""Times decoding over a cache of latents (MLA) against copy bandwidth.

    python benchmarks/kernels/bench_latent_attention.py [--out DIR] [--fp8] [--tiles]

Latents of 576 columns, of which 512 are values, as DeepSeek and Kimi have; 16 heads as
DeepSeek-V2-Lite or a rank of eight of DeepSeek V3, and 128 as the latter on one GPU. Each figure is
the median of CUDA-graph replays; a graph makes one call after another over different parts of a
cache larger than four times L2, as the layers of a model do. `of copy`: bytes of latents read in
that time, over the bandwidth (read + written) of a copy of 1 GB in the same run. With --tiles also
other tiles than the kernel's own, and other numbers of splits, for the longest context.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_results import write_results
from gpu_timing import copy_bandwidth, replay_microseconds
from triton.runtime.errors import OutOfResources

from vllm.kernels.triton import latent_attention as kernels
from vllm.utils.math_utils import cdiv

LATENT, ROPE, BLOCK_SIZE = 512, 64, 16
HEADS = (16, 128)
DECODES = ((1, 4096), (1, 32768), (16, 4096), (16, 32768), (64, 4096))
TILED = (16, 32768)
TILES = {
    16: [kernels.Tile(16, *more) for more in product((32, 64), (4, 8), (2, 3))],
    64: [kernels.Tile(64, *more) for more in product((16, 32, 64), (8,), (1, 2))],
}
SPLITS = (1, 2)  # programs for each multiprocessor


@dataclass(frozen=True)
class Row:
    """One measurement: `num_requests` requests of `seq_len` keys. tile: of rows, keys, warps and
    stages; splits: of the keys of a request."""

    heads: int
    num_requests: int
    seq_len: int
    tile: tuple[int, ...]
    splits: int
    microseconds: float
    of_copy: float
    tflops: float


class Inputs:
    def __init__(self, heads: int, num_requests: int, seq_len: int, dtype: torch.dtype):
        self.num_bytes = num_requests * seq_len * (LATENT + ROPE) * dtype.itemsize
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        num_calls = min(128, max(2, cdiv(4 * l2, self.num_bytes)))
        num_blocks = cdiv(seq_len, BLOCK_SIZE) * num_requests
        shape = (num_calls * num_blocks, BLOCK_SIZE, LATENT + ROPE)
        self.cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)
        ids = torch.randperm(num_calls * num_blocks, device="cuda").int()
        self.tables = ids.view(num_calls, num_requests, -1)
        self.starts = torch.arange(num_requests + 1, device="cuda").int()
        self.seq_len = seq_len
        self.lens = torch.full((num_requests,), seq_len, dtype=torch.int32, device="cuda")
        size = (num_requests, heads, LATENT + ROPE)
        self.query = torch.randn(size, device="cuda", dtype=torch.bfloat16)

    def calls(self) -> Iterator[Callable[[], object]]:
        for tables in self.tables:
            yield lambda tables=tables: kernels.paged_latent_attention(
                self.query, self.cache, tables, self.starts, self.lens, (LATENT + ROPE) ** -0.5,
                LATENT, max_query_len=1, max_seq_len=self.seq_len,
            )  # fmt: skip

    def row(self, plan: tuple[tuple[int, ...], int], copied: float) -> Row:
        num_requests, heads, _ = self.query.shape
        time = replay_microseconds(list(self.calls()))
        flops = 2 * num_requests * self.seq_len * heads * (2 * LATENT + ROPE)
        of_copy = self.num_bytes / time / copied
        return Row(heads, num_requests, self.seq_len, *plan, time, of_copy, flops / time / 1e6)


def own_plan(inputs: Inputs) -> tuple[tuple[int, ...], int]:
    num_requests, heads, width = inputs.query.shape
    chip = kernels.read_chip(inputs.query.device)
    tile = kernels.tile_of(heads, width, inputs.cache.itemsize, chip.shared_memory)
    programs = num_requests * cdiv(heads, tile.block_m)
    return tuple(tile), kernels.splits_of(programs, inputs.seq_len, chip.num_sms, 128)[0]


def with_plan(inputs: Inputs, tile: kernels.Tile, per_sm: int, copied: float) -> Row | None:
    """None: the chip has no room for the tile."""
    num_requests, heads, _ = inputs.query.shape
    num_sms = kernels.read_chip(inputs.query.device).num_sms
    splits = max(1, per_sm * num_sms // (num_requests * cdiv(heads, tile.block_m)))
    before = kernels.tile_of, kernels.splits_of
    kernels.tile_of = lambda *_: tile
    kernels.splits_of = lambda *_: (splits, tile.block_n)
    try:
        return inputs.row((tuple(tile), splits), copied)
    except (RuntimeError, OutOfResources) as error:
        print(f"{tuple(tile)}: {str(error).splitlines()[0]}", flush=True)
        return None
    finally:
        kernels.tile_of, kernels.splits_of = before


def measure(dtype: torch.dtype, has_tiles: bool, keep: Callable[[list[Row]], None]) -> None:
    """keep: called after each measurement with all of them."""
    copied = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {copied / 1e6:.2f} TB/s, cache {dtype}")
    print(f"{'heads':>6}{'R':>4}{'keys':>7} {'tile':<18}{'splits':>7}{'us':>10}{'of copy':>9}")
    rows: list[Row] = []

    def add(row: Row | None) -> None:
        if row is None:
            return
        rows.append(row)
        print(
            f"{row.heads:>6}{row.num_requests:>4}{row.seq_len:>7} {row.tile!s:<18}{row.splits:>7}"
            f"{row.microseconds:>10.2f}{row.of_copy:>9.1%}",
            flush=True,
        )
        keep(rows)

    for heads, (num_requests, seq_len) in product(HEADS, DECODES):
        inputs = Inputs(heads, num_requests, seq_len, dtype)
        add(inputs.row(own_plan(inputs), copied))
        if has_tiles and (num_requests, seq_len) == TILED:
            for tile, per_sm in product(TILES[min(heads, 64)], SPLITS):
                add(with_plan(inputs, tile, per_sm, copied))
        del inputs
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder that receives latent_attention.json")
    parser.add_argument("--fp8", action="store_true", help="an FP8 cache")
    parser.add_argument("--tiles", action="store_true", help="other tiles beside the kernel's own")
    arguments = parser.parse_args()
    dtype = torch.float8_e4m3fn if arguments.fp8 else torch.bfloat16
    name = "latent_attention_fp8.json" if arguments.fp8 else "latent_attention.json"

    def keep(rows: list[Row]) -> None:
        if arguments.out:
            content: dict[str, Any] = {"cache": str(dtype), "rows": [asdict(row) for row in rows]}
            write_results(arguments.out, name, **content)

    measure(dtype, arguments.tiles, keep)


if __name__ == "__main__":
    main()
