"""FP8 (E4M3) checkpoints: 128x128 blocks as DeepSeek and Qwen store them, or one scale a tensor."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.kernels.spec import ActScheme, WeightFormat
from vllm.kernels.tensors import LinearTensors, scale_shape
from vllm.model_executor.layers.linear import Linear, LinearMethod
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_block_cast_to_fp8
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

FP8 = torch.float8_e4m3fn
DEFAULT_BLOCK = (128, 128)
_ACT_SCHEMES = ("dynamic", "static")


class Fp8Config(QuantizationConfig):
    """is_checkpoint_fp8_serialized: the checkpoint holds FP8; otherwise it is quantised at load.

    activation_scheme: "dynamic", or "static" (a scale per layer in the checkpoint, per-tensor
    weights only). weight_block_size: (rows, columns) that share a scale; None: one per tensor.
    ignored_layers: names or parts of names of layers that are not quantised.
    """

    name = "fp8"

    def __init__(
        self,
        is_checkpoint_fp8_serialized: bool = False,
        activation_scheme: str = "dynamic",
        ignored_layers: "Sequence[str] | None" = None,
        weight_block_size: "Sequence[int] | None" = None,
    ):
        if activation_scheme not in _ACT_SCHEMES:
            raise CheckpointError(
                f"FP8 activation_scheme {activation_scheme!r} is not supported: it takes "
                f"{', '.join(_ACT_SCHEMES)}"
            )
        self.is_checkpoint_fp8_serialized = is_checkpoint_fp8_serialized
        self.is_checkpoint_quantized = is_checkpoint_fp8_serialized
        self.activation_scheme = activation_scheme
        self.ignored_layers = tuple(ignored_layers or ())
        self.weight_block_size = _check_block(weight_block_size)
        if self.weight_block_size and activation_scheme == "static":
            raise CheckpointError(
                "FP8 with weight_block_size takes activation_scheme dynamic, not static"
            )

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "Fp8Config":
        fmt = config.get("fmt", "e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise CheckpointError(f"FP8 format {fmt!r} is not supported: it takes e4m3")
        ignored = config.get("modules_to_not_convert") or config.get("ignored_layers")
        return cls(
            is_checkpoint_fp8_serialized=True,
            activation_scheme=config.get("activation_scheme", "dynamic"),
            ignored_layers=ignored,
            weight_block_size=config.get("weight_block_size"),
        )

    @classmethod
    def at_load(cls) -> "Fp8Config":
        return cls(weight_block_size=DEFAULT_BLOCK)

    def linear_method(self, layer: Linear) -> "Fp8LinearMethod | None":
        ignored = {name: self.is_ignored(name) for name in layer.shard_names}
        if len(set(ignored.values())) > 1:
            raise CheckpointError(
                f"{layer.prefix} is one layer, but modules_to_not_convert names only a part of "
                f"it: {', '.join(name for name, yes in ignored.items() if yes)}"
            )
        return None if any(ignored.values()) else Fp8LinearMethod(self)

    def slot_name(self, name: str) -> str:
        """transformers' names for the scales of per-tensor checkpoints become ours."""
        if self.weight_block_size is None:
            name = name.replace(".weight_scale_inv", ".weight_scale")
            name = name.replace(".activation_scale", ".input_scale")
        return name

    def is_ignored(self, layer: str) -> bool:
        """Whether `layer` is listed itself, under a listed parent, or by its last name.

        The output projection never counts as a layer to quantise, as in transformers.
        """
        parts = layer.split(".")
        if parts[-1] == "lm_head":
            return True
        for entry in self.ignored_layers:
            wanted = entry.split(".")
            spans = range(len(parts) - len(wanted) + 1)
            if any(parts[i : i + len(wanted)] == wanted for i in spans):
                return True
        return False


def _check_block(block: "Sequence[int] | None") -> tuple[int, int] | None:
    if block is None:
        return None
    if len(block) != 2 or not all(isinstance(b, int) and 0 < b <= 1 << 16 for b in block):
        raise CheckpointError(f"weight_block_size {block!r} is not two positive sizes")
    return (block[0], block[1])


class Fp8LinearMethod(LinearMethod):
    """An FP8 weight with `weight_scale_inv` (blocks) or `weight_scale` (tensor): w = q * scale."""

    def __init__(self, config: Fp8Config):
        self.config = config

    def format(self, layer: Linear) -> WeightFormat:
        if self.config.weight_block_size:
            return WeightFormat("fp8", "block", self.config.weight_block_size)
        # Shards keep their own scales when merged: re-scaling to a common one would lose bits.
        return WeightFormat("fp8", "tensor" if len(layer.shard_rows) == 1 else "channel")

    def act_schemes(self) -> tuple[ActScheme, ...]:
        if self.config.weight_block_size:
            return (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)
        if self.config.activation_scheme == "static":
            return (ActScheme.STATIC_TENSOR, ActScheme.NONE)
        return (ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.NONE)

    def create_weights(self, layer: Linear) -> None:
        rows, columns = sum(layer.shard_rows), layer.input_size
        layer.weight = empty_parameter(rows, columns, dtype=FP8)
        shape = scale_shape(self.format(layer), layer.shard_rows, columns)
        layer.weight_scale = empty_parameter(*shape, dtype=torch.float32)
        if self.config.activation_scheme == "static":
            layer.input_scale = empty_parameter(len(layer.shard_rows), dtype=torch.float32)

    def shard_slots(self, layer: Linear, index: int, rows: slice) -> dict[str, Slot]:
        shape = (layer.shard_rows[index], layer.input_size)
        weight = layer.weight.data[rows]
        scale = layer.weight_scale.data[self._scale_rows(layer, index)]
        if not self.config.is_checkpoint_fp8_serialized:

            def quantise(tensor: Tensor) -> None:
                quantised, scales = per_block_cast_to_fp8(tensor, self.config.weight_block_size)
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
        counts = [
            scale_shape(self.format(layer), (n,), layer.input_size)[0] for n in layer.shard_rows
        ]
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
            self.format(layer), layer.weight.data, layer.shard_rows, scales, input_scale=input_scale
        )


_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check_scales(what: str, scales: Tensor) -> None:
    if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        raise CheckpointError(
            f"{what} must be finite and not negative; the checkpoint holds NaN, infinity or "
            f"negative ones: it is corrupt, fetch or quantise it again"
        )
