"""What Triton makes of the products of experts for sm_90: needs Triton, and no GPU."""

import os

import pytest
from slow import quick

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
    "OFFSET": 0, "BLOCK_M": 16, "BLOCK_K": 128, "PDL": True, "bias": None, "LIMIT": 0.0,
    "NUM_PARTS": 2,
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


@pytest.mark.parametrize("rows", quick((64, 256), [256]), ids=("a scale of all rows", "several"))
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
    constants = {"HIDDEN": 2048, "BLOCK_K": 512, "NUM_ROWS": 129, "BLOCK_E": 16, "ROWS": 16,
                 "PDL": True}  # fmt: skip
    early, late = loads_around_the_wait(split_product_kernel, types, constants)
    assert early and late and all(".v4.b32" in line for line in early + late)


@pytest.mark.parametrize("is_large", (False, True), ids=("small", "large"))
@pytest.mark.parametrize("k", (2048, 4096))
def test_weights_are_read_16_bytes_at_a_time_before_the_wait_and_tokens_after(k, is_large):
    from vllm.kernels.triton.skinny import LARGE_ROWS, LARGE_WARPS, ROWS, product_kernel

    rows, num_warps = (LARGE_ROWS, LARGE_WARPS) if is_large else (ROWS, 4)
    types = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "x_stride": "i32", "num_rows": "i32",
             "num_tokens": "i32"}  # fmt: skip
    constants = {"bias": None, "K": k, "K_PAD": k, "HAS_BIAS": False, "ROWS": rows,
                 "IS_LARGE": is_large, "PDL": True}  # fmt: skip
    early, late = loads_around_the_wait(product_kernel, types, constants, num_warps)
    assert len(early) == rows * len(late) == rows * k // (8 * 32 * num_warps)
    assert all(".v4.b32" in line for line in early + late)


def test_gates_of_heads_are_read_16_bytes_at_a_time():
    from vllm.kernels.triton.gates import _norm_kernel, _sigmoid_kernel

    types = {"x": "*bf16", "gate": "*bf16", "gate_stride": "i32"}
    constants = {"HEADS": 16, "DIM": 256, "HEAD_STRIDE": 512, "IS_ONE": False, "BLOCK": 2048}
    _, of_sigmoid = loads_around_the_wait(_sigmoid_kernel, types, constants | {"PDL": True})
    types |= {"weight": "*fp32", "out": "*bf16", "num_rows": "i32", "eps": "fp32"}
    constants = {"HEADS": 32, "DIM": 128, "D_PAD": 128, "ROWS": 16, "PDL": True}
    _, of_norm = loads_around_the_wait(_norm_kernel, types, constants)
    # Two of each input, and what a thread reads of the norm's weight.
    assert [".v4.b32" in line for line in of_sigmoid] == [True] * 4
    assert [".v4.b32" in line for line in of_norm].count(True) == 4 == len(of_norm) - 1


def loads_around_the_wait(kernel, types, constants, num_warps=4) -> tuple[list[str], list[str]]:
    """Of a kernel as a launch marks its arguments: tensors are aligned, and a specialised integer
    that 16 divides."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    unmarked = {p.name for p in kernel.params if p.do_not_specialize}
    marked = [name for name in types if name not in unmarked and types[name] != "fp32"]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in marked}
    source = ASTSource(kernel, signature, constants, attrs)
    options = {"num_warps": num_warps, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    early, late = ([line for line in part.splitlines() if "ld.global" in line]
                   for part in ptx.split("griddepcontrol.wait", 1))  # fmt: skip
    return early, late


def test_experts_without_a_gate_have_one_product():
    one, both = (ptx_of(gate_up_kernel, PLAIN, NUM_PARTS=parts) for parts in (1, 2))
    assert 0 < one.count("mma.") < both.count("mma.")
