"""The numbers of one step, filled in by the host and read by the device."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16


class InputBuffers:
    """Arrays that live as long as the engine, side by side, so that one copy moves all of them.

    host: numpy views to fill in. device: the same as tensors; on the CPU they are the same memory,
    on a GPU they are valid in stream order after `upload`. The host part is pinned and read by an
    asynchronous copy: it may be filled in again once anything later in the stream was waited for.
    """

    def __init__(self, sizes: Mapping[str, tuple[type, tuple[int, ...]]], device: torch.device):
        """sizes: dtype and shape by name."""
        offsets, total = {}, 0
        for name, (dtype, shape) in sizes.items():
            offsets[name] = total
            num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            total += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        is_cpu = device.type == "cpu"
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=not is_cpu, device="cpu")
        self._device = self._host if is_cpu else torch.zeros_like(self._host, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in sizes.items():
            num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            place = slice(offsets[name], offsets[name] + num_bytes)
            array = self._host[place].numpy().view(dtype).reshape(shape)
            self.host[name] = array
            torch_dtype = torch.from_numpy(array).dtype
            self.device[name] = self._device[place].view(torch_dtype).view(shape)

    def upload(self) -> None:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
