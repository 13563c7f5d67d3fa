"""The backends of each problem family in default order of preference, on every chip."""

DEFAULT_ORDER: dict[str, tuple[str, ...]] = {
    "linear": (
        "deep_gemm",
        # Of scales of rows and tensors; there ours are faster for few tokens alone, by measurement.
        "scaled_mm",
        "cutlass",
        "skinny",
        "flashinfer-deepgemm",
        "triton",
        # Never run here: after ours of the same arithmetic, before those that do not quantise x.
        "flashinfer-cutlass",
        "flashinfer-trtllm",
        "marlin-w4a8",
        "marlin",
        "humming",
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
}
