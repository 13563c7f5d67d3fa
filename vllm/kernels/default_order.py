"""The backends of each problem family in default order of preference."""

DEFAULT_ORDER: dict[str, tuple[str, ...]] = {
    "linear": (
        "deep_gemm",
        # Of scales of rows and tensors; there ours are faster for few tokens alone, by measurement.
        "scaled_mm",
        "cutlass",
        "skinny",
        "flashinfer-deepgemm",
        "triton",
        # Faster than these by measurement alone.
        "scaled_mm-blockwise",
        # After ours of the same arithmetic, before those that do not quantise x.
        "flashinfer-cutlass",
        "flashinfer-trtllm",
        "marlin-w4a8",
        "marlin",
        "humming",
        "skinny-w4a16",
        "cpu",
        "torch",
        "emulation",
        "emulation-ue8m0",
    ),
    "moe": (
        "deep_gemm",
        "cutlass",
        "triton",
        "flashinfer-cutlass",
        "flashinfer-trtllm",
        "marlin-w4a8",
        "marlin",
        "cpu",
        "torch",
    ),
    # FlashInfer compiles for a minute at the first start (see `KernelSpec.compiles`).
    "attention": ("triton", "flashinfer", "cpu", "torch"),
    "kv_quant": ("rotary", "triton", "cpu", "torch"),
    "delta_rule": ("triton", "cpu", "torch"),
    "mamba2": ("triton", "cpu", "torch"),
}

# By problem family and device family, where the order is another one there.
DEVICE_ORDER: dict[tuple[str, str], tuple[str, ...]] = {
    # For few tokens, which memory limits, weight-only kernels are faster than torch's int8 GEMM.
    ("linear", "cpu"): ("cpu", *(name for name in DEFAULT_ORDER["linear"] if name != "cpu")),
    # The libraries' kernels for B200 and B300, then ours, then those that do not quantise x. None
    # was run there.
    ("moe", "sm_10x"): (
        "flashinfer-trtllm",
        "flashinfer-cutlass",
        "deep_gemm",
        "cutlass",
        "triton",
        "marlin-w4a8",
        "marlin",
        "cpu",
        "torch",
    ),
}
