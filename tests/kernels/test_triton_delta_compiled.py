"""What Triton makes of the gated delta-net for sm_90: needs Triton, and no GPU."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm.kernels.triton.delta_rule import CHUNK, CHUNK_BLOCK_V, SOLVE_REGISTERS
from vllm.kernels.triton.delta_rule_kernels import chunk_kernel, solve_kernel

SHARED_MEMORY = 227 << 10  # of a multiprocessor that one program can have
TYPES = {"operands": "*fp16", "scores": "*fp16"}
TYPES |= dict.fromkeys(("state", "from_values", "decays", "decay_rate", "dt_bias"), "*fp32")
TYPES |= dict.fromkeys(("state_slots", "query_start_loc", "seq_lens", "draft_slots"), "*i32")


def compiled(kernel, dtype: str, size: int, has_drafts: bool = False, **options):
    constants = {
        "HEADS": 4, "GROUP": 2, "K": size, "K_PAD": size, "V": size, "V_PAD": size, "R_PAD": 256,
        "CHUNK": CHUNK, "BLOCK_V": CHUNK_BLOCK_V,
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    constants |= {} if has_drafts else {"draft_slots": None}
    types = TYPES | dict.fromkeys(("q", "k", "v", "a", "b", "out"), dtype)
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | options
    )


@pytest.mark.parametrize("has_drafts", [False, True])
def test_operands_of_products_with_the_state_are_read_where_they_are_loaded(has_drafts):
    """By tensor cores, from shared memory, some chunks ahead."""
    kernel = compiled(chunk_kernel, "*bf16", 128, has_drafts, num_stages=3)
    assert kernel.metadata.shared <= SHARED_MEMORY
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16" in ptx
    assert "cp.async" in ptx and "ld.shared.b16" not in ptx


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("*bf16", "*fp32"))
def test_three_programs_that_solve_fit_a_multiprocessor(dtype):
    options = {"num_stages": 1, "maxnreg": SOLVE_REGISTERS}
    kernel = compiled(solve_kernel, dtype, 128, **options)
    assert 3 * kernel.metadata.shared <= SHARED_MEMORY
    assert f".maxnreg {SOLVE_REGISTERS}" in kernel.asm["ptx"]
