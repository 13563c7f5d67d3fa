"""Persistent input buffers of a step, written by the host and read by the device."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from vllm.utils.math_utils import round_up

_ALIGNMENT = 16


class InputBuffers:
    """Persistent arrays in one allocation, moved by one copy.

    host: numpy views to fill in. device: the same as tensors; on the CPU the same memory, on a GPU
    valid in stream order after `upload`. The copy from pinned memory is asynchronous, so call
    `wait_until_read` before writing again: a step that samples nothing does not synchronise.
    """

    def __init__(self, sizes: Mapping[str, tuple[type, tuple[int, ...]]], device: torch.device):
        """sizes: dtype and shape by name."""
        places, total = {}, 0
        for name, (dtype, shape) in sizes.items():
            end = total + int(np.prod(shape)) * np.dtype(dtype).itemsize
            places[name] = slice(total, end)
            total = round_up(end, _ALIGNMENT)
        is_cpu = device.type == "cpu"
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=not is_cpu, device="cpu")
        self._device = self._host if is_cpu else torch.zeros_like(self._host, device=device)
        self._copied = None if is_cpu else torch.cuda.Event()
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in sizes.items():
            array: np.ndarray = self._host[places[name]].numpy().view(dtype).reshape(shape)
            self.host[name] = array
            torch_dtype = torch.from_numpy(array).dtype
            self.device[name] = self._device[places[name]].view(torch_dtype).view(shape)

    def wait_until_read(self) -> None:
        """Returns when the last upload has been copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self) -> None:
        if self._copied is not None:
            self._device.copy_(self._host, non_blocking=True)
            self._copied.record()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of `array`, valid in stream order, without host synchronisation: torch synchronises
    the stream before it copies from memory that is not pinned."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
