"""Custom all-reduce for small tensors on one node: one-shot writes over NVLink, lower latency than
NCCL.

NCCL's latency for 8 KB is many times the transfer time, and a model pays it twice per layer and
token. torch's symmetric memory maps a buffer of each GPU into the processes of all others; the
native kernel `peer_sum` writes there.
"""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.groups import Group, PeerError
from vllm.logger import get_logger
from vllm.platforms import native

logger = get_logger(__name__)

_MAX_RANKS = 8
# Each row goes to every rank with a flag per word: with more rows NCCL is faster.
_MAX_ROWS_SENT = 256
_MAX_DIM, _DIM_MULTIPLE = 16384, 8
_MAX_QUANTISED_DIM, _QUANTISED_DIM_MULTIPLE = 8192, 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CustomAllReduce:
    """All-reduce of rows [n <= max_rows, dim]; the result is bit-identical on all ranks.

    Every call is one launch on torch's current stream and can be captured in a CUDA graph. All
    ranks must make the same calls in the same order on one stream. A rank whose peers are missing
    waits on the GPU for ever, so the host must wait with a timeout.
    """

    def __init__(self, rank: int, size: int, dim: int, dtype: torch.dtype):
        self.max_rows = _MAX_ROWS_SENT // (size - 1)
        self._rank, self._size, self._dim, self._dtype = rank, size, dim, dtype

    def allocate(self) -> None:
        """RuntimeError where this rank cannot."""
        from torch.distributed import _symmetric_memory as symmetric

        self._kernels: Any = native.load()
        num_bytes = self._kernels.cuda_peer_inbox_bytes(
            self._size, self.max_rows, self._dim, self._dtype.itemsize
        )
        device = torch.device("cuda", torch.cuda.current_device())
        self._inbox = symmetric.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        self._rounds = torch.zeros(self.max_rows, dtype=torch.int32, device=device)
        torch.cuda.synchronize()  # peers must find zeros

    def connect(self, handle: dist.ProcessGroup) -> None:
        """Waits for all ranks of `handle`. RuntimeError where memory of one GPU cannot be mapped
        into another's process."""
        from torch.distributed import _symmetric_memory as symmetric

        self._mapped = symmetric.rendezvous(self._inbox, handle.group_name)
        pointers = list(self._mapped.buffer_ptrs)
        self._inboxes = torch.tensor(pointers, dtype=torch.int64, device="cpu")

    def takes(self, x: Tensor) -> bool:
        return (
            x.ndim == 2
            and x.shape[0] <= self.max_rows
            and x.shape[1] == self._dim
            and x.dtype == self._dtype
            and x.is_contiguous()
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """In place."""
        self._kernels.cuda_peer_sum(x, x, self._inboxes, self._rank, self._rounds)
        return x

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """residual += the sum of x, rounded, in place; then x = the RMSNorm of residual."""
        self._kernels.cuda_peer_sum_add_rms_norm(
            x, residual, weight, eps, self._inboxes, self._rank, self._rounds
        )

    def can_quantise(self) -> bool:
        return self._dim <= _MAX_QUANTISED_DIM and self._dim % _QUANTISED_DIM_MULTIPLE == 0

    def add_rms_norm_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *results: Any
    ) -> None:
        """residual += the sum of x, rounded, in place; then its RMSNorm is quantised. results: what
        `rms_norm_fp8_quant_group` takes after eps."""
        self._kernels.peer_sum_rms_norm_fp8_quant_group(
            x, residual, weight, eps, *results, self._inboxes, self._rank, self._rounds
        )


def make_custom_all_reduce(group: Group, dim: int, dtype: torch.dtype) -> CustomAllReduce | None:
    """For rows of `dim` on all ranks of `group`; None, with the reason logged, where one of them
    cannot."""
    sums = CustomAllReduce(group.rank, group.size, dim, dtype)
    reason = first_obstacle(
        group,
        (
            lambda: _check_sizes(group.size, dim),
            lambda: _check_machines(group),
            lambda: _check_access(group),
            sums.allocate,
            lambda: sums.connect(group.handle),
        ),
    )
    if reason is None:
        return sums
    logger.info("Custom all-reduce is disabled, NCCL is used: %s", reason)
    return None


def first_obstacle(group: Group, steps: Sequence[Callable[[], None]]) -> str | None:
    """Runs `steps` on all ranks until one raises RuntimeError on any rank; returns the reason, or
    None where all succeeded. All ranks agree on which: a rank must not wait for, or write to, a
    peer that has given up."""
    for step in steps:
        reason = None
        try:
            step()
        except PeerError:
            raise
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        if not group.least(reason is None):
            return reason or "another rank has to"
    return None


def _check_sizes(num_ranks: int, dim: int) -> None:
    if num_ranks > _MAX_RANKS:
        raise RuntimeError(f"{num_ranks} ranks are more than {_MAX_RANKS}")
    if dim > _MAX_DIM or dim % _DIM_MULTIPLE:
        raise RuntimeError(f"rows of {dim} are no multiple of {_DIM_MULTIPLE} up to {_MAX_DIM}")
    if "peer_sum" not in native.manifest()["kernels"]:
        raise RuntimeError("the native library has no kernel peer_sum")


def _check_machines(group: Group) -> None:
    # Host names may be equal, and containers on one host hide their processes.
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    machine = crc32(f"{socket.gethostname()} {boot}".encode())
    if group.least(machine) != group.greatest(machine):
        raise RuntimeError("the ranks are on several nodes")


def _check_access(group: Group) -> None:
    """To be called before memory is mapped, where ranks would wait for one that has no access."""
    own = torch.cuda.current_device()
    for other in group.all_gather(torch.tensor([own], device="cpu")).tolist():
        # Where each rank sees only its own GPU, all of them use the same index.
        is_visible = other != own and other < torch.cuda.device_count()
        if is_visible and not torch.cuda.can_device_access_peer(own, other):
            raise RuntimeError(f"GPU {own} has no access to the memory of GPU {other}")
