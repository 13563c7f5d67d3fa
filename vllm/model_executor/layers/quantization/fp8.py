"""Linear layers and experts of FP8 (E4M3) checkpoints."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.kernels.problem import ActScheme, WeightFormat
from vllm.kernels.tensors import LinearTensors, MoETensors, scale_shape
from vllm.model_executor.layers.fused_moe.layer import FusedMoE, MoEMethod, Stack
from vllm.model_executor.layers.linear import Linear, LinearMethod
from vllm.model_executor.layers.quantization.fp8_config import Fp8Config
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_block_cast_to_fp8
from vllm.model_executor.layers.sharding import Place
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
        shape = scale_grid(self.format, layer.places)
        layer.weight_scale = empty_parameter(*shape, dtype=torch.float32)
        if self.config.activation_scheme == "static":
            layer.input_scale = empty_parameter(len(layer.shard_rows), dtype=torch.float32)

    def shard_slots(self, layer: Linear, index: int, rows: slice) -> dict[str, Slot]:
        is_static = self.config.activation_scheme == "static"
        return _weight_slots(
            self.config,
            layer.places[index],
            layer.weight.data[rows],
            layer.weight_scale.data[scale_rows(self.format, layer.places, index)],
            layer.input_scale.data[index] if is_static else None,
        )

    def tensors(self, layer: Linear) -> LinearTensors:
        scales = layer.weight_scale.data
        _check_scales(f"{layer.prefix}: weight scales", scales)
        input_scale = None
        if self.config.activation_scheme == "static":
            _check_scales(f"{layer.prefix}: input scales", layer.input_scale.data)
            input_scale = layer.input_scale.data.max()
        row_offsets, column_offset = offsets_in_blocks(self.format, layer.places)
        return LinearTensors(
            self.format,
            layer.weight.data,
            layer.shard_rows,
            scales,
            input_scale=input_scale,
            row_offsets=row_offsets,
            column_offset=column_offset,
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
            shape = scale_grid(self.format, stack.places)
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
        own_rows = scale_rows(self.format, stack.places, shard)
        scale = layer.get_parameter(f"{stack.name}_scale").data[expert, own_rows]
        inputs = self._input_scales(layer, stack)
        input_scale = None if inputs is None else inputs[expert, shard]
        return _weight_slots(self.config, stack.places[shard], weight, scale, input_scale)

    def tensors(self, layer: FusedMoE) -> MoETensors:
        weights, scales, inputs = [], [], []
        for stack in layer.stacks:
            weights.append(layer.get_parameter(stack.name).data)
            scales.append(layer.get_parameter(f"{stack.name}_scale").data)
            inputs.append(self._input_scales(layer, stack))
            _check_expert_scales(layer, stack, "weight scales", scales[-1])
            if inputs[-1] is not None:
                _check_expert_scales(layer, stack, "input scales", inputs[-1])
        gate_up, down = layer.stacks
        row_offsets, _ = offsets_in_blocks(self.format, gate_up.places)
        _, column_offset = offsets_in_blocks(self.format, down.places)
        return MoETensors(
            self.format,
            *weights,
            *scales,
            *inputs,
            row_offset=row_offsets[0] if row_offsets else 0,
            column_offset=column_offset,
        )

    def _input_scales(self, layer: FusedMoE, stack: Stack) -> Tensor | None:
        return layer.get_parameter(f"{stack.name}_input_scale").data if self.is_static else None


def _weight_slots(
    config: Fp8Config, place: Place, weight: Tensor, scale: Tensor, input_scale: Tensor | None
) -> dict[str, Slot]:
    """Slots of the part of one checkpoint weight [N, K] that a rank holds, with its scales; the
    tensors are places to fill."""
    if not config.is_checkpoint_fp8_serialized:
        assert config.weight_block_size is not None
        return {"weight": _quantising_slot(place, weight, scale, config.weight_block_size)}
    slots = {"weight": place.slot((1, 1), (FP8,), copy_into(weight))}
    if config.weight_block_size:
        write = copy_into(scale)
        slots["weight_scale_inv"] = place.slot(config.weight_block_size, _SCALE_DTYPES, write)
    else:
        # One scalar, spread over the shard's rows where shards are merged (exact).
        slots["weight_scale"] = Slot((), _SCALE_DTYPES, lambda t: scale.fill_(t.item()))
    if input_scale is not None:
        slots["input_scale"] = Slot((), _SCALE_DTYPES, copy_into(input_scale))
    return slots


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


def scale_grid(weight_format: WeightFormat, places: Sequence[Place]) -> tuple[int, int]:
    """Shape of the scales of the shards at `places`: those of every block that they touch."""
    if weight_format.scale == "block":
        counts = [place.num_blocks(weight_format.block) for place in places]
        return sum(rows for rows, _ in counts), counts[0][1]
    return scale_shape(weight_format, tuple(place.shape[0] for place in places), 1)


def scale_rows(weight_format: WeightFormat, places: Sequence[Place], index: int) -> slice:
    """Which of these rows of scales belong to shard `index`."""
    start = scale_grid(weight_format, places[:index])[0] if index else 0
    return slice(start, start + scale_grid(weight_format, places[index : index + 1])[0])


def offsets_in_blocks(
    weight_format: WeightFormat, places: Sequence[Place]
) -> tuple[tuple[int, ...], int]:
    """As LinearTensors.row_offsets and column_offset."""
    if weight_format.scale != "block":
        return (), 0
    offsets = [place.offsets(weight_format.block) for place in places]
    rows = tuple(row for row, _ in offsets)
    return rows if any(rows) else (), offsets[0][1]


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
