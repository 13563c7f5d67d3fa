"""Which module of model operations (contract: `vllm.ops`) serves a device."""

from types import ModuleType

from vllm.platforms import native


def usable_ops(device_kind: str) -> ModuleType:
    """`cpu_ops` or `cuda_ops` where the native library works and has them, else `torch_ops`."""
    if native.status().state == "present":
        if device_kind == "cpu":
            from vllm.ops import cpu_ops

            return cpu_ops
        if "cuda_layers" in native.manifest()["kernels"]:
            from vllm.kernels import cuda_ops

            return cuda_ops
    from vllm.ops import torch_ops

    return torch_ops
