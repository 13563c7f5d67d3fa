"""A folder of safetensors files: its tensors by name, checked before anything is read."""

import ctypes
import json
import mmap
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.utils.math_utils import round_up
from vllm.utils.safetensors_files import TensorShape, float_weight_dtype

_LIBC = ctypes.CDLL(None)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FILE_NAME = re.compile(r"[^/\0]{1,200}\.safetensors")
INDEX_NAME = "model.safetensors.index.json"


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


class Checkpoint:
    """`infos`: every tensor of the folder, from the files' headers alone.

    Experts that are stored as one tensor for a whole layer appear one by one.
    """

    def __init__(self, path: Path):
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        found = [one for file in _weight_files(path) for one in _read_header(file)]
        names = {name for name, _ in found}
        for stored in found:
            for name, info in _unstacked(*stored, names):
                file = info.file
                if name in self.infos:
                    raise CheckpointError(
                        f"tensor {name} is in both {self.infos[name].file.name} and {file.name}"
                    )
                self.infos[name] = info

    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in {info.file for info in self.infos.values()})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, file by file, mapped and read when it is used.

        Its pages are given back when the next one is asked for: keep no reference to it.
        """
        by_file: dict[Path, dict[str, list[str]]] = {}
        for name, info in self.infos.items():
            by_file.setdefault(info.file, {}).setdefault(info.stack or name, []).append(name)
        for file, stored in by_file.items():
            try:
                with safe_open(file, framework="pt") as opened:
                    for stored_name, names in stored.items():
                        tensor = opened.get_tensor(stored_name)
                        yield from ((name, self.infos[name].part_of(tensor)) for name in names)
                        _give_back(tensor)
            except (SafetensorError, OSError) as error:
                raise _unreadable(file, error) from error

    def float_weight_dtype(self) -> torch.dtype | None:
        """Of weights that are not quantised."""
        found = float_weight_dtype(
            (name, TensorShape(info.dtype_name, info.shape)) for name, info in self.infos.items()
        )
        return getattr(torch, found) if found else None


def _give_back(tensor: Tensor) -> None:
    """Drops the file's pages under `tensor` from this process; a second read maps them again."""
    if sys.platform == "linux":
        start = round_up(tensor.data_ptr(), mmap.PAGESIZE)
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _weight_files(path: Path) -> list[Path]:
    index = path / INDEX_NAME
    if index.exists():
        files = _indexed_files(index)
    else:
        # "consolidated" files hold the same weights again under Mistral's own names.
        files = sorted(p for p in path.glob("*.safetensors") if "consolidated" not in p.name)
    if not files:
        pickles = [p.name for pattern in _PICKLES for p in path.glob(pattern)]
        if pickles:
            raise CheckpointError(
                f"{path} holds pickled weights ({', '.join(sorted(pickles)[:3])}), which can run "
                f"code when loaded and are refused; convert them to safetensors with transformers "
                f"(from_pretrained, then save_pretrained) in an environment you trust"
            )
        raise CheckpointError(f"{path} holds no *.safetensors files: there are no weights to load")
    missing = [f.name for f in files if not f.exists()]
    if missing and not index.exists():
        raise CheckpointError(
            f"{path}: {', '.join(missing[:5])} is a link to a file that is not there; fetch the "
            f"checkpoint again"
        )
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(files)} weight files that {INDEX_NAME} lists: "
            f"{', '.join(missing[:5])}; fetch the checkpoint again"
        )
    for file in files:
        if not file.is_file():  # to open a pipe would wait for a writer
            raise CheckpointError(f"{file} is no regular file; fetch the checkpoint again")
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a readable index: {error!r}") from error
    bad = [name for name in names if not isinstance(name, str) or not _FILE_NAME.fullmatch(name)]
    if bad:
        raise CheckpointError(
            f"{index} points outside its folder, or to what is no *.safetensors file: {bad[0]!r}"
        )
    if not names:
        raise CheckpointError(f"{index} lists no weights; fetch the checkpoint again")
    return [index.parent / name for name in sorted(names)]


def _read_header(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is not iterable)
                part = opened.get_slice(name)
                dtype = part.get_dtype()
                yield name, TensorInfo(file, tuple(part.get_shape()), _DTYPES.get(dtype), dtype)
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


# Last part of the name of all experts' weights in one tensor -> of the weights of each.
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# What follows that name in MXFP4 stacks -> the last part of the name of one expert's tensor, and
# the dimensions of a stack.
_MXFP4_STACKS = {
    "blocks": ("weight_blocks", 4),
    "scales": ("weight_scales", 3),
    "bias": ("bias", 2),
}
_MXFP4_BYTES = 16  # of a group
# What follows it in FP8 stacks -> the last part of the name of one expert's tensor.
_FP8_STACKS = {"_scale_inv": "weight_scale_inv", "_activation_scale": "activation_scale"}


def _unstacked(
    name: str, info: TensorInfo, names: Collection[str]
) -> Iterator[tuple[str, TensorInfo]]:
    """`mlp.experts.gate_up_proj` [E, 2 I, H] as `mlp.experts.<e>.gate_proj.weight` [I, H], and so
    on; any other tensor as it is. So transformers 5 holds experts, and writes some models'.

    gpt-oss has `gate_up_proj_blocks` [E, 2 I, H / 32, 16] and `gate_up_proj_scales`
    [E, 2 I, H / 32], in which gate and up rows alternate, as `<e>.gate_proj.weight_blocks`
    [I, H / 2] and `<e>.gate_proj.weight_scales`, and so `gate_up_proj_bias` [E, 2 I]. Its stacks of
    floats, told by the bias among all `names`, have these as columns: `gate_up_proj` [E, H, 2 I],
    `down_proj` [E, I, H]. Stacks of FP8 have scales beside them, as `_scales_of_experts` says."""
    parent, _, last = name.rpartition(".")
    for suffix, ours in _FP8_STACKS.items():
        scaled = _STACKS.get(last.removesuffix(suffix))
        if last.endswith(suffix) and scaled and parent.endswith(".experts"):
            yield from _scales_of_experts(name, info, scaled, ours)
            return
    stack, _, kind = last.rpartition("_")
    suffix, num_dims = _MXFP4_STACKS.get(kind, ("weight", 3))
    is_mxfp4 = kind in _MXFP4_STACKS
    parts = _STACKS.get(stack if is_mxfp4 else last)
    if parts is None or len(info.shape) != num_dims or not parent.endswith(".experts"):
        yield name, info
        return
    is_turned = not is_mxfp4 and f"{name}_bias" in names
    axis = 2 if is_turned else 1
    if info.shape[axis] % len(parts):
        raise CheckpointError(
            f"{info.file.name}: {name} has shape {list(info.shape)}, but dimension {axis} holds "
            f"{' and '.join(parts)} of one size: it must be even; fetch the "
            f"checkpoint again"
        )
    if is_turned:
        yield from _turned(name, info)
        return
    num_experts, num_rows, *columns = info.shape
    rows = num_rows // len(parts)
    if columns[1:] == [_MXFP4_BYTES]:
        columns = [columns[0] * _MXFP4_BYTES]
    for expert in range(num_experts):
        for i, part in enumerate(parts):
            own = slice(i, None, len(parts)) if is_mxfp4 else slice(i * rows, (i + 1) * rows)
            piece = replace(info, shape=(rows, *columns), stack=name, index=(expert, own))
            yield f"{parent}.{expert}.{part}.{suffix}", piece


def _scales_of_experts(
    name: str, info: TensorInfo, parts: Collection[str], ours: str
) -> Iterator[tuple[str, TensorInfo]]:
    """`gate_up_proj_scale_inv` [E, 1, 1] or [E], one scale for both parts of an expert, or
    [E, 2 R, C], one for each block of 128x128, as `<e>.gate_proj.weight_scale_inv` [] or [R, C],
    and so on; so `gate_up_proj_activation_scale`."""
    parent = name.rpartition(".")[0]
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
            yield (
                f"{parent}.{expert}.{part}.{ours}",
                replace(info, shape=own, stack=name, index=index),
            )


def _turned(name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """The same of a stack whose experts are transposed, in which gate and up columns alternate."""
    parent, _, last = name.rpartition(".")
    num_experts, num_columns, num_rows = info.shape
    parts = _STACKS[last]
    shape = num_rows // len(parts), num_columns
    for expert in range(num_experts):
        for i, part in enumerate(parts):
            index = expert, slice(None), slice(i, None, len(parts))
            piece = replace(info, shape=shape, stack=name, index=index, is_transposed=True)
            yield f"{parent}.{expert}.{part}.weight", piece


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    size = file.stat().st_size if file.exists() else 0
    return CheckpointError(
        f"{file} ({size} bytes) is truncated or corrupt: {error}; fetch the checkpoint again"
    )
