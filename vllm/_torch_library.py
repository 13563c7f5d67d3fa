"""Native kernels as torch custom ops `torch.ops.vllm.<name>`."""

from collections.abc import Callable

import torch

from vllm import _native

_LIBRARY = torch.library.Library("vllm", "FRAGMENT")


def register(schema: str, reference: Callable[..., None]) -> None:
    """Defines an op that fills tensors it is given, as `schema` declares.

    On the CPU it is `reference`, on CUDA the native function of the same name, or the reference
    where no library has one; its fake implementation does nothing, because there is nothing to
    return.
    """
    name = schema.partition("(")[0]

    def call_native(*args: object) -> None:
        (_native.function(name) or reference)(*args)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, call_native, "CUDA")
    torch.library.register_fake(f"vllm::{name}", lambda *args: None, lib=_LIBRARY)
