"""Which kernel each label of AIConfigurator means, and whether a backend here calls the same.

A label ranks a backend where the same library's code runs. Another implementation of the same
algorithm (SGLang's Triton kernels, vLLM's CUTLASS kernels) is a peer: on an H100 our Triton experts
take 0.7 to 1.15 of the time of SGLang's, so its times on another chip are no evidence of ours. A
label that names only the framework ranks nothing either.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple


class Kernel(NamedTuple):
    """What a label means. framework, label, chips: patterns; chips of the architecture. formats:
    names of the tables. name: of the implementation. backend: ours that calls the same code, "" for
    none. why: the reason for that. fault: what its times hold more or less than a layer; such times
    rank nothing and are in no error."""

    framework: str
    label: str
    family: str
    formats: tuple[str, ...]
    name: str
    backend: str
    why: str
    fault: str = ""
    chips: str = "*"


# dtypes of the measurements that tables are made of: the name of the format there.
FORMATS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block", "nvfp4": "nvfp4"}
LEFT_OUT = {
    "int4_wo": "4-bit integers: none of the kernels is one that ours calls",
    "int8_wo": "8-bit integers are not served",
    "sq": "SmoothQuant is not served",
    "w4a16_mxfp4": "MXFP4: none of the kernels is one that ours calls",
    "w4a8_mxfp4_mxfp8": "MXFP4: none of the kernels is one that ours calls",
}

# Experts without a gate (relu squared), as (hidden, intermediate, top_k, experts): TensorRT-LLM's
# label says so of a size, the other frameworks' do not.
NOT_GATED = frozenset(
    {
        (1024, 2688, 22, 512),
        (2048, 5120, 22, 512),
        (2688, 1856, 6, 128),
        (4096, 2688, 22, 512),
        (8192, 5120, 22, 512),
    }
)
NOT_GATED_LABEL = "moe_torch_flow_nongated"

_HOST_TIME = "timed without CUDA graphs: 160 to 190 us of host time"
_PACKED_AT_EACH_CALL = (
    "twice the time of TensorRT-LLM's up to 1,024 tokens, and on Hopper equal to it: the weight's "
    "scales were packed for UE8M0 at each call, which an engine does once"
)
_NO_SUM = "without the weighted sum of a token's experts"
_NOT_NAMED = "the label names the framework only"
_SAME_TRTLLM = "FlashInfer's TensorRT-LLM kernels, which ours calls"
_SAME_CUTLASS = "FlashInfer's cutlass_fused_moe, which ours calls"

KERNELS = (
    # Linear layers.
    Kernel("sglang", "sglang_torch_linear", "linear", ("bf16",), "torch", "torch",
           "torch's F.linear, which ours calls"),
    Kernel("vllm", "torch.nn.functional.linear", "linear", ("bf16",), "torch", "torch",
           "torch's F.linear, which ours calls"),
    Kernel("sglang", "sglang", "linear", ("bf16",), "torch", "torch",
           "older label of the same F.linear"),
    Kernel("vllm", "vllm_default", "linear", ("bf16",), "torch", "torch",
           "older label of the same F.linear"),
    Kernel("trtllm", "torch_flow", "linear", ("bf16", "fp8", "fp8-block", "nvfp4"), "trtllm", "",
           _NOT_NAMED),
    Kernel("sglang", "sglang_sgl_kernel_fp8_scaled_mm", "linear", ("fp8",), "sglang-cutlass", "",
           "SGLang's own CUTLASS kernels, scales per token and channel; ours are other code"),
    Kernel("vllm", "CutlassFP8ScaledMMLinearKernel", "linear", ("fp8",), "vllm-cutlass", "",
           "vLLM's own CUTLASS kernels, one scale per tensor; ours are other code"),
    Kernel("trtllm", "deepgemm", "linear", ("fp8-block",), "deep_gemm", "deep_gemm",
           "DeepGEMM, which ours calls"),
    Kernel("sglang", "sglang_deepgemm_gemm_nt_f8f8bf16", "linear", ("fp8-block",), "deep_gemm",
           "deep_gemm", "DeepGEMM, which ours calls", chips="sm_9*"),
    Kernel("sglang", "sglang_deepgemm_gemm_nt_f8f8bf16", "linear", ("fp8-block",),
           "sglang-deep_gemm", "deep_gemm", "DeepGEMM, which ours calls",
           fault=_PACKED_AT_EACH_CALL, chips="sm_1*"),
    Kernel("vllm", "DeepGemmFp8BlockScaledMMKernel", "linear", ("fp8-block",), "vllm-deep_gemm",
           "deep_gemm", "DeepGEMM, which ours calls", fault=_HOST_TIME),
    Kernel("vllm", "CutlassFp8BlockScaledMMKernel", "linear", ("fp8-block",), "vllm-cutlass", "",
           "vLLM's own CUTLASS kernels; ours are other code", fault=_HOST_TIME),
    Kernel("vllm", "TritonFp8BlockScaledMMKernel", "linear", ("fp8-block",), "vllm-triton", "",
           "vLLM's own Triton kernel; ours is other code", fault=_HOST_TIME),
    Kernel("sglang", "sglang_flashinfer_cutlass_nvfp4", "linear", ("nvfp4",), "flashinfer-cutlass",
           "flashinfer-cutlass", "FlashInfer's mm_fp4 by CUTLASS, which ours calls"),
    Kernel("vllm", "FlashInferCutlassNvFp4LinearKernel", "linear", ("nvfp4",),
           "flashinfer-cutlass", "flashinfer-cutlass",
           "FlashInfer's mm_fp4 by CUTLASS, which ours calls"),
    Kernel("sglang", "sglang_flashinfer_cutedsl_nvfp4", "linear", ("nvfp4",),
           "sglang-flashinfer-cute-dsl", "",
           "FlashInfer's mm_fp4 by CuTe DSL; ours calls it by CUTLASS and by TensorRT-LLM"),
    Kernel("vllm", "FlashInferCuteDslNvFp4LinearKernel", "linear", ("nvfp4",),
           "vllm-flashinfer-cute-dsl", "",
           "FlashInfer's mm_fp4 by CuTe DSL; ours calls it by CUTLASS and by TensorRT-LLM"),
    # Experts.
    Kernel("sglang", "sglang_flashinfer_trtllm_moe", "moe", ("bf16", "fp8-block", "nvfp4"),
           "flashinfer-trtllm", "flashinfer-trtllm", _SAME_TRTLLM),
    Kernel("vllm", "vllm_*_flashinfer_trtllm_*", "moe", ("bf16", "fp8", "fp8-block", "nvfp4"),
           "flashinfer-trtllm", "flashinfer-trtllm", _SAME_TRTLLM),
    Kernel("trtllm", "moe_torch_flow_min_latency", "moe", ("nvfp4",), "trtllm-min-latency",
           "flashinfer-trtllm", "TensorRT-LLM's own call of the same kernels", fault=_NO_SUM),
    Kernel("sglang", "sglang_flashinfer_cutlass_moe", "moe", ("bf16", "nvfp4"),
           "flashinfer-cutlass", "flashinfer-cutlass", _SAME_CUTLASS),
    Kernel("vllm", "vllm_*_flashinfer_cutlass_*", "moe", ("bf16", "fp8", "fp8-block", "nvfp4"),
           "flashinfer-cutlass", "flashinfer-cutlass", _SAME_CUTLASS),
    Kernel("trtllm", "moe_torch_flow_cutlass", "moe", ("bf16", "fp8", "fp8-block", "nvfp4"),
           "flashinfer-cutlass", "flashinfer-cutlass",
           "TensorRT-LLM's CUTLASS experts, which are FlashInfer's cutlass_fused_moe"),
    Kernel("trtllm", NOT_GATED_LABEL, "moe", ("bf16", "fp8", "nvfp4"),
           "flashinfer-cutlass", "flashinfer-cutlass",
           "the same kernels without a gate; kept apart from experts with one"),
    Kernel("trtllm", "deepgemm", "moe", ("fp8-block",), "deep_gemm", "deep_gemm",
           "DeepGEMM's grouped GEMMs, which ours calls"),
    Kernel("trtllm", "moe_torch_flow_triton_fp8_block", "moe", ("fp8-block",), "trtllm-triton", "",
           "TensorRT-LLM's own Triton kernel; ours is other code"),
    Kernel("trtllm", "moe_torch_flow", "moe", ("bf16",), "trtllm", "", _NOT_NAMED),
    Kernel("sglang", "sglang_fused_moe_triton", "moe", ("bf16", "fp8-block"), "sglang-triton", "",
           "SGLang's own Triton kernel, tuned by it; ours is other code"),
    Kernel("vllm", "vllm_*_triton_tritonexperts", "moe", ("bf16", "fp8", "fp8-block"),
           "vllm-triton", "", "vLLM's own Triton kernel; ours is other code"),
    Kernel("vllm", "vllm_fused_moe", "moe", ("bf16",), "vllm-triton", "",
           "older label of vLLM's own Triton kernel; ours is other code"),
)  # fmt: skip


def kernel_of(
    framework: str, label: str, family: str, weight_format: str, arch: str
) -> Kernel | None:
    """What is known of a label; None for one that this table does not have."""
    return next(
        (
            known
            for known in KERNELS
            if known.family == family
            and known.framework == framework
            and weight_format in known.formats
            and fnmatchcase(label, known.label)
            and fnmatchcase(arch, known.chips)
        ),
        None,
    )
