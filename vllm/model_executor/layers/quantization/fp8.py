"""Linear layers and experts of FP8 (E4M3) checkpoints."""

from torch import Tensor

from vllm.formats.readers.fp8 import Fp8Config
from vllm.model_executor.layers.linear import StoredWeight
from vllm.model_executor.layers.quantization.kv_cache import Fp8KVCacheMethod
from vllm.model_executor.layers.quantization.method import QuantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.layers.sharding import Place
from vllm.model_executor.weights import FLOATS, Slot, copy_into
from vllm.utils.fp8 import per_block_cast_to_fp8

__all__ = ["Fp8Config", "Fp8KVCacheMethod", "Fp8LinearMethod", "Fp8MoEMethod"]


class Fp8LinearMethod(QuantizedLinearMethod):
    """An FP8 weight with float32 scales per tensor, row or block: w = q * scale.

    `use_deep_gemm` of its config is what the selector decides by.
    """

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        place, weight, stored = layer.places[index], layer.weight.data[rows], self.stored.weight
        scale = layer.scales.data[layer.scale_rows(index)]
        if not self.stored.is_quantized:
            return {"weight": _quantising_slot(place, weight, scale, stored.block)}
        names, write = self.stored.names, write_scales(scale)
        slots = {names.weight: place.slot((1, 1), (weight.dtype,), copy_into(weight))}
        if stored.scale == "tensor":
            # One scalar, spread over the shard's rows where shards are merged (exact).
            slots[names.scale] = Slot((), FLOATS, write)
        else:
            per_scale = stored.rows_per_scale(1), stored.columns_per_scale(place.num_columns)
            slots[names.scale] = place.slot(per_scale, FLOATS, write)
        if self.stored.has_input_scale:
            write_input = write_scales(layer.input_scale.data[index])
            slots[names.input_scale] = Slot((), FLOATS, write_input)
        return slots


class Fp8MoEMethod(Fp8LinearMethod):
    """The same for every expert of a layer."""


def _quantising_slot(place: Place, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Slot:
    """Quantises whole blocks, so that a rank's part is that of the whole weight quantised."""
    first_row, first_column = place.offsets(block)
    num_rows, num_columns = place.shape

    def quantise(tensor: Tensor) -> None:
        codes, scales = per_block_cast_to_fp8(tensor.to(weight.device), block)
        own = codes[first_row : first_row + num_rows]
        weight.copy_(own[:, first_column : first_column + num_columns])
        scale.copy_(scales)

    return place.whole_blocks(block).slot((1, 1), FLOATS, quantise)
