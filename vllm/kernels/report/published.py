"""Published FP8 and FP4 checkpoints: which the engine serves, and what keeps it from the others.

The list, published_checkpoints.json, is of the pages of public serving recipes. Whether one is
served is asked of the registries of architectures and of quantisation readers; nothing is fetched.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from vllm.architectures import registry
from vllm.errors import CheckpointError
from vllm.formats.readers.base import QuantizationConfig
from vllm.formats.readers.registry import resolve_quantization
from vllm.utils.dataclasses import dataclass

SERVED = "served"
EXPLAINED = "explained"
"""The engine refuses it; `vllm kernels explain` shows its layers with their formats and kernels."""
NAMED = "explained without formats"
"""As EXPLAINED, but no reader takes its quantisation: its quantised layers are listed by name."""
STATUSES = (SERVED, EXPLAINED, NAMED)

# A layer of each kind that formats tell apart.
_LAYERS = ("model.layers.3.self_attn.o_proj", "model.layers.3.mlp.down_proj",
           "model.layers.3.mlp.experts.0.down_proj")  # fmt: skip


@dataclass(frozen=True)
class Published:
    """name: on the Hugging Face hub. page: where it is listed. is_read: whether its config.json was
    read; model and format of others are assumed from checkpoints of the same family and maker.
    config: the parts of config.json that decide whether it is served. format: in words."""

    name: str
    page: str
    format: str
    is_read: bool
    config: dict[str, Any]

    @property
    def status(self) -> str:
        reader = self._reader()
        if reader is None:
            return NAMED
        return SERVED if self.is_described_and_served and _is_served(reader) else EXPLAINED

    @property
    def is_described_and_served(self) -> bool:
        return registry.is_described(self.config) and registry.is_served(self.config)

    @property
    def lacks(self) -> tuple[str, ...]:
        """What keeps the engine from serving it."""
        reader = self._reader()
        found = () if self.is_described_and_served else ("architecture",)
        return found if reader and _is_served(reader) else (*found, "format")

    def _reader(self) -> QuantizationConfig | None:
        try:
            return resolve_quantization(self.config["quantization_config"], None, self.name)
        except CheckpointError:
            return None


def _is_served(reader: QuantizationConfig) -> bool:
    """Whether layers are quantised in formats that are known, all of which are served."""
    return any(reader.stored_layer([name]) is not None for name in _LAYERS)


@cache
def checkpoints() -> tuple[Published, ...]:
    """The list, in its order."""
    content = json.loads((Path(__file__).parent / "published_checkpoints.json").read_text())
    return tuple(
        Published(
            name=row["name"],
            page=content["pages"].replace("PAGE", row["page"]),
            format=row["format"],
            is_read=row["config"] == "read",
            config=content["models"][row["model"]]
            | {"quantization_config": content["formats"][row["format"]]},
        )
        for row in content["checkpoints"]
    )
