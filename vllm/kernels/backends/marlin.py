"""Weight-only kernels: FP8, NVFP4 and int4 weights widened in registers, activations untouched; and
int4 weights by FP8 activations (`marlin-w4a8`), where tensor cores take FP8 from registers."""

from functools import partial

from vllm.kernels.problem import ActScheme
from vllm.kernels.spec import NATIVE, KernelSpec

_Spec = partial(
    KernelSpec,
    backend="marlin",
    devices=frozenset({"sm_8x", "sm_9x", "sm_10x", "sm_11x", "sm_12x"}),
    formats=frozenset({"fp8-tensor", "fp8-channel", "fp8-block", "nvfp4", "int4-group"}),
    dtypes=frozenset({"bf16", "fp16"}),
    libs=((NATIVE, ""),),
    native=("marlin_gemm",),
    # Code for 8.0 runs on every later chip of its major version; the others need their own.
    native_archs=frozenset({"80", "90", "100f", "110f", "120f"}),
    blocks=frozenset({(128, 128)}),
    k_align=64,
)

_W4A8 = partial(
    _Spec,
    backend="marlin-w4a8",
    devices=frozenset({"sm_89", "sm_12x"}),
    formats=frozenset({"int4-group"}),
    act=frozenset({ActScheme.DYNAMIC_TOKEN}),
)

SPECS = (
    _Spec(family="linear", n_align=64),
    _Spec(family="moe"),
    _W4A8(family="linear", n_align=64),
    _W4A8(family="moe"),
)
