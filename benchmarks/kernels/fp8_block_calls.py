"""Calls of FP8 block GEMMs, ours and other libraries', on random operands.

Of activations x, each function here returns what makes a call for a weight, its scales and an
output. Names that end in `+q`, and FlashInfer's kernel, take x in bfloat16 and quantise it.
"""

from collections.abc import Callable

import torch
import tvm_ffi
from torch import Tensor

Call = Callable[[], object]
Make = Callable[[Tensor, Tensor, Tensor], Call]


def quantised_blocks(n: int, k: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn(n, k, device="cuda")
    blocks = weight.view(n // 128, 128, k // 128, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    return (blocks / scales[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn), scales


def quantised_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    groups = x.float().view(m, k // 128, 128)
    scales = groups.abs().amax(2).clamp(min=1e-10) / 448
    return (groups / scales[:, :, None]).view(m, k).to(torch.float8_e4m3fn), scales


def reference(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    q, s = quantised_tokens(x)
    a = q.float() * s.repeat_interleave(128, 1)
    b = weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return a @ b.T


def on_stream(call: Call) -> Call:
    def run() -> object:
        with tvm_ffi.use_torch_stream():
            return call()

    return run


def skinny(library: tvm_ffi.Module, x: Tensor, shape: tuple[int, int], quantises: bool) -> Make:
    given = (x, None) if quantises else quantised_tokens(x)

    def make(weight: Tensor, scales: Tensor, out: Tensor) -> Call:
        return on_stream(
            lambda: library.skinny_fp8_block_gemm(*given, weight, scales, None, out, *shape)
        )

    return make


def cutlass(library: tvm_ffi.Module, x: Tensor, tiling: tuple[int, int, int, bool] | None) -> Make:
    q, scales = quantised_tokens(x)
    scales = scales.t().contiguous().t()

    def make(weight: Tensor, weight_scales: Tensor, out: Tensor) -> Call:
        operands = (q, scales, weight, weight_scales, None, out)
        if tiling is None:
            return on_stream(lambda: library.cutlass_fp8_block_gemm(*operands))
        return on_stream(lambda: library.sm90_fp8_block_gemm(*operands, *tiling))

    return make


def quantised_cutlass(library: tvm_ffi.Module, x: Tensor) -> Make:
    """Our quantiser of bf16 activations, then the GEMM: two launches."""
    m, k = x.shape
    q = torch.empty(m, k, device="cuda", dtype=torch.float8_e4m3fn)
    scales = torch.empty(k // 128, -(-m // 4) * 4, device="cuda").t()[:m]

    def make(weight: Tensor, weight_scales: Tensor, out: Tensor) -> Call:
        def call() -> None:
            library.fp8_quant_group(x, q, scales, 128, 1e-10, False)
            library.cutlass_fp8_block_gemm(q, scales, weight, weight_scales, None, out)

        return on_stream(call)

    return make


def collective(library: tvm_ffi.Module, x: Tensor, which: int) -> Make:
    """CUTLASS's own collective for SM90; its TMA wants rows of scales 16 bytes aligned."""
    q, scales = quantised_tokens(x)
    scales = scales.t().contiguous().t()

    def make(weight: Tensor, weight_scales: Tensor, out: Tensor) -> Call:
        return on_stream(
            lambda: library.cutlass_collective(q, scales, weight, weight_scales, out, which)
        )

    return make


def triton_call(x: Tensor) -> Make:
    from vllm.kernels.triton.linear import fp8_block_gemm

    q, s = quantised_tokens(x)

    def make(weight: Tensor, scales: Tensor, out: Tensor) -> Call:
        return lambda: fp8_block_gemm(q, s, weight, scales, None, (128, 128), out)

    return make


def deep_gemm_call(x: Tensor) -> Make:
    import deep_gemm

    q, s = quantised_tokens(x)
    if hasattr(deep_gemm, "get_mn_major_tma_aligned_tensor"):
        s = deep_gemm.get_mn_major_tma_aligned_tensor(s)

    def make(weight: Tensor, scales: Tensor, out: Tensor) -> Call:
        return lambda: deep_gemm.fp8_gemm_nt((q, s), (weight, scales), out, disable_ue8m0_cast=True)

    return make


def flashinfer_call(x: Tensor) -> Make:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    def make(weight: Tensor, scales: Tensor, out: Tensor) -> Call:
        return lambda: fp8_blockscale_gemm_sm90(x, weight, None, scales, out=out)

    return make
