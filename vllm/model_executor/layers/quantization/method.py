"""What the methods of quantised formats have in common."""

from vllm.errors import CheckpointError
from vllm.formats.readers.base import QuantizationConfig, StoredLayer
from vllm.model_executor.layers.linear import LinearMethod, StoredWeight


class QuantizedLinearMethod(LinearMethod):
    """config: of the checkpoint. stored: how it stores the layer."""

    def __init__(self, config: QuantizationConfig, stored: StoredLayer):
        optional = {"input_scale": stored.has_input_scale, "zero_points": stored.has_zero_points}
        super().__init__(stored.format, stored.act, [name for name in optional if optional[name]])
        self.config = config
        self.stored = stored


def check_groups(layer: StoredWeight, group: int, what: str) -> None:
    """CheckpointError where the columns of this rank are not whole groups, which are `what`."""
    if layer.input_size % group:
        raise CheckpointError(
            f"{layer.prefix}: {layer.input_size} columns{layer.per_rank} are not whole groups of "
            f"{group}, {what}; list the layer as not quantised"
        )
