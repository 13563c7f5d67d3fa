"""Where checkpoint tensors go: every layer declares its slots, the loader fills them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor a layer takes from the checkpoint.

    shape: what the checkpoint must hold (`fits`). dtypes: which types it may have;
    the first is the one random weights are made in. write: copies it to its place. region: the
    part of the tensor that `write` gets, () for all of it; nothing else of it is read. others:
    slots that take other parts of the same tensor. is_optional: a checkpoint has all such tensors
    or none; none leaves the layers as they are. is_redundant: it is only checked, against what the
    layer knows without it, and may be missing. example: makes the tensor where weights are random,
    None for random numbers.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    write: Callable[[Tensor], None]
    region: tuple[slice, ...] = ()
    others: tuple["Slot", ...] = ()
    is_optional: bool = False
    is_redundant: bool = False
    example: Callable[[], Tensor] | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the checkpoint's tensor may have this shape: () may be (1,) there, Quark keeps
        scales of rows as [rows], and ModelOpt those of blocks as [rows, 1, columns, 1]."""
        same = shape == self.shape or (self.shape, shape) == ((), (1,))
        same = same or self.shape == (*shape, 1)
        return same or (len(shape) == 4 and (shape[0::2], shape[1::2]) == (self.shape, (1, 1)))

    def take(self, tensor: Tensor) -> None:
        """Writes its parts of the checkpoint's tensor."""
        tensor = tensor.reshape(self.shape)
        for slot in (self, *self.others):
            slot.write(tensor[slot.region] if slot.region else tensor)

    def with_other(self, other: "Slot") -> "Slot":
        assert (other.shape, other.dtypes) == (self.shape, self.dtypes)
        return replace(self, others=(*self.others, other))


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@runtime_checkable
class HasSlots(Protocol):
    """A layer with weights of its own. Keys are names in the checkpoint."""

    def slots(self) -> dict[str, Slot]: ...


@runtime_checkable
class HasKernel(Protocol):
    """A layer that lays out its weights for its kernel once all are loaded."""

    prefix: str

    def make_kernel(self) -> None: ...


def model_slots(model: nn.Module) -> dict[str, Slot]:
    """All slots of all layers of `model`."""
    slots: dict[str, Slot] = {}
    for module in model.modules():
        if isinstance(module, HasSlots):
            slots.update(module.slots())
    return slots


def layers_on_other_ranks(model: nn.Module) -> frozenset[str]:
    """Names of layers of this model whose weights other ranks read: what its modules list in
    `on_other_ranks`."""
    return frozenset(
        name for module in model.modules() for name in getattr(module, "on_other_ranks", ())
    )


def kernel_layers(model: nn.Module) -> Iterator[HasKernel]:
    return (module for module in model.modules() if isinstance(module, HasKernel))


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised weight; its pages are touched only when it is written."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def copy_into(target: Tensor, name: str = "") -> Callable[[Tensor], None]:
    """A writer that copies (and converts) a checkpoint tensor of the same number of elements."""

    def write(tensor: Tensor) -> None:
        target.copy_(tensor.reshape(target.shape))

    return write


def finite_into(target: Tensor, what: str) -> Callable[[Tensor], None]:
    """The same of numbers that are `what`; ValueError for NaN and infinity."""
    copy = copy_into(target)

    def write(tensor: Tensor) -> None:
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{what} must be finite; the checkpoint is corrupt, fetch it again")
        copy(tensor)

    return write
