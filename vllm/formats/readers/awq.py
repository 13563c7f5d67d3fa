"""AWQ checkpoints: int4 weights in groups of columns, with zero points, in the GEMM layout."""

from collections.abc import Sequence
from typing import Any

from vllm.errors import CheckpointError
from vllm.formats import int4
from vllm.formats.description import INTEGER_GROUPS
from vllm.formats.readers.base import QuantizationConfig, StoredLayer, TensorNames
from vllm.formats.readers.layer_names import LayerNames, layers_listed, tell_experts_apart
from vllm.formats.weight_format import WeightFormat

_NAMES = TensorNames("qweight", "scales", zero_point="qzeros", packing="awq")


class AwqConfig(QuantizationConfig):
    """group_size: columns that share a scale and a zero point. modules_to_not_convert: layers that
    are not quantised; the output projection never is."""

    name = "awq"
    is_checkpoint_quantized = True

    def __init__(self, group_size: int, modules_to_not_convert: Sequence[str] = ()):
        self.group_size = group_size
        self._ignored = LayerNames(["lm_head", *modules_to_not_convert])
        self.tells_experts_apart = tell_experts_apart(modules_to_not_convert)

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "AwqConfig":
        """The older names of llm-awq are taken too."""
        fields = {
            "bits": (config.get("bits", config.get("w_bit")), (4,)),
            "group_size": (config.get("group_size", config.get("q_group_size")), INTEGER_GROUPS),
            "version": (str(config.get("version", "gemm")).lower(), ("gemm",)),
            "zero_point": (config.get("zero_point", True), (True,)),
        }
        for field, (given, accepted) in fields.items():
            if given not in accepted or type(given) is not type(accepted[0]):
                raise CheckpointError(
                    f"AWQ {field} {given!r} is not supported: it takes "
                    f"{', '.join(map(str, accepted))}"
                )
        return cls(fields["group_size"][0], layers_listed(config, "modules_to_not_convert"))

    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        if self._ignored.covers(names):
            return None
        weight = WeightFormat.of(int4.FORMAT.kind, (1, self.group_size))
        return StoredLayer(weight, int4.FORMAT.act, _NAMES, len(names), has_zero_points=True)
