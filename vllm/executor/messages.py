"""What passes between an engine and its ranks, pickled, on a connection per rank."""

import contextlib
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm import errors
from vllm.config import VllmConfig
from vllm.distributed.layout import Layout
from vllm.errors import EngineDeadError, VllmError, is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.core.scheduler import Step


@dataclass(frozen=True, slots=True)
class Start:
    """device_index: the GPU to take on the rank's machine, which has num_neighbours ranks.
    meeting: host and port of the store."""

    config: VllmConfig
    layout: Layout
    device_index: int
    num_neighbours: int
    meeting: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Started:
    """The model is loaded. device_kind: where, `cpu` or `cuda`."""

    num_blocks: int
    runs_ahead: bool
    device_kind: str


@dataclass(frozen=True, slots=True)
class Launch:
    step: "Step"
    bitmasks: "dict[str, Tensor]"


@dataclass(frozen=True, slots=True)
class TakeResult:
    """Asks for the result of the step launched first of those whose result was not taken."""


@dataclass(frozen=True, slots=True)
class ShowKernels:
    """Asks for the kernel decisions."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the rank."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Last words of a rank. error_type: name of one of vllm.errors for what the user can correct.
    is_of_peer: it failed because another rank did."""

    text: str
    error_type: str | None = None
    is_of_peer: bool = False

    def as_error(self, rank: object) -> VllmError:
        if self.error_type is None:
            error = EngineDeadError(f"{rank} failed: {self.text}")
            error.is_of_peer = self.is_of_peer
            return error
        kind: type[VllmError] = getattr(errors, self.error_type)
        return kind(f"{rank}: {self.text}")


def failure_of(error: BaseException, traceback: str) -> Failure:
    if isinstance(error, VllmError):
        name, is_of_peer = type(error).__name__, getattr(error, "is_of_peer", False)
        return Failure(str(error), name if hasattr(errors, name) else "VllmError", is_of_peer)
    # Not imported: torch may be what is broken. What is not there did not raise.
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
    """Signals may reach the whole group; the parent acts on them and stops us when it is time."""
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
