"""Extensions that other installed packages offer through Python entry points."""

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.errors import ConfigError
from vllm.utils.distributions import metadata_folders, read

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def extensions(group: str) -> dict[str, Any]:
    """By entry point name, what each entry point of `group` loads, in order of names.

    ConfigError names the package and the cause where one cannot be loaded.
    """
    found = {}
    for point in sorted(_entry_points(group), key=lambda point: point.name):
        try:
            found[point.name] = point.load()
        except Exception as error:  # whatever a foreign module raises
            package = point.dist.name if point.dist else "an unknown package"
            raise ConfigError(
                f"{package} offers {group} {point.name!r} ({point.value}), which cannot be loaded: "
                f"{type(error).__name__}: {error}; uninstall or repair it"
            ) from error
    return found


def _entry_points(group: str) -> "Iterable[EntryPoint]":
    """importlib.metadata reads what every package says of itself, which takes longer than all else
    that explaining a model does: it is asked only where the name of the group is in a file."""
    section = f"[{group}]"
    if not any(section in text for text in _declarations(tuple(metadata_folders().values()))):
        return ()
    from importlib.metadata import entry_points

    return entry_points(group=group)


@cache
def _declarations(folders: tuple[str, ...]) -> list[str]:
    """The entry points of each package, as texts."""
    return [read(folder, "entry_points.txt") for folder in folders]
