"""What one file per weight format declares: stored tensors, scales, activation schemes, rules."""

from typing import Literal

from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.utils.dataclasses import dataclass

WHOLE = -1
"""Of `per_scale`: the whole dimension of a shard shares one scale."""
OF_TEXT = 0
"""Of `per_scale`: the size that the format's text names in brackets."""
INTEGER_GROUPS = (32, 64, 128)
"""Columns that share a scale, of integers in groups."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight: a field of LinearTensors.

    one_per: what it has an element for. `code`: [rows, bytes of a row]. `scale`: [rows of scales,
    columns of scales]. `shard`: [shards]. `layer`: a scalar. is_optional: not every checkpoint of
    the format has it.
    """

    name: str
    dtype: str
    one_per: Literal["code", "scale", "shard", "layer"]
    is_optional: bool = False


INPUT_SCALE = StoredTensor("input_scale", "float32", "layer", is_optional=True)


@dataclass(frozen=True)
class QuantizeOption:
    """That `vllm quantize --format NAME` writes the format. sizes: those of its text, in order of
    preference; a weight that none of them divides is refused where is_whole."""

    name: str
    help: str
    sizes: tuple[tuple[int, int], ...] = ((0, 0),)
    is_whole: bool = False


@dataclass(frozen=True)
class FormatDescription:
    """One weight format.

    element, scale: type of the codes, granularity of the scales; together the kind. per_scale: rows
    and columns that share a scale: a size, WHOLE or OF_TEXT. sizes: those that checkpoints may have
    in the text, () for any. default_size: what the kind without a size means. codes_per_byte: 2 for
    codes of 4 bits, the even column in the low nibble. act: activation schemes in order of
    preference, where no checkpoint says which. rounded_scales: the form of scales that re-rounds
    the weight, for kernels that take it. merged_kind: what several weights become as one layer,
    where that is another kind. kept_at_load: layers that quantising while loading leaves alone, by
    the last part of their names. gemm_variable: the environment variable that chooses the backend
    of its linear layers. quantize: how `vllm quantize` makes it, None where it does not.
    """

    element: str
    scale: str
    tensors: tuple[StoredTensor, ...]
    per_scale: tuple[int, int]
    act: tuple[ActScheme, ...] = (ActScheme.NONE,)
    sizes: tuple[tuple[int, int], ...] = ()
    default_size: tuple[int, int] | None = None
    codes_per_byte: int = 1
    rounded_scales: Scales | None = None
    merged_kind: str = ""
    kept_at_load: tuple[str, ...] = ()
    gemm_variable: str = ""
    quantize: QuantizeOption | None = None

    @property
    def kind(self) -> str:
        """The name without sizes: what a kernel declares to support."""
        return self.element if self.scale == "none" else f"{self.element}-{self.scale}"

    @property
    def is_quantized(self) -> bool:
        return len(self.tensors) > 1

    @property
    def has_groups(self) -> bool:
        """Whether columns come in groups, of which a row has whole ones, each with a scale."""
        return self.is_quantized and self.per_scale[0] == 1 and self.per_scale[1] != WHOLE

    @property
    def num_sizes(self) -> int:
        """Numbers in its text."""
        return self.per_scale.count(OF_TEXT)

    @property
    def example(self) -> str:
        """Its text, with sizes where it has any."""
        sizes = (self.default_size or (1, 128))[2 - self.num_sizes :]
        return f"{self.kind}[{'x'.join(map(str, sizes))}]" if sizes else self.kind
