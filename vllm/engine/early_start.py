"""Starts what takes long before torch is imported: reading weights, GPU context, rank processes."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.engine.arg_utils import EngineArgs
from vllm.executor import local_ranks, prefetch

# The sizes are not validated yet; beyond the GPUs of one node they may be mistakes.
_MAX_RANKS = 16


@contextmanager
def started_early(args: EngineArgs, data_parallel_rank: int = 0) -> Iterator[None]:
    """Starts prefetching, and the rank processes that an engine of these arguments takes within
    the block; ends those that it did not take."""
    if args.load_format != "dummy":
        prefetch.read_model_ahead(args.model, args.revision)
    is_one_rank = args.tensor_parallel_size == args.pipeline_parallel_size == 1
    if is_one_rank and args.distributed_executor_backend in (None, "uni"):
        prefetch.begin_engine(data_parallel_rank)
    with local_ranks.started_early(_num_ranks(args), data_parallel_rank):
        yield


def _num_ranks(args: EngineArgs) -> int:
    """Local rank processes of one engine; 0 where the arguments are going to be refused."""
    is_local = args.distributed_executor_backend in (None, "mp")
    count = args.tensor_parallel_size * args.pipeline_parallel_size
    is_sure = args.tensor_parallel_size > 0 and 1 < count <= _MAX_RANKS
    return count if is_local and is_sure else 0
