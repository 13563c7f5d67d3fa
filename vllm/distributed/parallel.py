"""The process groups of one rank, as layers use them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.groups import Group
from vllm.distributed.layout import GROUPS, Layout, stage_layers

Gather = Callable[[str, str, Iterable[int]], list[str]]


@dataclass(slots=True)
class Parallel:
    """layout: this rank's position. tensor, pipeline, data, expert, engine: its groups, as in
    `Layout.groups`; expert has one rank without expert parallelism. num_tokens_across_dp: tokens
    of each rank of `data` in the current step. gather(place, text, ranks): publishes a text and
    waits, without a timeout, for those of `ranks`; all ranks call it, once for every place.
    timeout_s: the longest that one rank waits for another; None for one rank.
    """

    layout: Layout = field(default_factory=Layout)
    tensor: Group = field(default_factory=Group)
    pipeline: Group = field(default_factory=Group)
    data: Group = field(default_factory=Group)
    expert: Group = field(default_factory=Group)
    engine: Group = field(default_factory=Group)
    num_tokens_across_dp: tuple[int, ...] = ()
    gather: Gather = lambda place, text, ranks: [text for _ in ranks]
    timeout_s: float | None = None

    def barrier(self, place: str) -> None:
        """Waits for all ranks, without a timeout; every place is used once."""
        self.gather(place, "", range(self.layout.num_ranks))

    def layers(self, num_layers: int) -> range:
        """The decoder layers of this rank's stage."""
        return stage_layers(num_layers, self.pipeline.rank, self.pipeline.size)


def planned(layout: Layout, is_expert_parallel: bool) -> Parallel:
    """Groups without connections: to construct a rank's layers, not to run them."""
    return make_parallel(layout, is_expert_parallel, lambda ranks: None)


def make_parallel(
    layout: Layout, is_expert_parallel: bool, connect: Callable[[list[int]], Any]
) -> Parallel:
    """connect(ranks) -> torch's process group; every rank calls it for all groups in one order."""

    def group(kind: str) -> Group:
        own = Group()
        for ranks in layout.groups(kind):
            handle = connect(ranks) if len(ranks) > 1 else None
            if layout.rank in ranks:
                own = Group(ranks.index(layout.rank), len(ranks), tuple(ranks), handle)
        return own

    kinds = [kind for kind in GROUPS if kind != "expert" or is_expert_parallel]
    return Parallel(layout, **{kind: group(kind) for kind in kinds})
