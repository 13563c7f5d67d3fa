"""What Triton makes of the NVFP4 product for few tokens: needs Triton, and no GPU."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm.kernels.triton.nvfp4_skinny import (
    BYTES,
    NUM_STAGES,
    NUM_WARPS,
    ROWS,
    nvfp4_product_kernel,
)

SHARED_MEMORY = 99 << 10  # of a multiprocessor of sm_120 that one program can have
POINTERS = {"weight": "*u8", "scales": "*fp8e4nv", "factors": "*fp32", "bias": "*fp32"}


@pytest.mark.parametrize("dtype", ("*bf16", "*fp16"))
@pytest.mark.parametrize("arch", (90, 100, 120))
def test_it_compiles_and_multiplies_in_tensor_cores(arch, dtype):
    constants = {
        "GROUP_BYTES": 8, "HAS_BIAS": True, "IS_WHOLE": True, "BLOCK_M": 16, "BLOCK_N": ROWS,
        "BYTES": BYTES,
    }  # fmt: skip
    kernel = nvfp4_product_kernel
    types = POINTERS | {"x": dtype, "out": dtype} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ("x_stride", "K")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = made.asm["ptx"]
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype[1:].replace('fp', 'f')}" in ptx
    # Two values of each byte, shared by all threads of the program: none is widened twice.
    widened = 2 * ROWS * BYTES // (32 * NUM_WARPS)
    assert dtype == "*fp16" or ptx.count("cvt.rn.bf16.f16") == widened
    # Loads of later steps are on their way while one is multiplied.
    assert "cp.async" in ptx and "ld.local" not in ptx
    assert made.metadata.shared <= SHARED_MEMORY
