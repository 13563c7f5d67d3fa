"""What `vllm quantize` can write: the config of each format, and what a linear weight becomes.

`fp8-block` is what transformers calls `fp8`; the others are compressed-tensors checkpoints. None
needs calibration: activations are scaled when they are there (FP8) or not quantised (4 bits).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.model_executor.layers.quantization.awq import GROUP_SIZES
from vllm.model_executor.layers.quantization.fp8_config import DEFAULT_BLOCK
from vllm.ops import nvfp4 as nvfp4_ops
from vllm.ops.packed_weights import int4_quantize, pack_int32
from vllm.utils.fp8 import per_block_cast_to_fp8

NumColumns = Mapping[str, int]
"""Of the weights to quantise, by name."""


@dataclass(frozen=True, slots=True)
class Format:
    """config: quantization_config of config.json. quantise: (name, weight [N, K]) -> tensors; a
    ValueError for values that cannot be."""

    config: dict[str, Any]
    quantise: Callable[[str, Tensor], dict[str, Tensor]]

    def with_ignored(self, names: Sequence[str]) -> dict[str, Any]:
        """The config, with `names` among the layers that are not quantised."""
        field = "ignore" if "ignore" in self.config else "modules_to_not_convert"
        return self.config | {field: list(dict.fromkeys([*self.config[field], *names]))}


def fp8_block(num_columns: NumColumns) -> Format:
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(DEFAULT_BLOCK),
        "modules_to_not_convert": ["lm_head"],
    }

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        quantised, scales = per_block_cast_to_fp8(weight, DEFAULT_BLOCK)
        return {name: quantised, name + "_scale_inv": scales}

    return Format(config, quantise)


def fp8_tensor(num_columns: NumColumns) -> Format:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        quantised, scales = per_block_cast_to_fp8(weight, weight.shape)
        return {name: quantised, name + "_scale": scales.flatten()}

    return Format(_compressed_tensors("float-quantized", weights, inputs), quantise)


def nvfp4(num_columns: NumColumns) -> Format:
    """Weight-only. Each weight has the global scale that fits it."""
    group = _common_group(num_columns, (nvfp4_ops.GROUP,))
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": group}
    weights |= {"dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        amax = weight.float().abs().max()
        if not bool(torch.isfinite(amax)):
            raise ValueError("the weight holds NaN or infinity and cannot be quantised")
        # A weight of zeros, or of values so small that a scale would overflow, takes the largest.
        scale = nvfp4_ops.nvfp4_global_scale(amax).clamp(max=torch.finfo(torch.float32).max)
        packed, scales = nvfp4_ops.nvfp4_quantize(weight, scale.view(1))
        return {
            name + "_packed": packed,
            name + "_scale": scales,
            name + "_global_scale": scale.view(1),
        }

    return Format(_compressed_tensors("nvfp4-pack-quantized", weights, None), quantise)


def w4a16(num_columns: NumColumns) -> Format:
    """Symmetric int4 in the largest groups that every weight is made of."""
    group = _common_group(num_columns, GROUP_SIZES[::-1])
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scales = int4_quantize(weight, group)
        return {
            name + "_packed": pack_int32(codes),
            name + "_scale": scales,
            name + "_shape": torch.tensor(weight.shape),
        }

    return Format(
        _compressed_tensors("pack-quantized", weights | {"dynamic": False}, None), quantise
    )


FORMATS: dict[str, Callable[[NumColumns], Format]] = {
    "fp8-block": fp8_block,
    "fp8-tensor": fp8_tensor,
    "nvfp4": nvfp4,
    "w4a16": w4a16,
}


def _compressed_tensors(
    stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, **weights},
        "input_activations": inputs and {"symmetric": True, **inputs},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _common_group(num_columns: NumColumns, sizes: tuple[int, ...]) -> int:
    """The first of `sizes` that divides all; CheckpointError that names a weight for none."""
    for size in sizes:
        if all(columns % size == 0 for columns in num_columns.values()):
            return size
    name, columns = next((n, c) for n, c in num_columns.items() if c % sizes[-1])
    raise CheckpointError(
        f"{name} has {columns} columns, which are not whole groups of "
        f"{' or '.join(map(str, sizes))}: this format cannot hold it; quantise as fp8-block"
    )
