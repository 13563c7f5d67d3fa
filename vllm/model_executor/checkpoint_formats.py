"""What `vllm quantize` writes: the config of each format, and what a linear weight becomes.

Blocks of FP8 are what transformers calls `fp8`; the others are compressed-tensors checkpoints. None
needs calibration: activations are scaled when they are there (8 bits) or not quantised (4 bits).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.formats import fp8_block, fp8_tensor, int4, int8, mxfp4, mxfp8, nvfp4
from vllm.formats.description import FormatDescription
from vllm.formats.registry import quantizable
from vllm.formats.weight_format import WeightFormat
from vllm.ops import int8 as int8_ops
from vllm.ops import nvfp4 as nvfp4_ops
from vllm.ops.mxfp4 import mxfp4_quantize
from vllm.ops.packed_weights import int4_quantize, pack_int32
from vllm.utils.fp8 import per_block_cast_to_fp8, ue8m0_encode

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


def _fp8_block(weight_format: WeightFormat) -> Format:
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(weight_format.block),
        "modules_to_not_convert": ["lm_head"],
    }

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        quantised, scales = per_block_cast_to_fp8(weight, weight_format.block)
        return {name: quantised, name + "_scale_inv": scales}

    return Format(config, quantise)


def _fp8_tensor(weight_format: WeightFormat) -> Format:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        quantised, scales = per_block_cast_to_fp8(weight, weight.shape)
        return {name: quantised, name + "_scale": scales.flatten()}

    return Format(_compressed_tensors("float-quantized", weights, inputs), quantise)


def _mxfp8(weight_format: WeightFormat) -> Format:
    group = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": mxfp8.GROUP}
    group["scale_dtype"] = "torch.uint8"

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scales = per_block_cast_to_fp8(weight, (1, mxfp8.GROUP), use_ue8m0=True)
        return {name: codes, name + "_scale": ue8m0_encode(scales)}

    weights, inputs = group | {"dynamic": False}, group | {"dynamic": True}
    return Format(_compressed_tensors("mxfp8-quantized", weights, inputs), quantise)


def _mxfp4(weight_format: WeightFormat) -> Format:
    """Weight-only."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": mxfp4.GROUP}
    weights |= {"dynamic": False, "scale_dtype": "torch.uint8"}

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        packed, scales = mxfp4_quantize(weight)
        return {name + "_packed": packed, name + "_scale": scales}

    return Format(_compressed_tensors("mxfp4-pack-quantized", weights, None), quantise)


def _nvfp4(weight_format: WeightFormat) -> Format:
    """Weight-only. Each weight has the global scale that fits it."""
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
    weights |= {"group_size": nvfp4.GROUP, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}

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


def _int4(weight_format: WeightFormat) -> Format:
    """Symmetric."""
    group = weight_format.block[1]
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


def _int8(weight_format: WeightFormat) -> Format:
    """Symmetric, and activations per token (W8A8)."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scales = int8_ops.quantise_rows(weight)
        return {name: codes, name + "_scale": scales}

    return Format(_compressed_tensors("int-quantized", weights, inputs), quantise)


# ---------------------------------------------------------------- output projection

HEAD_GROUP = 32
"""Columns that share a scale in an output projection of int8."""


def with_int8_head(chosen: Format) -> Format:
    """The same format, in a config that says that the output projection has int8."""
    if chosen.config["quant_method"] == "fp8":
        chosen = _in_groups(chosen)
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": HEAD_GROUP}
    head = _compressed_tensors("int-quantized", weights | {"dynamic": False}, None)
    groups = {
        "group_0": chosen.config["config_groups"]["group_0"] | {"format": chosen.config["format"]},
        "group_1": head["config_groups"]["group_0"]
        | {"format": head["format"], "targets": ["lm_head"]},
    }
    config = {"format": "mixed-precision", "config_groups": groups, "ignore": []}
    return replace(chosen, config=chosen.config | config)


def _in_groups(fp8: Format) -> Format:
    """FP8 blocks in the layout of compressed-tensors, which can name other formats beside them."""
    block = fp8.config["weight_block_size"]
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": block[1]}

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        found = fp8.quantise(name, weight).items()
        return {given.replace("_scale_inv", "_scale"): tensor for given, tensor in found}

    config = _compressed_tensors(
        "float-quantized", weights | {"dynamic": False}, inputs | {"dynamic": True}
    )
    return Format(config, quantise)


def quantise_head(weight: Tensor) -> dict[str, Tensor]:
    """weight [N, K] as int8 in groups. Scales are the largest magnitude of a group / 127, in
    float16 where its range has all of them: a matrix in GGUF's Q8_0 comes out as it is stored."""
    if weight.shape[1] % HEAD_GROUP:
        raise ValueError(f"{weight.shape[1]} columns are not whole groups of {HEAD_GROUP}")
    groups = weight.float().reshape(-1, HEAD_GROUP)
    amax = groups.abs().amax(1, keepdim=True)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("the weight holds NaN or infinity and cannot be quantised")
    scales = (amax / int8_ops.INT8_MAX).masked_fill(amax == 0, 1)
    half = torch.finfo(torch.float16)
    if bool(((scales >= half.tiny) & (scales <= half.max)).all()):
        scales = scales.half()
    codes, _ = int8_ops.quantise(groups, scales.float())
    return {
        "lm_head.weight": codes.view(weight.shape),
        "lm_head.weight_scale": scales.view(len(weight), -1),
    }


_WRITERS: dict[str, Callable[[WeightFormat], Format]] = {
    fp8_block.FORMAT.kind: _fp8_block,
    fp8_tensor.FORMAT.kind: _fp8_tensor,
    mxfp8.FORMAT.kind: _mxfp8,
    mxfp4.FORMAT.kind: _mxfp4,
    nvfp4.FORMAT.kind: _nvfp4,
    int4.FORMAT.kind: _int4,
    int8.CHANNEL.kind: _int8,
}


def _make(known: FormatDescription, num_columns: NumColumns) -> Format:
    return _WRITERS[known.kind](_common_format(known, num_columns))


FORMATS: dict[str, Callable[[NumColumns], Format]] = {
    name: partial(_make, known) for name, known in quantizable().items() if known.kind in _WRITERS
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


def _common_format(known: FormatDescription, num_columns: NumColumns) -> WeightFormat:
    """With the first size that all weights can have; CheckpointError that names one for none."""
    assert known.quantize is not None
    candidates = [WeightFormat.of(known.kind, size) for size in known.quantize.sizes]

    def holds(weight_format: WeightFormat, columns: int) -> bool:
        return columns % weight_format.columns_per_scale(columns) == 0

    for candidate in candidates:
        if not known.quantize.is_whole or all(holds(candidate, c) for c in num_columns.values()):
            return candidate
    name, columns = next((n, c) for n, c in num_columns.items() if not holds(candidates[-1], c))
    sizes = " or ".join(str(candidate.columns_per_scale(columns)) for candidate in candidates)
    raise CheckpointError(
        f"{name} has {columns} columns, which are not whole groups of {sizes}: this format cannot "
        f"hold it; quantise as {next(iter(FORMATS))}"
    )
