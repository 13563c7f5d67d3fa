"""Lists of layers in quantisation configs, most often of those that are not quantised."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from typing import Any

from vllm.errors import CheckpointError

EVERY_LINEAR = "Linear"
_PART = r"(layers\.\d+|[A-Za-z_]\w*)"
_OF_ALL_EXPERTS = rf"({_PART}(\.{_PART})*)?"


class LayerNames:
    """Names of layers, or of parents or last parts of them, as configs list them; or globs, which
    match whole names; or `re:` and a regular expression, which matches from the start of a name.

    Multimodal checkpoints list `model.language_model.layers.0.mlp` (or `language_model.model...`)
    for what the text model calls `model.layers.0.mlp`, and others begin with `backbone` instead.
    """

    def __init__(self, entries: Sequence[str]):
        """CheckpointError for entries that are no text, or no regular expression."""
        if not all(isinstance(entry, str) for entry in entries):
            raise CheckpointError(f"layers are listed by name, not as {list(entries)!r}")
        self._patterns = [_compiled(e[3:]) for e in entries if e.startswith("re:")]
        names = [_text_model_name(entry) for entry in entries if not entry.startswith("re:")]
        self._parts = {tuple(name.split(".")) for name in names if "*" not in name}
        self._lengths = sorted({len(parts) for parts in self._parts})
        globs = [translate(name) for name in names if "*" in name]
        if globs:
            self._patterns.append(re.compile("|".join(globs)))

    @property
    def is_pattern(self) -> bool:
        """Whether an entry is a glob or a regular expression."""
        return bool(self._patterns)

    def __contains__(self, layer: str) -> bool:
        parts = tuple(layer.split("."))
        for length in self._lengths:
            if not self._parts.isdisjoint(zip(*[parts[start:] for start in range(length)])):
                return True
        return any(pattern.match(layer) for pattern in self._patterns)

    def covers(self, layers: Sequence[str]) -> bool:
        """Whether all of `layers` are named; CheckpointError where some are and some are not."""
        if not self._parts and not self._patterns:
            return False
        named = {layer for layer in layers if layer in self}
        if named and len(named) < len(set(layers)):
            raise CheckpointError(
                f"{', '.join(sorted(set(layers)))} are computed as one layer, but only "
                f"{', '.join(sorted(named))} is listed as not quantised"
            )
        return bool(named)


def _text_model_name(entry: str) -> str:
    parts = [part for part in entry.split(".") if part != "language_model"] or ["model"]
    if parts[0] == "backbone":
        parts[0] = "model"
    return ".".join(parts)


def _compiled(pattern: str) -> "re.Pattern[str]":
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"layers are listed by re:{pattern}: {error}") from error


def tell_experts_apart(*lists: Iterable[str]) -> bool:
    """Whether an entry may name some experts of a layer and not others: by a number that is not a
    layer's, or a pattern that is more than a part of a name."""
    entries = (entry for own in lists for entry in own)
    bare = (e.removeprefix("re:").replace("\\.", ".").strip("^.*$") for e in entries)
    return not all(re.fullmatch(_OF_ALL_EXPERTS, one) for one in bare)


def layers_listed(config: Mapping[str, Any], *fields: str) -> list[str]:
    """The first of `fields` that lists layers; [] for none. CheckpointError for what is no list."""
    for field in fields:
        listed = config.get(field) or []
        if not isinstance(listed, list | tuple):
            raise CheckpointError(
                f"quantization_config: {field} = {listed!r}: it takes a list of layers"
            )
        if listed:
            return list(listed)
    return []
