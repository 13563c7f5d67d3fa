"""AWQ checkpoints: int4 weights in groups of columns, with zero points, in the GEMM layout.

No torch here: the configuration, and with it every kernel choice, resolves without it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.errors import CheckpointError
from vllm.formats.weight_format import ActScheme, WeightFormat
from vllm.model_executor.layers.quantization import (
    LayerFormat,
    LayerNames,
    QuantizationConfig,
    layers_listed,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.int4 import AwqLinearMethod

GROUP_SIZES = (32, 64, 128)


class AwqConfig(QuantizationConfig):
    """group_size: columns that share a scale and a zero point. modules_to_not_convert: layers that
    are not quantised; the output projection never is."""

    name = "awq"
    is_checkpoint_quantized = True

    def __init__(self, group_size: int, modules_to_not_convert: Sequence[str] = ()):
        self.group_size = group_size
        self._ignored = LayerNames(["lm_head", *modules_to_not_convert])

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "AwqConfig":
        """The older names of llm-awq are taken too."""
        fields = {
            "bits": (config.get("bits", config.get("w_bit")), (4,)),
            "group_size": (config.get("group_size", config.get("q_group_size")), GROUP_SIZES),
            "version": (str(config.get("version", "gemm")).lower(), ("gemm",)),
            "zero_point": (config.get("zero_point", True), (True,)),
        }
        for field, (given, accepted) in fields.items():
            if given not in accepted:
                raise CheckpointError(
                    f"AWQ {field} {given!r} is not supported: it takes "
                    f"{', '.join(map(str, accepted))}"
                )
        return cls(fields["group_size"][0], layers_listed(config, "modules_to_not_convert"))

    def layer_format(self, names: Sequence[str]) -> LayerFormat | None:
        if self._ignored.covers(names):
            return None
        return WeightFormat("int4", "group", (1, self.group_size)), (ActScheme.NONE,)

    def linear_method(self, names: Sequence[str]) -> "AwqLinearMethod | None":
        from vllm.model_executor.layers.quantization.int4 import AwqLinearMethod

        found = self.layer_format(names)
        return found and AwqLinearMethod(self.group_size)
