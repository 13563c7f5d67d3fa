"""Messages between an engine and its ranks, pickled, on one connection per rank."""

import contextlib
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm import errors
from vllm.config import VllmConfig
from vllm.core.outputs import SchedulerOutput
from vllm.distributed.layout import Layout
from vllm.errors import EngineDeadError, VllmError, is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Start:
    """device_index: GPU of the rank on its node. num_neighbours: ranks on that node. rendezvous:
    host and port of the store."""

    config: VllmConfig
    layout: Layout
    device_index: int
    num_neighbours: int
    rendezvous: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Started:
    """The model is loaded. device_kind: where, `cpu` or `cuda`."""

    num_blocks: int
    async_scheduling: bool
    device_kind: str


@dataclass(frozen=True, slots=True)
class ExecuteModel:
    scheduler_output: SchedulerOutput
    bitmasks: "dict[str, Tensor]"


class GetOutput:
    """Asks for the output of the oldest step in flight."""


class ShowKernels:
    """Asks for the kernel decisions, as a Report."""


class Stop:
    """Ends the rank."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ended. error_type: name of a class of vllm.errors, for what the user can correct.
    is_of_peer: caused by another rank's failure."""

    text: str
    error_type: str | None = None
    is_of_peer: bool = False

    def as_error(self, rank: object) -> VllmError:
        if self.error_type is None:
            error = EngineDeadError(f"{rank} failed: {self.text}")
            error.is_of_peer = self.is_of_peer
            return error
        kind: type[VllmError] = getattr(errors, self.error_type)
        names_itself = self.text.startswith(f"{rank} ")
        return kind(self.text if names_itself else f"{rank}: {self.text}")


def failure_of(error: BaseException, traceback: str) -> Failure:
    if isinstance(error, VllmError):
        name, is_of_peer = type(error).__name__, getattr(error, "is_of_peer", False)
        return Failure(str(error), name if hasattr(errors, name) else "VllmError", is_of_peer)
    # Not imported here: torch itself may be broken. A module that is not loaded raised nothing.
    groups, dist = (sys.modules.get(n) for n in ("vllm.distributed.groups", "torch.distributed"))
    if groups is not None and isinstance(error, groups.PeerError):
        return Failure(str(error), is_of_peer=True)
    if dist is not None and isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Failure(f"the store of the ranks is gone or silent: {first}", is_of_peer=True)
    if is_out_of_memory(error):
        text = str(error).splitlines()[0] if str(error) else "no memory is left"
        return Failure(
            f"out of memory: {text}; lower --gpu-memory-utilization or --max-num-batched-tokens, "
            f"or spread the model over more ranks",
            "VllmError",
        )
    return Failure(traceback)


def leave_signals_to_parent() -> None:
    """Signals may reach the whole process group; the parent handles them and stops this process."""
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
