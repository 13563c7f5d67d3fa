"""Model operations in two modules with the same functions and signatures.

`cpu_ops` runs the native kernels; `torch_ops` is the reference in plain torch on any device,
written to be read. Both compute in float32 whatever the storage types.

The contract of every function: the result of a row (a token) is the same bit for bit whatever
else is in the batch, however a prompt is cut into chunks, and on any number of threads (`cpu_ops`
only). Two instruction sets with fused multiply-add give the same bits too.

Activations are float32, bfloat16 or float16. Outputs have the type of their input. The paged cache
is `k_cache` [num_blocks, num_kv_heads, head_dim, block_size] and `v_cache`
[num_blocks, num_kv_heads, block_size, head_dim], in float32, bfloat16, float16 or float8_e4m3fn
(then with scalar scales: stored = value / scale).
"""

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
