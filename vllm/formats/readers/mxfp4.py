"""Checkpoints whose experts are MXFP4 (gpt-oss). Nothing else in them is quantised."""

from collections.abc import Sequence
from typing import Any

from vllm.formats import mxfp4
from vllm.formats.readers.base import QuantizationConfig, StoredLayer, TensorNames
from vllm.formats.readers.layer_names import LayerNames, layers_listed, tell_experts_apart
from vllm.formats.weight_format import WeightFormat

_NAMES = TensorNames("weight_blocks", "weight_scales")


class Mxfp4Config(QuantizationConfig):
    """modules_to_not_convert: layers that are not quantised."""

    name = "mxfp4"
    is_checkpoint_quantized = True

    def __init__(self, modules_to_not_convert: Sequence[str] = ()):
        self._ignored = LayerNames(modules_to_not_convert)
        self.tells_experts_apart = tell_experts_apart(modules_to_not_convert)

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "Mxfp4Config":
        return cls(layers_listed(config, "modules_to_not_convert"))

    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        if not all(".experts." in name for name in names) or self._ignored.covers(names):
            return None
        weight = WeightFormat.of(mxfp4.FORMAT.kind)
        return StoredLayer(weight, mxfp4.FORMAT.act, _NAMES, len(names))
