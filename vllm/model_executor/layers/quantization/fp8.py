"""Linear layers and experts of FP8 (E4M3) checkpoints."""

import torch
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.kernels.problem import ActScheme, WeightFormat
from vllm.kernels.tensors import LinearTensors, MoETensors, scale_shape
from vllm.model_executor.layers.fused_moe.layer import FusedMoE, MoEMethod, Stack
from vllm.model_executor.layers.linear import Linear, LinearMethod
from vllm.model_executor.layers.quantization.fp8_config import Fp8Config
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_block_cast_to_fp8
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter

__all__ = ["Fp8Config", "Fp8LinearMethod", "Fp8MoEMethod"]

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
        scale_rows = _scale_rows(self.format, layer.shard_rows, index)
        is_static = self.config.activation_scheme == "static"
        return _weight_slots(
            self.config,
            layer.weight.data[rows],
            layer.weight_scale.data[scale_rows],
            layer.input_scale.data[index] if is_static else None,
        )

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


class Fp8MoEMethod(MoEMethod):
    """The same for every expert; scales are stacked like the weights they belong to."""

    def __init__(self, config: Fp8Config, weight: WeightFormat, act_schemes: tuple[ActScheme, ...]):
        super().__init__(weight, act_schemes)
        self.config = config
        self.is_static = config.activation_scheme == "static"

    def create_weights(self, layer: FusedMoE) -> None:
        num_experts = layer.num_experts
        for stack in layer.stacks:
            rows, columns = sum(stack.shard_rows), stack.num_columns
            weight = empty_parameter(num_experts, rows, columns, dtype=FP8)
            shape = scale_shape(self.format, stack.shard_rows, columns)
            scales = empty_parameter(num_experts, *shape, dtype=torch.float32)
            layer.register_parameter(stack.name, weight)
            layer.register_parameter(f"{stack.name}_scale", scales)
            if self.is_static:
                inputs = empty_parameter(num_experts, len(stack.shards), dtype=torch.float32)
                layer.register_parameter(f"{stack.name}_input_scale", inputs)

    def shard_slots(
        self, layer: FusedMoE, stack: Stack, shard: int, expert: int
    ) -> dict[str, Slot]:
        weight = layer.get_parameter(stack.name).data[expert, stack.rows(shard)]
        scale_rows = _scale_rows(self.format, stack.shard_rows, shard)
        scale = layer.get_parameter(f"{stack.name}_scale").data[expert, scale_rows]
        inputs = self._input_scales(layer, stack)
        return _weight_slots(
            self.config, weight, scale, None if inputs is None else inputs[expert, shard]
        )

    def tensors(self, layer: FusedMoE) -> MoETensors:
        weights, scales, inputs = [], [], []
        for stack in layer.stacks:
            weights.append(layer.get_parameter(stack.name).data)
            scales.append(layer.get_parameter(f"{stack.name}_scale").data)
            inputs.append(self._input_scales(layer, stack))
            _check_expert_scales(layer, stack, "weight scales", scales[-1])
            if inputs[-1] is not None:
                _check_expert_scales(layer, stack, "input scales", inputs[-1])
        return MoETensors(self.format, *weights, *scales, *inputs)

    def _input_scales(self, layer: FusedMoE, stack: Stack) -> Tensor | None:
        return layer.get_parameter(f"{stack.name}_input_scale").data if self.is_static else None


def _weight_slots(
    config: Fp8Config, weight: Tensor, scale: Tensor, input_scale: Tensor | None
) -> dict[str, Slot]:
    """Slots of one checkpoint weight [N, K] with its scales; the tensors are places to fill."""
    shape = tuple(weight.shape)
    if not config.is_checkpoint_fp8_serialized:

        def quantise(tensor: Tensor) -> None:
            on_device = tensor.to(weight.device)
            assert config.weight_block_size is not None
            quantised, scales = per_block_cast_to_fp8(on_device, config.weight_block_size)
            weight.copy_(quantised)
            scale.copy_(scales)

        return {"weight": Slot(shape, FLOATS, quantise)}
    slots = {"weight": Slot(shape, (FP8,), copy_into(weight))}
    if config.weight_block_size:
        slots["weight_scale_inv"] = Slot(tuple(scale.shape), _SCALE_DTYPES, copy_into(scale))
    else:
        # One scalar, spread over the shard's rows where shards are merged (exact).
        slots["weight_scale"] = Slot((), _SCALE_DTYPES, lambda t: scale.fill_(t.item()))
    if input_scale is not None:
        slots["input_scale"] = Slot((), _SCALE_DTYPES, copy_into(input_scale))
    return slots


def _scale_rows(weight_format: WeightFormat, shard_rows: tuple[int, ...], index: int) -> slice:
    """Which scale rows of a merged weight belong to shard `index`."""
    start = scale_shape(weight_format, shard_rows[:index], 1)[0]
    return slice(start, start + scale_shape(weight_format, shard_rows[index : index + 1], 1)[0])


_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check_expert_scales(layer: FusedMoE, stack: Stack, what: str, scales: Tensor) -> None:
    """scales: float32 [E, ...]. CheckpointError names the first expert whose are wrong."""
    is_wrong = ~(torch.isfinite(scales) & (scales >= 0)).flatten(1).all(1)
    if bool(is_wrong.any()):
        expert = int(is_wrong.int().argmax())
        names = ", ".join(name for name, _ in stack.shards)
        _check_scales(f"{layer.prefix}.{expert} ({names}): {what}", scales[expert])


def _check_scales(what: str, scales: Tensor) -> None:
    if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        raise CheckpointError(
            f"{what} must be finite and not negative; the checkpoint holds NaN, infinity or "
            f"negative ones: it is corrupt, fetch or quantise it again"
        )
