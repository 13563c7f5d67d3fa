"""A folder of safetensors files: its tensors by name, checked before anything is read."""

import ctypes
import json
import mmap
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.model_executor.model_loader.expert_stacks import TensorInfo, unstacked
from vllm.utils.hub import check_regular
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


class Checkpoint:
    """`infos`: every tensor of the folder, from the files' headers alone.

    Experts that are stored as one tensor for a whole layer appear one by one.
    """

    def __init__(self, path: Path):
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        found = [one for file in _weight_files(path) for one in _read_header(file)]
        by_name = dict(found)
        for stored in found:
            for name, info in unstacked(*stored, by_name):
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
        check_regular(file, CheckpointError)
    return files


def _indexed_files(index: Path) -> list[Path]:
    check_regular(index, CheckpointError)
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


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    size = file.stat().st_size if file.exists() else 0
    return CheckpointError(
        f"{file} ({size} bytes) is truncated or corrupt: {error}; fetch the checkpoint again"
    )
