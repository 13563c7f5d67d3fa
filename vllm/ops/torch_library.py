"""Native kernels as torch custom ops `torch.ops.vllm.<name>`."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from vllm.platforms import native

_LIBRARY = torch.library.Library("vllm", "FRAGMENT")


def register(schema: str, reference: Callable[..., None]) -> Callable[..., None]:
    """Defines an op that fills tensors it is given, as `schema` declares; its first argument is
    one. Returns what does the same to plain tensors without torch's dispatcher.

    On the CPU it is `reference`, on CUDA the native function of the same name, or the reference
    where no library has one; its fake implementation does nothing, because there is nothing to
    return.
    """
    name = schema.partition("(")[0]

    def call_native(*args: object) -> None:
        (native.function(name) or reference)(*args)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, call_native, "CUDA")
    torch.library.register_fake(f"vllm::{name}", lambda *args: None, lib=_LIBRARY)
    op = getattr(torch.ops.vllm, name)

    def call(first: Tensor, *others: object) -> None:
        # The dispatcher is for who traces or fakes; others it costs microseconds of the host.
        if (
            torch.compiler.is_compiling()
            or is_in_torch_dispatch_mode()
            or type(first) is not Tensor
            or first.is_meta
        ):
            op(first, *others)
        elif first.is_cuda:
            call_native(first, *others)
        else:
            reference(first, *others)

    return call
