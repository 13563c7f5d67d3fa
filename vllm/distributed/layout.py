"""Position of a rank in the data, pipeline and tensor dimensions. No torch."""

from dataclasses import dataclass, replace

# By kind of group, what the ranks of one have in common.
GROUPS = {
    "tensor": ("data_rank", "stage"),
    "pipeline": ("data_rank", "tensor_rank"),
    "data": ("stage", "tensor_rank"),
    "expert": ("stage",),
    "engine": ("data_rank",),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Rank `rank` of data_size x pipeline_size x tensor_size. The tensor dimension varies fastest,
    then the pipeline stage, then the data-parallel rank."""

    rank: int = 0
    tensor_size: int = 1
    pipeline_size: int = 1
    data_size: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor_size * self.pipeline_size * self.data_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_size % self.pipeline_size

    @property
    def data_rank(self) -> int:
        return self.rank // (self.tensor_size * self.pipeline_size)

    @property
    def is_output(self) -> bool:
        """Whether this rank returns the engine's output: the first rank of the last stage."""
        return self.tensor_rank == 0 and self.stage == self.pipeline_size - 1

    def groups(self, kind: str) -> list[list[int]]:
        """All groups of `kind`: tensor, pipeline, data (the ranks of one stage that hold the same
        slices), expert (all ranks of one stage) or engine."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            position = replace(self, rank=rank)
            shared = tuple(getattr(position, name) for name in GROUPS[kind])
            found.setdefault(shared, []).append(rank)
        return list(found.values())

    def __str__(self) -> str:
        """`rank 3 (data-parallel 1, tensor-parallel 1)`, with the dimensions there are."""
        parts = [
            f"{name} {place}"
            for name, place, size in (
                ("data-parallel", self.data_rank, self.data_size),
                ("pipeline stage", self.stage, self.pipeline_size),
                ("tensor-parallel", self.tensor_rank, self.tensor_size),
            )
            if size > 1
        ]
        return f"rank {self.rank}" + (f" ({', '.join(parts)})" if parts else "")


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """The decoder layers of a stage; stage sizes differ by at most one."""
    return range(num_layers * stage // num_stages, num_layers * (stage + 1) // num_stages)
