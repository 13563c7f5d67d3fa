"""Tensors that say they are on a GPU, for checks that come before anything touches memory."""

import ctypes
from typing import Any

import torch
import tvm_ffi
from torch import Tensor

_CUDA, _MAX_DIMS = 2, 8  # the first is of DLPack
_CODES = {
    torch.int8: 0,
    torch.int32: 0,
    torch.int64: 0,
    torch.uint8: 1,
    torch.float16: 2,
    torch.float32: 2,
    torch.float64: 2,
    torch.bfloat16: 4,
    torch.float8_e4m3fn: 10,
}


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_Sizes = ctypes.c_int64 * _MAX_DIMS
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_kept: list[Any] = []  # nobody says when the other side is done with it


class _Pretended:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **options: object) -> Any:
        tensor = self.tensor
        shape, strides = _Sizes(*tensor.shape), _Sizes(*tensor.stride())
        managed = _Managed(
            tensor.data_ptr(), _CUDA, 0, tensor.dim(), _CODES[tensor.dtype],
            8 * tensor.element_size(), 1, ctypes.addressof(shape), ctypes.addressof(strides),
        )  # fmt: skip
        _kept.append((managed, shape, strides, tensor))
        return _capsule(ctypes.addressof(managed), b"dltensor", None)


def pretended(tensor: Tensor) -> Any:
    """A CPU tensor as tvm_ffi's, on GPU 0."""
    return tvm_ffi.from_dlpack(_Pretended(tensor))
