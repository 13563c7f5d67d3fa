"""A decode step against the bytes that it must move: rows for each kind of layer, as text and JSON.

The limit of a row is its bytes over the bandwidth of the memory. The times of all rows and what is
between kernels add up to the step.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.kernels.step_bytes import DecodeStep, LayerBytes, LayerKind
from vllm.utils.dataclasses import dataclass, replace

BETWEEN = "between kernels"
_SMALL_SHARE = 0.002  # of a step: kernels of no layer that take less are one row
_OTHERS = "other kernels"
_NUM_NAMES = 3


class KernelTime(NamedTuple):
    """Microseconds of one step. layer: its name; what else is known of the kernel, such as `norms`;
    or "". kernel: its name; "" on the CPU. launches: calls of the layer there."""

    layer: str
    kernel: str
    us: float
    launches: float


class Bandwidth(NamedTuple):
    """source: how it is known."""

    bytes_per_s: float
    source: str

    def us(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_s * 1e6

    def to_json(self) -> dict[str, Any]:
        rate = round(self.bytes_per_s / 1e9, 1)
        return {"memory_gb_per_s": rate, "memory_gb_per_s_source": self.source}


@dataclass(frozen=True)
class Row:
    """us, launches: None without a run. kernel: what computes it, backend or names of kernels, ""
    without a run. problems: what the layers ask for."""

    name: str
    kernel: str
    problems: tuple[str, ...]
    num_layers: int
    bytes: LayerBytes
    limit_us: float
    us: float | None = None
    launches: float | None = None
    kernels: Mapping[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        sizes = self.bytes
        found: dict[str, Any] = {
            "name": self.name,
            "problems": list(self.problems),
            "layers": self.num_layers,
            "weight_bytes": round(sizes.weights),
            "cache_bytes": round(sizes.cache),
            "state_bytes": round(sizes.states),
            "activation_bytes": round(sizes.activations),
            "limit_us": round(self.limit_us, 3),
        }
        if self.us is not None:
            found["kernel"] = self.kernel
            found |= {"us": round(self.us, 3), "launches": round(self.launches or 0, 3)}
            found["kernels"] = {name: round(us, 3) for name, us in (self.kernels or {}).items()}
        return found


@dataclass(frozen=True)
class Roofline:
    """Of one batch size. rows: without what is between kernels. step_us: measured, None without a
    run; wait_us: of it the host waits for the device; eager_step_us: without CUDA graphs; idle_us:
    under the profiler, when no kernel runs."""

    step: DecodeStep
    bandwidth: Bandwidth
    rows: tuple[Row, ...]
    step_us: float | None = None
    wait_us: float = 0.0
    eager_step_us: float | None = None
    idle_us: float = 0.0

    @property
    def limit_us(self) -> float:
        return sum(row.limit_us for row in self.rows)

    @property
    def is_by_kernel(self) -> bool:
        """Whether rows have times."""
        return any(row.us is not None for row in self.rows)

    @property
    def kernels_us(self) -> float:
        return sum(row.us or 0.0 for row in self.rows)

    @property
    def between_us(self) -> float:
        """Of a step, when none of the rows' kernels runs: gaps, launches, the host."""
        assert self.step_us is not None
        return self.step_us - self.kernels_us

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "batch": self.step.batch,
            "context": round(self.step.context, 1),
            "limit_us": round(self.limit_us, 3),
        }
        if self.step_us is not None:
            found["step_us"] = round(self.step_us, 3)
            found["host_us"] = round(self.step_us - self.wait_us, 3)
        if self.is_by_kernel:
            found["kernels_us"] = round(self.kernels_us, 3)
            found["between_us"] = round(self.between_us, 3)
        if self.eager_step_us is not None:
            found["eager_step_us"] = round(self.eager_step_us, 3)
            found["profiled_idle_us"] = round(self.idle_us, 3)
        return {**found, "rows": [row.to_json() for row in self.rows]}


# ---------------------------------------------------------------- rows


def limit_rows(kinds: Iterable[LayerKind], bandwidth: Bandwidth) -> tuple[Row, ...]:
    """Without a run."""
    return tuple(_row(kind.name, "", None, bandwidth, kind) for kind in kinds)


def timed_rows(
    kinds: Sequence[LayerKind],
    times: Sequence[KernelTime],
    bandwidth: Bandwidth,
    backends: Mapping[str, str],
) -> tuple[Row, ...]:
    """The longest time first. backends: what serves a layer, by its name."""
    kind_of = {layer: kind for kind in kinds for layer in kind.layers}
    own: dict[int, list[KernelTime]] = {id(kind): [] for kind in kinds}
    others: dict[str, list[KernelTime]] = {}
    for time in times:
        if (kind := kind_of.get(time.layer)) is not None:
            own[id(kind)].append(time)
        else:
            others.setdefault(time.layer or short_name(time.kernel), []).append(time)
    rows = []
    for kind in kinds:
        names = dict.fromkeys(backends[layer] for layer in kind.layers if layer in backends)
        rows.append(_row(kind.name, ", ".join(names), own[id(kind)], bandwidth, kind))
    rows += [_row(name, _names(found), found, bandwidth) for name, found in _merged(others)]
    return tuple(sorted(rows, key=lambda row: -(row.us or 0.0)))


def _merged(others: dict[str, list[KernelTime]]) -> Iterable[tuple[str, list[KernelTime]]]:
    """Small ones together."""
    total = sum(time.us for found in others.values() for time in found)
    small: list[KernelTime] = []
    for name, found in others.items():
        if sum(time.us for time in found) < _SMALL_SHARE * total:
            small += found
        else:
            yield name, found
    if small:
        yield _OTHERS, small


def _row(
    name: str,
    kernel: str,
    times: Sequence[KernelTime] | None,
    bandwidth: Bandwidth,
    kind: LayerKind | None = None,
) -> Row:
    """times: None without a run. kind: None for kernels of no layer."""
    sizes = kind.bytes if kind is not None else LayerBytes()
    problems, num_layers = (kind.problems, len(kind.layers)) if kind is not None else ((), 0)
    row = Row(name, kernel, problems, num_layers, sizes, bandwidth.us(sizes.required))
    if times is None:
        return row
    kernels: dict[str, float] = {}
    for time in times:
        if time.kernel:
            kernels[time.kernel] = kernels.get(time.kernel, 0.0) + time.us
    us, launches = sum(time.us for time in times), sum(time.launches for time in times)
    return replace(row, us=us, launches=launches, kernels=kernels)


def _names(times: Iterable[KernelTime]) -> str:
    names = [*dict.fromkeys(short_name(time.kernel) for time in times if time.kernel)]
    more = f", {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
    return ", ".join(names[:_NUM_NAMES]) + more


def short_name(kernel: str) -> str:
    """`elementwise_kernel` of `void at::native::elementwise_kernel<128, 4, ...>(...)`."""
    bare = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.split(r"[<(]", bare, maxsplit=1)[0].strip()
    return name.rpartition("::")[2] or kernel


# ---------------------------------------------------------------- text


def text(found: Roofline) -> str:
    """The table of one batch size, under the line that sums it up."""
    lines = [summary(found)]
    if not found.is_by_kernel:
        return "\n".join(lines + _limit_lines(found))
    return "\n".join(lines + _timed_lines(found) + _host_lines(found))


def summary(found: Roofline) -> str:
    step, limit_us, step_us = found.step, found.limit_us, found.step_us
    requests = "1 request" if step.batch == 1 else f"{step.batch} requests"
    head = f"{requests}, {step.context:,.0f} keys each: limit {limit_us / 1e3:.3f} ms"
    if step_us is None:
        return f"{head}, at most {step.batch / limit_us * 1e6:,.0f} tokens/s"
    rate = step.batch / step_us * 1e6
    return f"{head}, step {step_us / 1e3:.3f} ms ({step_us / limit_us:.2f} x), {rate:,.0f} tokens/s"


def _limit_lines(found: Roofline) -> list[str]:
    width = max(len(row.name) for row in found.rows)
    lines = [f"{'layer':<{width}} {'layers':>6} {'weights MB':>11} {'cache MB':>9} "
             f"{'states MB':>9} {'limit us':>9} {'share':>6}"]  # fmt: skip
    for row in found.rows:
        mb = [n / 1e6 for n in (row.bytes.weights, row.bytes.cache, row.bytes.states)]
        lines.append(
            f"{row.name:<{width}} {row.num_layers:>6} {mb[0]:>11,.1f} {mb[1]:>9,.1f} "
            f"{mb[2]:>9,.1f} {row.limit_us:>9,.1f} {row.limit_us / found.limit_us:>6.1%}"
        )
    return lines


def _timed_lines(found: Roofline) -> list[str]:
    width = max(len(BETWEEN), *(len(row.name) for row in found.rows))
    lines = [f"{'layer':<{width}} {'launches':>8} {'MB':>9} {'limit us':>9} {'us':>9} "
             f"{'of limit':>8} {'share':>6}  kernel"]  # fmt: skip
    for row in found.rows:
        us = row.us or 0.0
        ratio = f"{us / row.limit_us:.2f} x" if row.limit_us and us else "-"
        lines.append(_timed(found, width, row.name, us, f"{row.launches:,.0f}",
                            f"{row.bytes.required / 1e6:,.1f}", f"{row.limit_us:,.1f}", ratio)
                     + f"  {row.kernel}".rstrip())  # fmt: skip
    lines.append(_timed(found, width, BETWEEN, found.between_us))
    ratio = f"{(found.step_us or 0) / found.limit_us:.2f} x"
    total = sum(row.bytes.required for row in found.rows) / 1e6
    lines.append(_timed(found, width, "step", found.step_us or 0.0, "", f"{total:,.1f}",
                        f"{found.limit_us:,.1f}", ratio))  # fmt: skip
    return lines


def _timed(
    found: Roofline, width: int, name: str, us: float, launches: str = "", mb: str = "",
    limit: str = "", ratio: str = "",
) -> str:  # fmt: skip
    share = us / (found.step_us or 1.0)
    return f"{name:<{width}} {launches:>8} {mb:>9} {limit:>9} {us:>9,.1f} {ratio:>8} {share:>6.1%}"


def _host_lines(found: Roofline) -> list[str]:
    assert found.step_us is not None
    lines = []
    if lost := [row.name for row in found.rows if row.num_layers and not row.launches]:
        lines.append(f"no kernel is known to be of {', '.join(lost)}: rows with names have them")
    if found.eager_step_us is not None:
        lines.append(
            f"host: {(found.step_us - found.wait_us) / 1e3:.3f} ms of a step, then waits "
            f"{found.wait_us / 1e3:.3f} ms for the device; without CUDA graphs a step takes "
            f"{found.eager_step_us / 1e3:.3f} ms"
        )
        lines.append(
            f"under the profiler no kernel runs for {found.idle_us / 1e3:.3f} ms of a step"
        )
    if found.between_us < 0:
        lines.append("kernels take longer than the step: they overlap, or the profiler slows them")
    return lines
