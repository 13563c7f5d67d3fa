"""Linear layers of FP8 (E4M3) checkpoints."""

import torch
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.kernels.problem import ActScheme, WeightFormat
from vllm.kernels.tensors import LinearTensors, scale_shape
from vllm.model_executor.layers.linear import Linear, LinearMethod
from vllm.model_executor.layers.quantization.fp8_config import Fp8Config
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_block_cast_to_fp8
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter

__all__ = ["Fp8Config", "Fp8LinearMethod"]

FP8 = torch.float8_e4m3fn


class Fp8LinearMethod(LinearMethod):
    """An FP8 weight with `weight_scale_inv` (blocks) or `weight_scale` (tensor): w = q * scale."""

    def __init__(self, config: Fp8Config, weight: WeightFormat, act_schemes: tuple[ActScheme, ...]):
        super().__init__(weight, act_schemes)
        self.config = config

    def create_weights(self, layer: Linear) -> None:
        rows, columns = sum(layer.shard_rows), layer.input_size
        layer.weight = empty_parameter(rows, columns, dtype=FP8)
        shape = scale_shape(self.format, layer.shard_rows, columns)
        layer.weight_scale = empty_parameter(*shape, dtype=torch.float32)
        if self.config.activation_scheme == "static":
            layer.input_scale = empty_parameter(len(layer.shard_rows), dtype=torch.float32)

    def shard_slots(self, layer: Linear, index: int, rows: slice) -> dict[str, Slot]:
        shape = (layer.shard_rows[index], layer.input_size)
        weight = layer.weight.data[rows]
        scale = layer.weight_scale.data[self._scale_rows(layer, index)]
        if not self.config.is_checkpoint_fp8_serialized:

            def quantise(tensor: Tensor) -> None:
                on_device = tensor.to(weight.device)
                quantised, scales = per_block_cast_to_fp8(on_device, self.config.weight_block_size)
                weight.copy_(quantised)
                scale.copy_(scales)

            return {"weight": Slot(shape, FLOATS, quantise)}
        slots = {"weight": Slot(shape, (FP8,), copy_into(weight))}
        if self.config.weight_block_size:
            slots["weight_scale_inv"] = Slot(tuple(scale.shape), _SCALE_DTYPES, copy_into(scale))
        else:
            # One scalar, spread over the shard's rows where shards are merged (exact).
            slots["weight_scale"] = Slot((), _SCALE_DTYPES, lambda t: scale.fill_(t.item()))
        if self.config.activation_scheme == "static":
            place = layer.input_scale.data[index]
            slots["input_scale"] = Slot((), _SCALE_DTYPES, copy_into(place))
        return slots

    def _scale_rows(self, layer: Linear, index: int) -> slice:
        counts = [scale_shape(self.format, (n,), layer.input_size)[0] for n in layer.shard_rows]
        start = sum(counts[:index])
        return slice(start, start + counts[index])

    def tensors(self, layer: Linear) -> LinearTensors:
        scales = layer.weight_scale.data
        _check_scales(f"{layer.prefix}: weight scales", scales)
        input_scale = None
        if self.config.activation_scheme == "static":
            _check_scales(f"{layer.prefix}: input scales", layer.input_scale.data)
            input_scale = layer.input_scale.data.max()
        return LinearTensors(
            self.format, layer.weight.data, layer.shard_rows, scales, input_scale=input_scale
        )


_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check_scales(what: str, scales: Tensor) -> None:
    if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        raise CheckpointError(
            f"{what} must be finite and not negative; the checkpoint holds NaN, infinity or "
            f"negative ones: it is corrupt, fetch or quantise it again"
        )
