"""Extensions that other installed packages offer through Python entry points."""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from vllm.errors import ConfigError


@cache
def extensions(group: str) -> dict[str, Any]:
    """By entry point name, what each entry point of `group` loads, in order of names.

    ConfigError names the package and the cause where one cannot be loaded.
    """
    found = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        try:
            found[point.name] = point.load()
        except Exception as error:  # whatever a foreign module raises
            package = point.dist.name if point.dist else "an unknown package"
            raise ConfigError(
                f"{package} offers {group} {point.name!r} ({point.value}), which cannot be loaded: "
                f"{type(error).__name__}: {error}; uninstall or repair it"
            ) from error
    return found
