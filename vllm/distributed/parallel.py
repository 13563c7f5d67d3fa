"""The groups that one rank belongs to, as layers use them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.groups import Group
from vllm.distributed.layout import Layout, stage_layers


@dataclass(slots=True)
class Parallel:
    """layout: where this rank stands. tensor, pipeline, data, expert, engine: its groups, as
    `Layout.groups` has them; experts are dealt out over `expert`, which is one rank where they are
    not. token_counts: tokens that each rank of `data` computes in this step. meet(place): returns
    when all ranks are there, however long that takes; every place is for one time. timeout_s: the
    longest that one rank waits for another; None where there is one rank.
    """

    layout: Layout = field(default_factory=Layout)
    tensor: Group = field(default_factory=Group)
    pipeline: Group = field(default_factory=Group)
    data: Group = field(default_factory=Group)
    expert: Group = field(default_factory=Group)
    engine: Group = field(default_factory=Group)
    token_counts: tuple[int, ...] = ()
    meet: Callable[[str], None] = lambda place: None
    timeout_s: float | None = None

    def layers(self, num_layers: int) -> range:
        """The decoder layers that this rank's stage computes."""
        return stage_layers(num_layers, self.pipeline.rank, self.pipeline.size)


def planned(layout: Layout, is_expert_parallel: bool) -> Parallel:
    """The same without any connection: to construct a rank's layers, not to compute with."""
    return make_parallel(layout, is_expert_parallel, lambda ranks: None)


def make_parallel(
    layout: Layout, is_expert_parallel: bool, connect: Callable[[list[int]], Any]
) -> Parallel:
    """connect(ranks) -> torch's process group, called by every rank for all groups in one order."""

    def group(kind: str) -> Group:
        own = Group()
        for ranks in layout.groups(kind):
            handle = connect(ranks) if len(ranks) > 1 else None
            if layout.rank in ranks:
                own = Group(ranks.index(layout.rank), len(ranks), tuple(ranks), handle)
        return own

    return Parallel(
        layout=layout,
        tensor=group("tensor"),
        pipeline=group("pipeline"),
        data=group("data"),
        expert=group("expert") if is_expert_parallel else Group(),
        engine=group("engine"),
    )
