"""FlashInfer: its DeepGEMM, CUTLASS and TensorRT-LLM paths for GEMM and MoE; paged attention.

`flashinfer-deepgemm` and attention were run on an H100. All others are written for the public
functions of version 0.6.13 and were not run on hardware; their tests are
tests/kernels/gpu/test_flashinfer_kernels.py and test_moe_backends_on_gpu.py. A start compares each
with a reference before it serves.
Not supported: experts with one FP8 scale per tensor, since gate and up would have to share theirs.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.kernels.backends import shared
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import AttentionProblem, LinearProblem, MoEProblem, Problem
from vllm.kernels.select.reason import Reason
from vllm.kernels.select.spec import UP_FIRST, KernelSpec

if TYPE_CHECKING:
    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors
    from vllm.ops.paged_attention import CacheWriter, PagedAttention

_SM90, _SM100, _SM12X = frozenset({"sm_90"}), frozenset({"sm_100", "sm_103"}), frozenset({"sm_12x"})
_READ = "0.6.13"  # the version whose functions were read
_ANY_06 = (("flashinfer", "0.6"),)
_DEEPGEMM, _CUTLASS, _TRTLLM = "flashinfer-deepgemm", "flashinfer-cutlass", "flashinfer-trtllm"
# TensorRT-LLM's kernels come as binaries, which the library would fetch from the net at a first
# call. Nothing is fetched while we serve (`vllm.kernels.jit.flashinfer`): a package brings them.
_BY_TRTLLM: dict[str, Any] = {
    "backend": _TRTLLM,
    "devices": _SM100,
    "libs": (("flashinfer", _READ), ("flashinfer_cubin", _READ)),
}
_Spec = partial(
    KernelSpec, libs=(("flashinfer", _READ),), compiles="flashinfer", dtypes=shared.HALF
)
_Block = partial(_Spec, dtypes=frozenset({"bf16"}), k_align=128, **shared.FP8_BLOCKS)
_Nvfp4 = partial(_Spec, **shared.NVFP4)

# Modules of `cutlass_fused_moe`: more than a hundred sources of CUTLASS each, which nobody waits
# for at a first call. They come prebuilt (`python -m vllm.kernels.jit.flashinfer fused_moe_90`).
_MOE_SM90 = (("sm_9x", "flashinfer", "fused_moe_90"),)
_MOE_BLACKWELL = (
    ("sm_100", "flashinfer", "fused_moe_100"),
    ("sm_103", "flashinfer", "fused_moe_103"),
    ("sm_12x", "flashinfer", "fused_moe_120"),
)
# TensorRT-LLM's rows of NVFP4 weights, in the order of the tiles that its kernels write.
_SHUFFLED = "trtllm-shuffled"
_HEAD_SIZES = (64, 128, 256)
_TRTLLM_MOST_EXPERTS_OF_A_TOKEN = 32


def _head_size(problem: Problem) -> list[Reason]:
    assert isinstance(problem, AttentionProblem)
    text = f"head_dim = {problem.head_dim}: the wrappers take {_HEAD_SIZES}"
    return shared.shape_reasons((problem.head_dim not in _HEAD_SIZES, text))


def _least_k(problem: Problem) -> list[Reason]:
    assert isinstance(problem, LinearProblem)
    return shared.shape_reasons((problem.k < 256, f"K = {problem.k} is less than 256"))


def _routing(problem: Problem) -> list[Reason]:
    """What TensorRT-LLM's routing kernels ask of numbers, those of all ranks."""
    assert isinstance(problem, MoEProblem)
    num_experts, top_k = problem.num_experts, problem.top_k
    most = min(num_experts - 1, _TRTLLM_MOST_EXPERTS_OF_A_TOKEN)
    return shared.shape_reasons(
        (num_experts % 4 > 0, f"{num_experts} experts are not a multiple of 4"),
        (top_k > most, f"a token has {top_k} experts, and it takes up to {most}"),
    )


def _shuffled_experts(problem: Problem) -> list[Reason]:
    """Besides, weights are whole tiles of rows: those of up and gate together."""
    assert isinstance(problem, MoEProblem)
    hidden = problem.hidden
    text = f"hidden = {hidden} is not a multiple of 128"
    return [*_routing(problem), *shared.shape_reasons((hidden % 128 > 0, text))]


SPECS = (
    # fp8_blockscale_gemm_sm90: quantises bf16 activations itself, swaps A and B for few tokens
    _Block(backend=_DEEPGEMM, family="linear", devices=_SM90, libs=_ANY_06, n_align=64),
    # gemm_fp8_nt_groupwise
    _Block(backend=_CUTLASS, family="linear", devices=_SM100 | _SM12X, n_align=128),
    _Block(family="linear", n_align=128, check=_least_k, **_BY_TRTLLM),
    # mm_fp4
    _Nvfp4(
        backend=_CUTLASS,
        family="linear",
        devices=_SM100 | _SM12X,
        n_align=32,
        k_align=32,
        check=partial(shared.nvfp4_parts, 32),
    ),
    _Nvfp4(
        family="linear",
        dtypes=frozenset({"bf16"}),
        n_align=128,
        k_align=64,
        weight_layouts=(_SHUFFLED,),
        check=partial(shared.nvfp4_parts, 128),
        **_BY_TRTLLM,
    ),
    # cutlass_fused_moe: block scales on Hopper only
    _Block(
        backend=_CUTLASS,
        family="moe",
        devices=_SM90,
        prebuilt=_MOE_SM90,
        weight_layouts=(UP_FIRST,),
    ),
    _Nvfp4(
        backend=_CUTLASS,
        family="moe",
        devices=_SM100 | _SM12X,
        prebuilt=_MOE_BLACKWELL,
        k_align=64,
        weight_layouts=(UP_FIRST,),
    ),
    # trtllm_fp8_block_scale_routed_moe
    _Block(family="moe", weight_layouts=(UP_FIRST,), check=_routing, **_BY_TRTLLM),
    # trtllm_fp4_block_scale_routed_moe
    _Nvfp4(
        family="moe",
        dtypes=frozenset({"bf16"}),
        k_align=64,
        weight_layouts=(_SHUFFLED,),
        has_one_input_scale=True,
        check=_shuffled_experts,
        **_BY_TRTLLM,
    ),
    # Batch{Prefill,Decode}WithPagedKVCacheWrapper: FlashAttention 3 for prompts, 2 for the rest.
    # Heads of 64 and of 256 were not run (tests/kernels/gpu/test_flashinfer_attention.py).
    _Spec(
        backend="flashinfer",
        family="attention",
        devices=_SM90,
        libs=_ANY_06,
        formats=frozenset({"bf16", "fp8"}),
        dtypes=frozenset({"bf16"}),
        check=_head_size,
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored, but for the scales of NVFP4, and all of it for
    TensorRT-LLM's path; each call quantises x [M, K]. The first compiles."""
    from vllm.kernels.flashinfer import linear
    from vllm.kernels.jit.flashinfer import watch_flashinfer
    from vllm.ops.block_fit import fitted_kernel

    watch_flashinfer()
    make = linear.nvfp4_kernel if problem.format == "nvfp4" else linear.block_kernel
    path = winner.backend.removeprefix("flashinfer-")
    return fitted_kernel(tensors, winner.fit, partial(make, path=path))


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Lays the weights out once, up before gate; a call hands over the router's choice. Nothing of
    it waits for the device."""
    from vllm.kernels.flashinfer import moe
    from vllm.kernels.jit.flashinfer import check_large_module, watch_flashinfer
    from vllm.ops.block_fit import padded_experts
    from vllm.platforms.installed import installed_device

    watch_flashinfer()
    if winner.fit is not None:
        tensors = padded_experts(tensors)
    if winner.backend == _TRTLLM:
        is_nvfp4 = problem.format == "nvfp4"
        make = moe.TrtllmNvfp4Experts if is_nvfp4 else moe.TrtllmBlockExperts
        return make(tensors, problem.num_experts)
    device = installed_device()
    chips = {device.family, device.arch}
    (module,) = (name for chip, _, name in (*_MOE_SM90, *_MOE_BLACKWELL) if chip in chips)
    check_large_module(module)
    return moe.CutlassExperts(tensors)


def attention(problem: AttentionProblem, write: "CacheWriter") -> "PagedAttention":
    """Compiles for a minute where the library's cache is cold."""
    from vllm.kernels.flashinfer.attention import FlashInferAttention
    from vllm.kernels.jit.flashinfer import watch_flashinfer

    watch_flashinfer()
    return FlashInferAttention(write, problem)
