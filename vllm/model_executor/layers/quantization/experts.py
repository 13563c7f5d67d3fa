"""Experts of quantised checkpoints: each stores its weights as a linear layer does, stacked."""

import torch
from torch import Tensor, nn

from vllm.kernels.interface import MoETensors
from vllm.model_executor.layers.fused_moe.layer import FusedMoE, MoEMethod, Stack
from vllm.model_executor.layers.linear import LinearMethod, StoredWeight
from vllm.model_executor.weights import Slot, empty_parameter


class StackedMoEMethod(MoEMethod):
    """`method` knows the format: it makes, fills and reads the weights of one expert. Parameters of
    the layer are all experts' in one: [num_experts, ...], by the stack they belong to."""

    def __init__(self, method: LinearMethod):
        super().__init__(method.format, method.act_schemes)
        self.method = method

    def create_weights(self, layer: FusedMoE) -> None:
        for stack in layer.stacks:
            one = _stored_weight(layer, stack, 0)
            with torch.device("meta"):
                self.method.create_weights(one)
            for name, like in one.named_parameters():
                stacked = empty_parameter(layer.num_experts, *like.shape, dtype=like.dtype)
                layer.register_parameter(f"{stack.name}_{name}", stacked)

    def shard_slots(
        self, layer: FusedMoE, stack: Stack, shard: int, expert: int
    ) -> dict[str, Slot]:
        one = _stored_weight(layer, stack, expert)
        for name, stacked in _parameters(layer, stack).items():
            one.register_parameter(name, nn.Parameter(stacked[expert], requires_grad=False))
        return self.method.shard_slots(one, shard, stack.rows(shard))

    def tensors(self, layer: FusedMoE) -> MoETensors:
        linear = []
        for stack in layer.stacks:
            everything = _stored_weight(layer, stack, 0)
            for name, stacked in _parameters(layer, stack).items():
                everything.register_parameter(name, nn.Parameter(stacked, requires_grad=False))
            linear.append(self.method.tensors(everything))
        gate_up, down = linear
        inputs = [_parameters(layer, stack).get("input_scale") for stack in layer.stacks]
        return MoETensors(
            self.format,
            gate_up.weight,
            down.weight,
            gate_up.scales,
            down.scales,
            gate_up_input_scales=inputs[0],
            down_input_scales=inputs[1],
            row_offset=gate_up.row_offsets[0] if gate_up.row_offsets else 0,
            column_offset=down.column_offset,
            gate_up_global_scales=gate_up.global_scales,
            down_global_scales=down.global_scales,
            gate_up_zero_points=gate_up.zero_points,
            down_zero_points=down.zero_points,
        )


def _stored_weight(layer: FusedMoE, stack: Stack, expert: int) -> StoredWeight:
    """One expert's weight of a stack, without its parameters. expert: of those on this rank."""
    parent = f"{layer.prefix}.{layer.experts[expert]}"
    shards = [(f"{parent}.{name}", place) for name, place in stack.shards]
    names = ", ".join(name for name, _ in stack.shards)
    return StoredWeight(f"{parent} ({names})", shards, layer.cut_by)


def _parameters(layer: FusedMoE, stack: Stack) -> dict[str, Tensor]:
    """Those of one stack, by their names in a linear layer."""
    start = f"{stack.name}_"
    own = layer.named_parameters(recurse=False)
    return {name.removeprefix(start): p.data for name, p in own if name.startswith(start)}
