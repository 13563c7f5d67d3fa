"""The cost model of kernels: what a call takes, from sizes and a few numbers fitted to a table.

    us = launch + weights * MB of weights read + inputs * 10^6 values read
         + outputs * 10^6 values written + products * 10^9 products
         + waves * 10^3 columns of K in each wave of tiles

The six numbers hold for one kernel and one range of tokens (RANGES), so that the bandwidth depends
on the number of tokens. A wave is as many tiles as the chip has multiprocessors; the last one takes
as long as a full one. Experts read the weights of those that some token chose, see `terms`.
`vllm kernels fit` fits the numbers and writes them to `fitted/`, with the error on sizes that were
left out.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError
from vllm.kernels.evidence.tables import SHIPPED, Chip, write_whole
from vllm.kernels.select.problem import MoEProblem, WeightProblem
from vllm.machine import Device
from vllm.utils.dataclasses import asdict, dataclass, field, replace

FITTED = SHIPPED.parent / "fitted"

# Most tokens of each range; the last takes more too.
RANGES = (16, 64, 256, 8192)
TERMS = ("launch", "weights", "inputs", "outputs", "products", "waves")
UNITS = {
    "launch": "us",
    "weights": "us per 10^6 weights read",
    "inputs": "us per 10^6 activations read",
    "outputs": "us per 10^6 activations written",
    "products": "us per 10^9 products",
    "waves": "us per 10^3 columns of K and wave of tiles",
    "error": "mean relative error on sizes left out",
    "error_beyond": "the same on sizes beyond all others",
}
Sizes = tuple[int, ...]
"""N and K, or experts, intermediate, hidden, top_k and expert-parallel ranks."""


@dataclass(frozen=True)
class RangeCost:
    """One kernel in one range of tokens. tile: tokens and rows of a weight that a thread block
    multiplies. error, error_beyond: mean relative errors on sizes that were left out, and on such
    that were beyond all others."""

    max_tokens: int
    tile: tuple[int, int]
    launch: float
    weights: float
    inputs: float
    outputs: float
    products: float
    waves: float
    error: float
    error_beyond: float

    @property
    def numbers(self) -> tuple[float, ...]:
        """In the order of TERMS."""
        return tuple(getattr(self, name) for name in TERMS)


@dataclass(frozen=True)
class SlowWave:
    """What a kernel takes where it covers a product with one wave of tiles that are too large.

    tiles: (tokens, rows of a weight, least share of the chip that the tiles fill): where all hold,
    the kernel chooses such a tile. launch: us. columns: us per 10^3 columns of K.
    """

    tiles: tuple[tuple[int, int, float], ...]
    launch: float
    columns: float

    def rows(self, num_tokens: int, num_sms: int) -> list[tuple[float, int]]:
        """For which numbers N of rows of a weight: above the first, up to the second."""
        found = []
        for tile_tokens, tile_rows, fill in self.tiles:
            num = -(-num_tokens // tile_tokens)
            # Half a tile of padding would speak for smaller tiles.
            is_padded = num * tile_tokens != -(-num_tokens // _HALF_TILE) * _HALF_TILE
            if num_tokens > _HALF_TILE and not is_padded:
                found.append((fill * num_sms * tile_rows / num, tile_rows * (num_sms // num)))
        return found

    def takes(self, num_tokens: int, n: int, num_sms: int) -> bool:
        return any(low < n <= high for low, high in self.rows(num_tokens, num_sms))


_HALF_TILE = 64


@dataclass(frozen=True)
class KernelCost:
    """takes_quantised: for activations that are quantised before. max_tokens: of a call."""

    backend: str
    takes_quantised: bool
    version: str
    max_tokens: int
    ranges: tuple[RangeCost, ...]
    slow_wave: SlowWave | None = None


@dataclass(frozen=True)
class KindCost:
    """All kernels for one kind of problem (`kind_of`). measured: least and largest of each of
    its `dimensions` in the table. num_sizes: how many combinations of sizes were measured."""

    tokens: tuple[int, ...]
    measured: tuple[tuple[int, int], ...]
    num_sizes: int
    kernels: tuple[KernelCost, ...]


@dataclass(frozen=True, eq=False)
class Fitted:
    """Of one kind of chip. table, table_sha256: what was fitted to. date: of its latest
    measurement. is_near: the chip is another than the one asked about."""

    chip: Chip
    name: str
    table: str
    table_sha256: str
    date: str
    kinds: Mapping[str, KindCost] = field(default_factory=dict)
    source: str = ""
    is_near: bool = False


# ---------------------------------------------------------------- problems


def kind_of(size_key: str) -> tuple[str, Sizes]:
    """What is fitted together, and the sizes: of `fp8-block[128x128]:4096x12288 bf16 none`,
    `linear fp8-block[128x128] bf16 none` and (4096, 12288). Of experts the ranks come last."""
    weight, _, rest = size_key.partition(":")
    sizes, _, others = rest.partition(" ")
    experts, *numbers = sizes.split("x")
    first, _, ranks = experts.partition("/")
    found = int(first), *map(int, numbers)
    if len(found) == 2:
        return f"linear {weight} {others}", found
    return f"moe {weight} {others}", (*found, int(ranks or 1))


def dimensions(sizes: Sizes) -> Sizes:
    """What may be smaller or larger than all that was measured: experts are those of a rank."""
    if len(sizes) == 2:
        return sizes
    num_experts, *others, ranks = sizes
    return (-(-num_experts // ranks), *others)


def kind_of_problem(problem: WeightProblem) -> str:
    activation = problem.activation if isinstance(problem, MoEProblem) else ""
    return _kind_name(problem.family, problem.weight, problem.dtype, problem.act, activation)


@lru_cache(maxsize=256)
def _kind_name(family: str, weight: object, dtype: str, act: tuple[str, ...], gate: str) -> str:
    others = "" if gate in ("", "silu") else f", {gate}"
    return f"{family} {weight} {dtype} {','.join(act)}{others}"


def terms(sizes: Sizes, num_tokens: int, tile: tuple[int, int], num_sms: int) -> list[float]:
    """What each of TERMS is multiplied with.

    Of experts, each token chooses `top_k` of them evenly at random: as many are chosen by some
    token as expected, and their rows are spread evenly. Both products count.
    """
    if len(sizes) == 2:
        n, k = sizes
        waves = _ceil(-(-num_tokens // tile[0]) * -(-n // tile[1]), num_sms) * k
        return _in_units(n * k, num_tokens * k, num_tokens * n, num_tokens * n * k, waves)
    num_experts, inner, hidden, top_k, ranks = sizes
    chosen = num_experts / ranks * (1 - (1 - top_k / num_experts) ** num_tokens)
    pairs = num_tokens * top_k / ranks
    tiles = chosen * _ceil(pairs / chosen, tile[0])
    waves = hidden * _ceil(tiles * -(-2 * inner // tile[1]), num_sms)
    waves += inner * _ceil(tiles * -(-hidden // tile[1]), num_sms)
    matrix = 3 * inner * hidden
    outputs = pairs * (2 * inner + hidden)
    return _in_units(chosen * matrix, pairs * (hidden + inner), outputs, pairs * matrix, waves)


def _ceil(amount: float, size: int) -> float:
    return -(-amount // size)


def _in_units(
    weights: float, inputs: float, outputs: float, products: float, waves: float
) -> list[float]:
    return [1.0, weights / 1e6, inputs / 1e6, outputs / 1e6, products / 1e9, waves / 1e3]


# ---------------------------------------------------------------- files


def path_of_fitted(table: Path) -> Path:
    """Of the table `tuned/sm_90.json`, `fitted/sm_90.json`."""
    return table.parent.parent / "fitted" / table.name


def read_fitted(path: Path) -> Fitted:
    """ConfigError names the file and what is wrong with it."""
    try:
        fitted = _parse(json.loads(path.read_text(encoding="utf-8")))
        if path.parent != FITTED:
            fitted = replace(fitted, kinds=dict(fitted.kinds))  # which may be broken anywhere
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no file of fitted costs ({type(error).__name__}: {error}): delete it and "
            f"run vllm kernels fit again"
        ) from error
    shown = f"fitted/{path.name}" if path.parent == FITTED else str(path)
    return replace(fitted, source=shown)


def _parse(content: Mapping[str, Any]) -> Fitted:
    numbers = int(content["num_sms"]), int(content["memory_gb_per_s"])
    return Fitted(
        Chip(Device.parse(content["device"]), *numbers),
        str(content["name"]),
        str(content["table"]),
        str(content["table_sha256"]),
        str(content["date"]),
        _Kinds(content["kinds"]),
    )


class _Kinds(Mapping[str, KindCost]):
    """Of a file, each parsed when it is asked for: a model has few of them."""

    def __init__(self, content: Mapping[str, Any]):
        self._content = {**content}
        self._parsed: dict[str, KindCost] = {}

    def __getitem__(self, name: str) -> KindCost:
        if name not in self._parsed:
            self._parsed[name] = _kind(self._content[name])
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def _kind(content: Mapping[str, Any]) -> KindCost:
    tokens = tuple(_count(m) for m in content["tokens"])
    if not tokens or list(tokens) != sorted(set(tokens)):
        raise ValueError(f"numbers of tokens {tokens} do not ascend")
    measured = tuple((_count(low), _count(high)) for low, high in content["measured"])
    kernels = tuple(_kernel(kernel) for kernel in content["kernels"])
    return KindCost(tokens, measured, _count(content["num_sizes"]), kernels)


def _kernel(content: Mapping[str, Any]) -> KernelCost:
    slow, ranges = content.get("slow_wave"), tuple(_range(one) for one in content["ranges"])
    if [one.max_tokens for one in ranges] != list(RANGES[: len(ranges)]) or not ranges:
        raise ValueError(f"ranges of tokens end at {[one.max_tokens for one in ranges]}")
    return KernelCost(
        str(content["backend"]),
        bool(content["takes_quantised"]),
        str(content["version"]),
        _count(content["max_tokens"]),
        ranges,
        None if slow is None else _slow_wave(slow),
    )


def _range(content: Mapping[str, Any]) -> RangeCost:
    tokens, rows = content["tile"]
    one = RangeCost(
        _count(content["max_tokens"]),
        (_count(tokens), _count(rows)),
        *(_number(name, content[name]) for name in (*TERMS, "error", "error_beyond")),
    )
    if not any(one.numbers):
        raise ValueError("a kernel that takes no time")
    return one


def _slow_wave(content: Mapping[str, Any]) -> SlowWave:
    tiles = tuple((_count(m), _count(n), _number("fill", fill)) for m, n, fill in content["tiles"])
    numbers = (_number(name, content[name]) for name in ("launch", "columns"))
    return SlowWave(tiles, *numbers)


# No number of the model is near it: launches take microseconds, and memory over 10^3 values a us.
_MAX_NUMBER = 1e5


def _number(name: str, value: Any) -> float:
    number = math.nan if isinstance(value, bool) else float(value)
    if not 0 <= number <= _MAX_NUMBER:
        raise ValueError(f"{name} is {value!r}: it takes a number from 0 to {_MAX_NUMBER:g}")
    return number


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no number from 1 up")
    return value


def write_fitted(path: Path, fitted: Fitted) -> None:
    """In one rename. ConfigError where it cannot be."""
    write_whole(path, text_of_fitted(fitted))


def text_of_fitted(fitted: Fitted) -> str:
    """A line for each range of tokens."""
    head = {
        **asdict(fitted.chip),
        "device": str(fitted.chip.device),
        **{name: getattr(fitted, name) for name in ("name", "table", "table_sha256", "date")},
        "units": UNITS,
    }
    kinds = ",\n".join(
        f"  {json.dumps(name)}: {_kind_text(kind)}" for name, kind in fitted.kinds.items()
    )
    return f'{json.dumps(head)[:-1]},\n "kinds": {{\n{kinds}\n }}}}\n'


def _kind_text(kind: KindCost) -> str:
    head = {"tokens": kind.tokens, "measured": kind.measured, "num_sizes": kind.num_sizes}
    kernels = ",\n".join(_kernel_text(kernel) for kernel in kind.kernels)
    return f'{json.dumps(head)[:-1]}, "kernels": [\n{kernels}\n  ]}}'


def _kernel_text(kernel: KernelCost) -> str:
    head = asdict(kernel)
    ranges = ",\n".join(f"     {json.dumps(one)}" for one in head.pop("ranges"))
    if kernel.slow_wave is None:
        del head["slow_wave"]
    return f'   {json.dumps(head)[:-1]}, "ranges": [\n{ranges}\n   ]}}'
