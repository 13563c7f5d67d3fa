"""Ranks in processes on this node."""

from vllm.executor import local_ranks
from vllm.executor.workers import RankHandle


class LocalLauncher:
    """num_engines: engines of equal size on this node."""

    def __init__(self, num_engines: int):
        self._num_engines = num_engines

    def host(self) -> str:
        return "127.0.0.1"

    def launch(self, ranks: range) -> list[RankHandle]:
        num_neighbours = len(ranks) * self._num_engines
        return [RankHandle(*local_ranks.take(rank), rank, num_neighbours) for rank in ranks]

    def close(self) -> None:
        pass
