"""Experts that a checkpoint stores as one tensor for a whole layer, as tensors of each expert."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vllm.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """stack, index: the stored tensor that this one is a part of, and where in it. is_transposed:
    there the other way round."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    dtype_name: str
    stack: str = ""
    index: tuple[int | slice, ...] = ()
    is_transposed: bool = False

    def part_of(self, stored: Tensor) -> Tensor:
        part = stored[self.index]
        return part.T if self.is_transposed else part


# Last part of the name of all experts' weights in one tensor -> of the weights of each.
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# What follows that name -> the last part of the name of one expert's tensor, and the dimensions of
# a stack. ModelOpt's scales are single numbers, but for those of blocks.
_WEIGHTS = {"": ("weight", 3), "_weight_scale": ("weight_scale", 3)}
_MXFP4 = {
    "_blocks": ("weight_blocks", 4),
    "_scales": ("weight_scales", 3),
    "_bias": ("bias", 2),
}
_MXFP4_BYTES = 16  # of a group
# Of FP8, as transformers names them.
_FP8_SCALES = {"_scale_inv": "weight_scale_inv", "_activation_scale": "activation_scale"}
_SCALARS = {
    "_weight_scale": "weight_scale",
    "_weight_scale_2": "weight_scale_2",
    "_input_scale": "input_scale",
}


def unstacked(
    name: str, info: TensorInfo, stored: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, TensorInfo]]:
    """`mlp.experts.gate_up_proj` [E, 2 I, H] as `mlp.experts.<e>.gate_proj.weight` [I, H], and so
    on; any other tensor as it is. So transformers 5 holds experts, and writes some models'.
    stored: all tensors of the checkpoint.

    Llama 4 and Qwen3-VL transpose them: `gate_up_proj` [E, H, 2 I], `down_proj` [E, I, H], which
    the sizes of the two together tell. So does ModelOpt with Llama 4's experts in FP8 and NVFP4,
    whose scales of blocks, `gate_up_proj_weight_scale` [E, H / 16, 2 I], lie like the codes. Other
    scales (`_weight_scale`, `_weight_scale_2`, `_input_scale`) are one number for all experts, or
    one for each. https://github.com/NVIDIA/TensorRT-Model-Optimizer,
    modelopt/torch/export/unified_export_hf.py

    gpt-oss has `gate_up_proj_blocks` [E, 2 I, H / 32, 16] and `gate_up_proj_scales`
    [E, 2 I, H / 32], in which gate and up rows alternate, as `<e>.gate_proj.weight_blocks`
    [I, H / 2] and `<e>.gate_proj.weight_scales`, and so `gate_up_proj_bias` [E, 2 I]. Its stacks of
    floats, told by the bias, are transposed, and gate and up alternate in them too. Stacks of FP8
    have scales beside them, as `_fp8_scales` says."""
    parent, _, last = name.rpartition(".")
    stack = next((one for one in _STACKS if last.startswith(one)), "")
    kind, num_dims = last.removeprefix(stack), len(info.shape)
    if not stack or not parent.endswith(".experts"):
        yield name, info
    elif kind in _FP8_SCALES and num_dims:
        yield from _fp8_scales(name, info, stack, _FP8_SCALES[kind])
    elif (_WEIGHTS | _MXFP4).get(kind, ("", -1))[1] == num_dims:
        yield from _cut(name, info, stored, stack, kind)
    elif kind in _SCALARS and num_dims <= 1:
        yield from _scalars(name, info, stored, stack, kind)
    else:
        yield name, info


def _cut(
    name: str, info: TensorInfo, stored: Mapping[str, TensorInfo], stack: str, kind: str
) -> Iterator[tuple[str, TensorInfo]]:
    parent, parts = name.rpartition(".")[0], _STACKS[stack]
    alternates = kind in _MXFP4 or f"{parent}.{stack}_bias" in stored
    is_turned = kind in _WEIGHTS and (alternates or _is_turned(parent, stored))
    axis = 2 if is_turned else 1
    if info.shape[axis] % len(parts):
        raise CheckpointError(
            f"{info.file.name}: {name} has shape {list(info.shape)}, but dimension {axis} holds "
            f"{' and '.join(parts)} of one size: it must be even; fetch the "
            f"checkpoint again"
        )
    rows = info.shape[axis] // len(parts)
    columns = info.shape[1:2] if is_turned else info.shape[2:]
    if columns[1:] == (_MXFP4_BYTES,):
        columns = (columns[0] * _MXFP4_BYTES,)
    suffix = (_WEIGHTS | _MXFP4)[kind][0]
    for expert in range(info.shape[0]):
        for i, part in enumerate(parts):
            own = slice(i, None, len(parts)) if alternates else slice(i * rows, (i + 1) * rows)
            index = (expert, slice(None), own) if is_turned else (expert, own)
            shape = (rows, *columns)
            piece = replace(info, shape=shape, stack=name, index=index, is_transposed=is_turned)
            yield f"{parent}.{expert}.{part}.{suffix}", piece


def _is_turned(parent: str, stored: Mapping[str, TensorInfo]) -> bool:
    """Whether the experts of a layer are stored transposed."""
    both = [stored.get(f"{parent}.{stack}") for stack in _STACKS]
    sizes = [(*info.shape[1:], _packed(info)) for info in both if info and len(info.shape) == 3]
    if len(sizes) < len(_STACKS):
        return False
    (hidden, two_inner, packed), (inner, columns, _) = sizes
    return (hidden * packed, two_inner) == (columns, 2 * inner * packed)


def _packed(info: TensorInfo) -> int:
    """Numbers of an element: codes of 4 bits lie two in a byte."""
    return 2 if info.dtype == torch.uint8 else 1


def _scalars(
    name: str, info: TensorInfo, stored: Mapping[str, TensorInfo], stack: str, kind: str
) -> Iterator[tuple[str, TensorInfo]]:
    """One number for all experts of the stack, or one for each."""
    parent = name.rpartition(".")[0]
    codes = stored.get(f"{parent}.{stack}")
    if codes is None:
        yield name, info
        return
    count = codes.shape[0]
    if info.shape not in ((), (1,), (count,)):
        raise CheckpointError(
            f"{info.file.name}: {name} has shape {list(info.shape)}: it takes one number, or one "
            f"for each of {count} experts; fetch the checkpoint again"
        )
    is_one = info.shape != (count,)
    for expert in range(count):
        index = () if is_one else (expert,)
        piece = replace(info, shape=info.shape if is_one else (), stack=name, index=index)
        for part in _STACKS[stack]:
            yield f"{parent}.{expert}.{part}.{_SCALARS[kind]}", piece


def _fp8_scales(
    name: str, info: TensorInfo, stack: str, ours: str
) -> Iterator[tuple[str, TensorInfo]]:
    """`gate_up_proj_scale_inv` [E, 1, 1] or [E], one scale for both parts of an expert, or
    [E, 2 R, C], one for each block of 128x128, as `<e>.gate_proj.weight_scale_inv` [] or [R, C],
    and so on; so `gate_up_proj_activation_scale`."""
    parent, parts = name.rpartition(".")[0], _STACKS[stack]
    num_experts, *shape = info.shape
    is_one = all(size == 1 for size in shape)
    if not is_one and (len(shape) != 2 or shape[0] % len(parts)):
        raise CheckpointError(
            f"{info.file.name}: {name} has shape {list(info.shape)}: it takes one scale for each "
            f"expert, or one for each block of {' and '.join(parts)}, which are of one size"
        )
    for expert in range(num_experts):
        for i, part in enumerate(parts):
            index: tuple[int | slice, ...] = (expert, *(0 for _ in shape))
            own: tuple[int, ...] = ()
            if not is_one:
                rows = shape[0] // len(parts)
                index, own = (expert, slice(i * rows, (i + 1) * rows)), (rows, shape[1])
            piece = replace(info, shape=own, stack=name, index=index)
            yield f"{parent}.{expert}.{part}.{ours}", piece
