"""What Triton makes of the products of experts for sm_90: needs Triton, and no GPU."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm.kernels.triton.moe_kernels import (
    PLAIN,
    QUANTISED,
    TO_QUANTISE,
    down_kernel,
    gate_up_kernel,
)

POINTERS = {"out": "*bf16", "x_scales": "*fp32", "w_scales": "*fp32", "out_scales": "*fp32"}
POINTERS |= {"ids": "*i64", "order": "*i32", "num_blocks": "i32", "num_experts": "i32"}
CONSTANTS = {
    "HIDDEN": 256, "INNER": 256, "TOP_K": 2, "QUANTISES": False, "GROUP_N": 128, "GROUP_K": 128,
    "OFFSET": 0, "BLOCK_M": 16, "BLOCK_K": 128, "PDL": True,
}  # fmt: skip


def ptx_of(kernel, form, is_sorted=True, **options) -> str:
    x, w = {
        PLAIN: ("*bf16", "*bf16"),
        TO_QUANTISE: ("*bf16", "*fp8e4nv"),
        QUANTISED: ("*fp8e4nv", "*fp8e4nv"),
    }[form]
    named = CONSTANTS | {"X": form.value, "IS_SORTED": is_sorted, "BLOCK_N": 64} | options
    constants = {name: value for name, value in named.items() if name in kernel.arg_names}
    types = POINTERS | {"x": x, "w": w, "blocks": "*i32" if is_sorted else "*i64"}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, {})
    target = GPUTarget("cuda", 90, 32)
    launch = {"num_warps": 4, "num_stages": 3, "launch_pdl": True}
    return triton.compile(source, target=target, options=launch).asm["ptx"]


@pytest.mark.parametrize("rows", (64, 256), ids=("a scale of all rows", "several"))
@pytest.mark.parametrize("form", (PLAIN, TO_QUANTISE, QUANTISED), ids=lambda form: str(form.value))
@pytest.mark.parametrize("kernel", (gate_up_kernel, down_kernel), ids=lambda k: k.__name__)
def test_tokens_of_every_form_compile(kernel, form, rows):
    assert "griddepcontrol.wait" in ptx_of(kernel, form, BLOCK_N=rows)


@pytest.mark.parametrize("is_sorted", (False, True))
def test_what_is_read_before_the_wait_comes_from_l2(is_sorted):
    """An L1 may still hold what another kernel read at the same place."""
    early, _ = ptx_of(down_kernel, QUANTISED, is_sorted).split("griddepcontrol.wait", 1)
    loads = [line for line in early.splitlines() if "ld.global" in line]
    assert len(loads) == (3 if is_sorted else 1)
    assert all("ld.global.cg" in line for line in loads)


@pytest.mark.parametrize("is_sorted", (False, True))
def test_the_first_product_reads_nothing_before_the_wait(is_sorted):
    """It follows the kernel that chooses or sorts."""
    early, _ = ptx_of(gate_up_kernel, QUANTISED, is_sorted).split("griddepcontrol.wait", 1)
    assert "ld.global" not in early


def test_the_router_reads_tokens_16_bytes_at_a_time():
    """What it waits for: Triton has to know that 16 divides the stride of x."""
    from vllm.kernels.triton.moe_router_kernels import split_product_kernel

    types = {
        "x": "*bf16",
        "gate": "*bf16",
        "parts": "*fp32",
        "num_tokens": "i32",
        "x_stride": "i32",
    }
    constants = {"HIDDEN": 2048, "BLOCK_K": 512, "NUM_ROWS": 128, "BLOCK_E": 16, "ROWS": 16,
                 "PDL": True}  # fmt: skip
    names = split_product_kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    # As a launch marks them: tensors are aligned, and a specialised integer that 16 divides.
    unmarked = {p.name for p in split_product_kernel.params if p.do_not_specialize}
    marked = [name for name in types if name not in unmarked]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in marked}
    source = ASTSource(split_product_kernel, signature, constants, attrs)
    options = {"num_warps": 4, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    _, late = ptx.split("griddepcontrol.wait", 1)
    loads = [line for line in late.splitlines() if "ld.global" in line]
    assert loads and all(".v4.b32" in line for line in loads)
