"""Which layer computes, told from outside of the model, for profiles of a step.

The layers' own functions are wrapped while `marked` holds. What is wrapped: the product of every
linear layer, attention, experts, recurrences, norms, and all operations of the device that modules
call (`ops`). The outermost of them counts.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.recurrent import RecurrentLayer
from vllm.model_executor.models.latent_attention import LatentAttention

NORMS = "norms"
"""The label of RMSNorm, with what is added and quantised on the way."""


class Clock(Protocol):
    """What is told of each layer as it begins and ends; layers do not nest."""

    def begin(self, label: str) -> None: ...
    def end(self, label: str) -> None: ...


class HostClock:
    """Time of layers that compute when they are called, as on the CPU. seconds, calls: by label."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._begun = 0.0

    def begin(self, label: str) -> None:
        self._begun = time.perf_counter()

    def end(self, label: str) -> None:
        self.seconds[label] += time.perf_counter() - self._begun
        self.calls[label] += 1


class DeviceMarkers:
    """Puts a kernel of its own between those of layers, by which a profile of one stream can be cut
    into layers. labels: of what follows each marker, "" where no layer computes."""

    KERNEL = "spin_kernel"
    """Part of the marker's name in profiles: what torch's `_sleep` runs."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def begin(self, label: str) -> None:
        self._mark(label)

    def end(self, label: str) -> None:
        self._mark("")

    def _mark(self, label: str) -> None:
        self.labels.append(label)
        torch.cuda._sleep(1)


@contextmanager
def marked(model: nn.Module, clock: Clock) -> Iterator[None]:
    """Labels are names of layers as kernel decisions have them, and for the rest NORMS or the name
    of the operation. Not for several threads; graphs that are captured before tell nothing."""
    wrapper = _Wrapper(clock)
    try:
        for module in model.modules():
            wrapper.wrap(module)
        yield
    finally:
        wrapper.undo()


class _Wrapper:
    def __init__(self, clock: Clock):
        self._clock = clock
        self._depth = 0
        self._undo: list[Callable[[], None]] = []

    def wrap(self, module: nn.Module) -> None:
        if isinstance(module, Linear):
            self._wrap(module, "multiply", module.prefix)
        elif isinstance(module, Attention | FusedMoE):
            self._wrap(module, "forward", module.prefix)
        elif isinstance(module, RMSNorm):
            self._wrap(module, "forward", NORMS)
            self._wrap(module, "add", NORMS)
        elif isinstance(module, RecurrentLayer):
            for name in ("rule", "scan"):
                if hasattr(module, name):
                    self._wrap(module, name, module.recurrence_name)
        if callable(getattr(module, "act_and_mul", None)):
            self._wrap(module, "act_and_mul", "act_and_mul")
        if isinstance(ops := getattr(module, "ops", None), ModuleType):
            self._set(module, "ops", _MarkedOps(ops, _labels_of(module), self._marked))

    def undo(self) -> None:
        for restore in reversed(self._undo):
            restore()

    def _wrap(self, module: nn.Module, name: str, label: str) -> None:
        self._set(module, name, self._marked(getattr(module, name), label))

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        own, missing = vars(module), object()
        before = own.get(name, missing)

        def restore() -> None:
            if before is missing:
                del own[name]
            else:
                own[name] = before

        own[name] = value
        self._undo.append(restore)

    def _marked(self, run: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self._depth += 1
            if self._depth == 1:
                self._clock.begin(label)
            try:
                return run(*given, **named)
            finally:
                if self._depth == 1:
                    self._clock.end(label)
                self._depth -= 1

        return call


def _labels_of(module: nn.Module) -> Mapping[str, str]:
    """Operations that compute a layer of the model, by its name."""
    if isinstance(module, RecurrentLayer):
        return {"causal_conv1d": module.recurrence_name}
    if isinstance(module, LatentAttention):
        return {"linear_heads": module.kv_b_proj.prefix}
    gate = getattr(module, "gate", None)
    return {"choose_experts": gate.prefix} if isinstance(gate, Linear) else {}


class _MarkedOps:
    """The operations of a device, each of which is marked."""

    def __init__(
        self, ops: ModuleType, labels: Mapping[str, str],
        marked: Callable[[Callable[..., Any], str], Callable[..., Any]],
    ):  # fmt: skip
        self._ops, self._labels, self._marked = ops, labels, marked

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if not callable(value):
            return value
        call = self._marked(value, self._labels.get(name, name))
        setattr(self, name, call)
        return call
