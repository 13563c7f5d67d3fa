"""The tables of docs/models.md, written from the registries: `vllm kernels docs`.

A table stands between two markers; the text around them is written by hand. A test asserts that the
committed tables are what this writes.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm.architectures import registry
from vllm.architectures.architecture import Checkpointed, Composite
from vllm.errors import ConfigError
from vllm.kernels.report import published
from vllm.kernels.report.published import Published


def rewritten(text: str, path: Path) -> str:
    """`text` of the page at `path` with every table as it is now. ConfigError where a marker is
    missing."""
    for name, table in _TABLES.items():
        begin, end = f"<!-- {name}: written by `vllm kernels docs` -->", f"<!-- end of {name} -->"
        before, has_begin, rest = text.partition(begin)
        _, has_end, after = rest.partition(end)
        if not (has_begin and has_end):
            raise ConfigError(
                f"{path} has no table {name}: it stands between {begin!r} and {end!r}"
            )
        text = f"{before}{begin}\n\n{table()}\n\n{end}{after}"
    return text


def architectures() -> str:
    """Classes that the engine serves, a row for each family."""
    families: dict[str, list[Checkpointed]] = {}
    for one in registry.known().values():
        if one.is_served:
            families.setdefault(one.family or one.model_type, []).append(one)
    rows = [(_classes(members), _family(name, members)) for name, members in families.items()]
    return markdown(("`architectures` in config.json", "family"), rows)


def _classes(members: Iterable[Checkpointed]) -> str:
    return ", ".join(f"`{name}`" for one in members for name in one.hf_architectures)


def _family(name: str, members: Iterable[Checkpointed]) -> str:
    is_part = any(isinstance(one, Composite) for one in members)
    return f"{name}, text only" if is_part else name


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles, *lines = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([titles, "|---" * (titles.count("|") - 1) + "|", *lines])


def published_checkpoints() -> str:
    """How many are served, and a row for each model type and answer."""
    found = published.checkpoints()
    counts = Counter(one.status for one in found)
    told = ", ".join(f"{counts[status]} {status}" for status in published.STATUSES)
    rows: dict[tuple[str, str], list[Published]] = {}
    for one in found:
        answer = one.status
        if one.lacks:
            answer += f" (lacks: {', '.join(one.lacks)})"
        rows.setdefault((one.config["model_type"], answer), []).append(one)
    table = markdown(
        ("model type", "answer", "formats", "checkpoints"),
        (
            (
                f"`{model_type}`",
                answer,
                "; ".join(dict.fromkeys(one.format for one in members)),
                ", ".join(one.name + ("" if one.is_read else " *") for one in members),
            )
            for (model_type, answer), members in rows.items()
        ),
    )
    return f"{len(found)} checkpoints: {told}.\n\n{table}"


_TABLES: dict[str, Callable[[], str]] = {
    "architectures": architectures,
    "published checkpoints": published_checkpoints,
}
