"""Times attention: decoding against copy bandwidth, prompts in TFLOP/s; FlashInfer beside ours.

    python benchmarks/kernels/bench_attention.py [--out DIR] [--fp8] [--flashinfer] [--verification]

32 query heads and 8 K and V heads of 128, as Qwen3-8B has. Each figure is the median of CUDA-graph
replays; a graph makes one call after another over different parts of a cache larger than four
times L2, as the layers of a model do. `of copy`: bytes of K and V read in that time, over the
bandwidth (read + written) of a copy of 1 GB in the same run. Causal FLOPs are counted: of a prompt
of n tokens 2 * n * (n + 1) * heads * head_dim. Compile times are those of an empty cache; on disk
they are paid once. Rows of keys `100..2048` decode for requests of lengths drawn from there, in the
order they were drawn in (`as drawn`) and as the engine orders them (`longest`). --verification:
alone what steps that verify draft tokens have, 2 and 4 new tokens for each request, by the kernel
that serves them and by that of prompts (`as prompts`), beside decoding of the same requests.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import torch
from gpu_results import write_results
from gpu_timing import copy_bandwidth, replay_microseconds
from torch import Tensor

from vllm.kernels.triton import attention as kernels
from vllm.utils.math_utils import cdiv

NUM_HEADS, NUM_KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16
SCALE = DIM**-0.5
DECODES = [(batch, context) for batch in (1, 8, 64, 256) for context in (256, 1024, 4096)]
PREFILLS = [(1, 3500, 3500), (1, 512, 8192), (8, 1024, 1024)]
SHORTEST, LONGEST = 100, 2048
UNEQUAL = (64, 128, 256)
VERIFICATIONS = [
    *((batch, context) for batch in (1, 8, 64) for context in (256, 1024, 4096)),
    (1, 32768),
]
Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One measurement: R requests of query_len new tokens each, and of `keys` keys."""

    provider: str
    num_requests: int
    query_len: int
    keys: str
    order: str
    microseconds: float
    of_copy: float
    tflops: float


class Inputs:
    """The cache of several calls side by side, with shuffled blocks."""

    def __init__(self, query_len: int, seq_lens: Sequence[int], dtype: torch.dtype):
        self.query_len, self.seq_lens = query_len, list(seq_lens)
        self.num_requests = num_requests = len(seq_lens)
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        num_blocks = cdiv(max(seq_lens), BLOCK_SIZE) * num_requests
        block = (BLOCK_SIZE, NUM_KV_HEADS, DIM)
        self.num_bytes = 2 * sum(seq_lens) * NUM_KV_HEADS * DIM * dtype.itemsize
        self.num_calls = min(256, max(2, cdiv(4 * l2, self.num_bytes)))
        shape = (self.num_calls * num_blocks, *block)
        self.k_cache, self.v_cache = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2)
        )
        ids = torch.randperm(self.num_calls * num_blocks, device="cuda").int()
        self.tables = ids.view(self.num_calls, num_requests, -1)
        self.starts = torch.arange(num_requests + 1, device="cuda").int() * query_len
        self.lens = torch.tensor(self.seq_lens, dtype=torch.int32, device="cuda")
        num_tokens = num_requests * query_len
        self.query = torch.randn(num_tokens, NUM_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.query)

    def calls(self) -> Iterator[Run]:
        for tables in self.tables:
            yield lambda tables=tables: kernels.paged_attention(
                self.query,
                self.k_cache,
                self.v_cache,
                tables,
                self.starts,
                self.lens,
                SCALE,
                out=self.out,
                max_query_len=self.query_len,
                max_seq_len=max(self.seq_lens),
            )

    def row(
        self, case: "Case", provider: str, microseconds: float, copy_bytes_per_us: float
    ) -> Row:
        seen = (n - self.query_len + (self.query_len + 1) / 2 for n in self.seq_lens)
        pairs = self.query_len * sum(seen)
        return Row(
            provider,
            self.num_requests,
            self.query_len,
            case.keys,
            case.order,
            microseconds,
            self.num_bytes / microseconds / copy_bytes_per_us,
            4 * pairs * NUM_HEADS * DIM / microseconds / 1e6,
        )


@dataclass(frozen=True)
class Case:
    """keys, order: as they are printed."""

    query_len: int
    seq_lens: tuple[int, ...]
    keys: str
    order: str = "equal"


def verifications() -> Iterator[Case]:
    for num_requests, seq_len in VERIFICATIONS:
        for query_len in (1, 2, 4):
            yield Case(query_len, (seq_len,) * num_requests, str(seq_len))


@contextmanager
def no_verification() -> Iterator[None]:
    """Requests of several new tokens are the prompts' kernel's."""
    rows, kernels.VERIFY_ROWS = kernels.VERIFY_ROWS, ()
    try:
        yield
    finally:
        kernels.VERIFY_ROWS = rows


def as_prompts(run: Run) -> Run:
    def call() -> object:
        with no_verification():
            return run()

    return call


def cases() -> Iterator[Case]:
    for num_requests, query_len, seq_len in [(r, 1, n) for r, n in DECODES] + PREFILLS:
        yield Case(query_len, (seq_len,) * num_requests, str(seq_len))
    for num_requests in UNEQUAL:
        rng, keys = random.Random(num_requests), f"{SHORTEST}..{LONGEST}"
        drawn = tuple(rng.randint(SHORTEST, LONGEST) for _ in range(num_requests))
        yield Case(1, drawn, keys, "as drawn")
        yield Case(1, tuple(sorted(drawn, reverse=True)), keys, "longest")


def print_compile_times(dtype: torch.dtype) -> None:
    """First calls of kernels whose results are in no cache, on a problem that takes no time."""
    small = Inputs(1, (256, 256), dtype)
    new = torch.randn(2, NUM_KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(2, device="cuda")
    first_calls = {
        "cache write": lambda: kernels.reshape_and_cache(
            new, new, small.k_cache, small.v_cache, slots
        ),
        "decoding of one token and of several": next(small.calls()),
        "prefill": next(Inputs(64, (256,), dtype).calls()),
    }
    for name, run in first_calls.items():
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        print(f"first call, {name}: {time.perf_counter() - begin:.2f} s", flush=True)


def flashinfer_calls(inputs: Inputs) -> Iterator[Run]:
    """FlashInfer's wrappers, planned outside the graph as its users do."""
    import flashinfer

    counts = [cdiv(n, BLOCK_SIZE) for n in inputs.seq_lens]
    indptr = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cuda")
    last = (inputs.lens - 1) % BLOCK_SIZE + 1
    types = {"q_data_type": torch.bfloat16, "kv_data_type": inputs.k_cache.dtype}
    heads = (NUM_HEADS, NUM_KV_HEADS, DIM)
    for tables in inputs.tables:
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        indices = torch.cat([table[:count] for table, count in zip(tables, counts)])
        if inputs.query_len == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True
            )
            wrapper.plan(indptr, indices, last, *heads, BLOCK_SIZE, **types)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(
                inputs.starts, indptr, indices, last, *heads, BLOCK_SIZE, causal=True, **types
            )
        cache: tuple[Tensor, Tensor] = (inputs.k_cache, inputs.v_cache)
        yield lambda wrapper=wrapper, cache=cache: wrapper.run(inputs.query, cache)


def measure(
    dtype: torch.dtype,
    chosen: Iterator[Case],
    has_flashinfer: bool,
    keep: Callable[[list[Row]], None],
) -> None:
    """keep: called after each case with all rows so far."""
    copied = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {copied / 1e6:.2f} TB/s, cache {dtype}")
    print(
        f"{'provider':<12}{'R':>4}{'new':>6}{'keys':>11} {'order':<9}{'us':>10}{'of copy':>9}"
        f"{'TFLOP/s':>9}"
    )
    rows: list[Row] = []
    for case in chosen:
        inputs = Inputs(case.query_len, case.seq_lens, dtype)
        providers = {"triton": list(inputs.calls())}
        if 1 < case.query_len <= kernels.MAX_QUERIES:
            providers["as prompts"] = [as_prompts(run) for run in inputs.calls()]
        if has_flashinfer:
            providers["flashinfer"] = [run for run, _ in zip(flashinfer_calls(inputs), range(64))]
        for provider, runs in providers.items():
            row = inputs.row(case, provider, replay_microseconds(runs), copied)
            rows.append(row)
            print(
                f"{provider:<12}{row.num_requests:>4}{row.query_len:>6}{row.keys:>11} "
                f"{row.order:<9}{row.microseconds:>10.2f}{row.of_copy:>9.1%}{row.tflops:>9.1f}",
                flush=True,
            )
        del inputs, providers
        torch.cuda.empty_cache()
        keep(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder that receives attention.json or the like")
    parser.add_argument("--fp8", action="store_true", help="an FP8 cache")
    parser.add_argument("--flashinfer", action="store_true", help="FlashInfer beside it")
    parser.add_argument(
        "--verification", action="store_true", help="steps that verify draft tokens, alone"
    )
    arguments = parser.parse_args()
    dtype = torch.float8_e4m3fn if arguments.fp8 else torch.bfloat16
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = empty
        print_compile_times(dtype)
    kind = "verification" if arguments.verification else "attention"
    name = f"{kind}_fp8.json" if arguments.fp8 else f"{kind}.json"

    def keep(rows: list[Row]) -> None:
        if arguments.out:
            rows_json = [asdict(row) for row in rows]
            write_results(arguments.out, name, cache=str(dtype), rows=rows_json)

    chosen = verifications() if arguments.verification else cases()
    measure(dtype, chosen, arguments.flashinfer, keep)


if __name__ == "__main__":
    main()
