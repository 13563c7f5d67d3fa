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

    def create_weights(self, layer: StoredWeight) -> None:
        is_cut = layer.input_size < layer.places[0].num_columns
        if text := self.stored.misfit(layer.shard_rows, layer.input_size, is_cut):
            raise CheckpointError(f"{layer.prefix}{layer.per_rank}: {text}")
        super().create_weights(layer)
