"""Model operations in two modules with the same functions and signatures.

`cpu_ops` runs the native kernels; `torch_ops` is the reference in plain torch on any device,
written to be read. Both compute in float32 whatever the storage types.

The contract of every function: the result of a row (a token) is the same bit for bit whatever
else is in the batch, however a prompt is cut into chunks, and on any number of threads (`cpu_ops`
only). Two instruction sets with fused multiply-add give the same bits too.

Squared ReLU there is in torch alone, in both modules.

Activations are float32, bfloat16 or float16. Outputs have the type of their input. The paged cache
is `k_cache` [num_blocks, num_kv_heads, head_dim, block_size] and `v_cache`
[num_blocks, num_kv_heads, block_size, head_dim], in float32, bfloat16, float16 or float8_e4m3fn
(then with scalar scales: stored = value / scale).
"""
