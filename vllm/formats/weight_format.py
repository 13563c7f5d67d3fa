"""How a weight is stored, as a printable value."""

import re

from vllm.errors import ConfigError
from vllm.formats import registry
from vllm.formats.description import OF_TEXT, WHOLE, FormatDescription
from vllm.utils.dataclasses import dataclass
from vllm.utils.math_utils import cdiv

_TEXT = re.compile(r"([a-z][\w-]*)(?:\[([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?\])?")


@dataclass(frozen=True)
class WeightFormat:
    """How a weight [N, K] is stored: a format of the registry, with its sizes.

    block: rows and columns that share a scale, where the text says so. `str()` is the short name
    used everywhere, such as `bf16`, `fp8-block[128x128]`, `nvfp4` or `int4-group[128]`.
    """

    element: str
    scale: str = "none"
    block: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> str:
        """The name without sizes: what a kernel declares to support."""
        return self.element if self.scale == "none" else f"{self.element}-{self.scale}"

    @property
    def description(self) -> FormatDescription:
        return registry.description(self.kind)

    @property
    def is_quantized(self) -> bool:
        return self.description.is_quantized

    @classmethod
    def of(cls, kind: str, block: tuple[int, int] = (0, 0)) -> "WeightFormat":
        """ConfigError for a kind that is unknown."""
        known = registry.description(kind)
        return cls(known.element, known.scale, block)

    @classmethod
    def parse(cls, text: str) -> "WeightFormat":
        match = _TEXT.fullmatch(text)
        known = registry.description(match[1] if match else text)
        sizes = tuple(int(size) for size in (match.groups()[1:] if match else ()) if size)
        if not sizes and known.default_size is not None:
            return cls.of(known.kind, known.default_size)
        if not sizes and known.num_sizes:
            raise ConfigError(f"weight format {known.kind} needs a size, such as {known.example}")
        if len(sizes) != known.num_sizes:
            raise registry.unknown(text)
        rows, columns = (1, *sizes)[-2:] if sizes else (0, 0)
        return cls.of(known.kind, (rows, columns))

    def __str__(self) -> str:
        num_sizes = self.description.num_sizes
        sizes = self.block[2 - num_sizes :]
        return f"{self.kind}[{'x'.join(map(str, sizes))}]" if sizes else self.kind

    # ------------------------------------------------------------ shapes

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds several codes."""
        return self.description.codes_per_byte > 1

    def rows_per_scale(self, shard_rows: int) -> int:
        """Rows of a shard that share one scale."""
        return self._per_scale(0, shard_rows)

    def columns_per_scale(self, num_columns: int) -> int:
        """Columns of a weight with `num_columns` that share one scale."""
        return self._per_scale(1, num_columns)

    def _per_scale(self, axis: int, whole: int) -> int:
        size = self.description.per_scale[axis]
        return {WHOLE: whole, OF_TEXT: self.block[axis]}.get(size, size)

    def scale_shape(self, shard_rows: tuple[int, ...], num_columns: int) -> tuple[int, int]:
        """Of the scales of these shards."""
        rows = sum(cdiv(n, self.rows_per_scale(n)) for n in shard_rows)
        return rows, cdiv(num_columns, self.columns_per_scale(num_columns))

    def shapes(self, shard_rows: tuple[int, ...], num_columns: int) -> dict[str, tuple[int, ...]]:
        """Of every tensor of a layer of these shards, by its field in LinearTensors."""
        sizes: dict[str, tuple[int, ...]] = {
            "code": (sum(shard_rows), num_columns // self.description.codes_per_byte),
            "scale": self.scale_shape(shard_rows, num_columns),
            "shard": (len(shard_rows),),
            "layer": (),
        }
        return {tensor.name: sizes[tensor.one_per] for tensor in self.description.tensors}
