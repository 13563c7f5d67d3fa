"""NVIDIA ModelOpt checkpoints of several formats, a table of which says each layer's own.

For `vllm kernels explain`: the engine has no reader of that name and refuses such checkpoints.
"""

from collections.abc import Sequence
from typing import Any

from vllm.errors import CheckpointError
from vllm.formats.readers.base import StoredLayer
from vllm.formats.readers.layer_names import LayerNames, layers_listed
from vllm.formats.readers.modelopt import ModelOptConfig

ALGORITHM = "MIXED_PRECISION"


class ModelOptMixedConfig(ModelOptConfig):
    """by_algorithm: the layers of each quant_algo. Layers in no list are not quantised."""

    name = "modelopt_mixed"

    def __init__(self, by_algorithm: dict[str, list[str]], exclude_modules: Sequence[str] = ()):
        self._layers = [
            (ModelOptConfig(algorithm, exclude_modules), LayerNames(names))
            for algorithm, names in by_algorithm.items()
        ]

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "ModelOptMixedConfig":
        nested = config.get("quantization")
        fields = nested if isinstance(nested, dict) else config
        table = fields.get("quantized_layers")
        if fields.get("quant_algo") != ALGORITHM or not isinstance(table, dict) or not table:
            raise CheckpointError(f"ModelOpt {ALGORITHM} needs a table quantized_layers")
        by_algorithm: dict[str, list[str]] = {}
        for name, entry in table.items():
            algorithm = entry.get("quant_algo") if isinstance(entry, dict) else None
            by_algorithm.setdefault(str(algorithm), []).append(name)
        return cls(by_algorithm, layers_listed(fields, "ignore", "exclude_modules"))

    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        found = [own.stored_layer(names) for own, layers in self._layers if layers.covers(names)]
        return found[0] if found else None
