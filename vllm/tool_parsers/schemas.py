"""A tool that a request offers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """parameters: the JSON schema of its arguments; None for any object. is_strict: whether the
    arguments must match it or the request fails; None where the request does not say."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """As chat templates and xgrammar take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}
