"""FlashInfer's fused experts: `cutlass_fused_moe` for FP8 with block scales on Hopper and for NVFP4
on Blackwell, and TensorRT-LLM's binaries for FP8 with block scales and for NVFP4 on Blackwell.

All take the router's choice as it is, and want the rows of up before those of gate. Written for
the public functions of version 0.6.13; not run on hardware. What they are called with is made by
functions of its own, which are read back on the CPU (tests/kernels/test_flashinfer_calls.py).
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from vllm.kernels.activations import Activation, InputQuant, QuantizedInput
from vllm.kernels.flashinfer.linear import quantise_arguments
from vllm.kernels.interface import MoETensors
from vllm.ops.fp8_quant import ScaleLayout
from vllm.ops.nvfp4 import swizzle_scales

# RoutingMethodType.TopK: weights are taken as they are, and not made from logits.
_TOP_K_ALONE = 5
_MAJOR_K = 0  # WeightLayout: rows of weights are contiguous
# Rows of a tile that kernels in NVFP4 write out.
_EPILOGUE_TILE = 128
_NO_TENSORS = ("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias")


class CutlassExperts:
    """A MoE kernel: bf16 or fp16 tokens, which the library sorts and quantises.

    Its GEMMs run by the first tactic of their lists: nothing here tunes them. For FP8 the library
    compiles kernels with nvcc, when a number of tokens wants other tiles than those before.
    """

    def __init__(self, tensors: MoETensors):
        self._function: Any = import_module("flashinfer.fused_moe").cutlass_fused_moe
        is_nvfp4 = tensors.format.element == "nvfp4"
        self._weights = nvfp4_weights(tensors) if is_nvfp4 else block_weights(tensors)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.shape[0]:
            self._function(**cutlass_tokens(x, weights, ids), **self._weights, output=out)
        return out


def cutlass_tokens(x: Tensor, weights: Tensor, ids: Tensor) -> dict[str, Any]:
    """Ids out of range, as -1, are of no expert here; ranks are none of the library's."""
    return {
        "input": x.contiguous(),
        "token_selected_experts": ids.to(torch.int32),
        "token_final_scales": weights.float(),
        "output_dtype": x.dtype,
    }


def block_weights(tensors: MoETensors) -> dict[str, Any]:
    """FP8 weights [E, 2 * intermediate, hidden] and [E, hidden, intermediate], with float32 scales
    of 128x128 blocks [E, N / 128, K / 128]."""
    tensors = tensors.up_first()
    assert tensors.gate_up_scales is not None and tensors.down_scales is not None
    return {
        "fc1_expert_weights": tensors.gate_up,
        "fc2_expert_weights": tensors.down.contiguous(),
        "quant_scales": [tensors.gate_up_scales, tensors.down_scales.contiguous()],
        "use_deepseek_fp8_block_scale": True,
    }


def nvfp4_weights(tensors: MoETensors) -> dict[str, Any]:
    """E2M1 codes, 16 in an int64, with E4M3 scales, four in an int32, in tiles of 128 x 4; and for
    each expert what inputs of a product are multiplied by, and what its sums are.

    One factor serves the sums of gate and of up. Where their global scales differ, up comes out
    divided by their ratio, and so does its product with gate: it is multiplied by the ratio when it
    is quantised. The same numbers are rounded then, but for roundings before them.
    """
    tensors = tensors.up_first()
    of_first, of_second, of_up, of_gate, of_down = _factors(tensors)
    first, second = tensors.all_experts()
    assert first.scales is not None and second.scales is not None
    ratio = of_up / of_gate
    return {
        "fc1_expert_weights": tensors.gate_up.view(torch.int64),
        "fc2_expert_weights": tensors.down.contiguous().view(torch.int64),
        "quant_scales": [
            of_first.reciprocal(),
            swizzle_scales(first.scales).view(torch.int32),
            of_first * of_gate,
            ratio / of_second,
            swizzle_scales(second.scales).view(torch.int32),
            of_second * of_down,
        ],
    }


def _factors(tensors: MoETensors) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of NVFP4 experts with up first, float32 [E] each: the scales of the inputs of both products,
    as of `MoETensors.expert`, and the global scales of up, gate and down."""
    first, second = tensors.all_experts()
    assert first.input_scale is not None and second.input_scale is not None
    assert first.global_scales is not None and second.global_scales is not None
    of_up, of_gate = first.global_scales.float().unbind(1)
    of_first, of_second = (one.float().amax(1) for one in (first.input_scale, second.input_scale))
    return of_first, of_second, of_up, of_gate, second.global_scales.float()[:, 0]


# ---------------------------------------------------------------- TensorRT-LLM


class TrtllmBlockExperts:
    """A MoE kernel: tokens in FP8 with scales of 128 columns, or floats. The router's weights are
    rounded to bf16, which is how the library takes them."""

    def __init__(self, tensors: MoETensors, num_experts: int):
        """num_experts: those of all ranks."""
        library: Any = import_module("flashinfer.fused_moe")
        self._function: Any = library.trtllm_fp8_block_scale_routed_moe
        self._weights = trtllm_block_weights(tensors, num_experts)
        self._quant = InputQuant(ScaleLayout.COLUMN_MAJOR)

    def input_quant(self, num_tokens: int) -> InputQuant:
        return self._quant

    def __call__(self, x: Activation, weights: Tensor, ids: Tensor) -> Tensor:
        tokens = self._quant.quantise(x) if isinstance(x, Tensor) else x
        out = tokens.q.new_empty(tokens.shape, dtype=torch.bfloat16)
        if tokens.shape[0]:
            self._function(**trtllm_tokens(tokens, weights, ids), **self._weights, output=out)
        return out


def trtllm_block_weights(tensors: MoETensors, num_experts: int) -> dict[str, Any]:
    """As `block_weights`, in the order of rows that they are stored in but for up and gate."""
    tensors = tensors.up_first()
    assert tensors.gate_up_scales is not None and tensors.down_scales is not None
    return {
        "gemm1_weights": tensors.gate_up,
        "gemm1_weights_scale": tensors.gate_up_scales,
        "gemm2_weights": tensors.down.contiguous(),
        "gemm2_weights_scale": tensors.down_scales.contiguous(),
        **_sizes(tensors, num_experts),
        "use_shuffled_weight": False,
        "weight_layout": _MAJOR_K,
    }


def trtllm_tokens(x: QuantizedInput, weights: Tensor, ids: Tensor) -> dict[str, Any]:
    """Scales [hidden / 128, T]."""
    scales = x.scales.T.contiguous()
    return {"hidden_states": x.q, "hidden_states_scale": scales, **_routing(weights, ids)}


def _sizes(tensors: MoETensors, num_experts: int) -> dict[str, Any]:
    """Experts that are here come first, whichever they are; it skips ids of others, as -1."""
    return {
        "num_experts": num_experts,
        "intermediate_size": tensors.inner,
        "local_expert_offset": 0,
        "local_num_experts": tensors.num_experts,
    }


def _routing(weights: Tensor, ids: Tensor) -> dict[str, Any]:
    """The router's choice, int32 [T, top_k]: an expert in the upper half, its weight in bf16 in the
    lower."""
    bits = weights.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return {
        "topk_ids": (ids.to(torch.int32) << 16) | bits,
        "routing_bias": None,
        "top_k": ids.shape[1],
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": None,
        "routing_method_type": _TOP_K_ALONE,
        "do_finalize": True,
    }


class TrtllmNvfp4Experts:
    """A MoE kernel: bf16 tokens, quantised once for all experts, whose input scale must be one."""

    def __init__(self, tensors: MoETensors, num_experts: int):
        """num_experts: those of all ranks."""
        library: Any = import_module("flashinfer")
        experts: Any = import_module("flashinfer.fused_moe")
        self._quantise = library.fp4_quantize
        self._function = experts.trtllm_fp4_block_scale_routed_moe
        self._weights = trtllm_nvfp4_weights(tensors, num_experts, library)
        self._inverse = one_input_scale(tensors).reciprocal()

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.shape[0]:
            q, scales = self._quantise(**trtllm_nvfp4_quantise(x, self._inverse))
            tokens = trtllm_nvfp4_tokens(q, scales, weights, ids)
            self._function(**tokens, **self._weights, output=out)
        return out


def one_input_scale(tensors: MoETensors) -> Tensor:
    """float32 [1], of the inputs of the first products."""
    scales = tensors.gate_up_input_scales
    assert scales is not None
    return scales.float().amax().reshape(1)


def trtllm_nvfp4_weights(tensors: MoETensors, num_experts: int, library: Any) -> dict[str, Any]:
    """Codes uint8 and E4M3 scales in tiles of 128 x 4, both with rows in the order that the kernels
    write tiles in: those of up and gate by turns before that. library: has the functions of
    FlashInfer that order rows.

    Sums of gate are multiplied by `output1_scale_gate_scalar` before SiLU, those of up by
    `output1_scale_scalar`, which also has the scale that the result is quantised by; the results of
    the second product by `output2_scale_scalar`; all float32 [E]. So gate and up may differ.
    """
    tensors = tensors.up_first()
    _, of_second, of_up, of_gate, of_down = _factors(tensors)
    first, second = tensors.all_experts()
    assert first.scales is not None and second.scales is not None
    of_input = one_input_scale(tensors)
    # Its functions take one matrix: they order the numbers of rows, once for all experts.
    by_turns = library.reorder_rows_for_gated_act_gemm(_row_numbers(first.weight))
    in_first = library.shuffle_matrix_a(by_turns, _EPILOGUE_TILE)[:, 0]
    in_second = library.shuffle_matrix_a(_row_numbers(second.weight), _EPILOGUE_TILE)[:, 0]
    return {
        "gemm1_weights": first.weight.index_select(1, in_first),
        "gemm1_weights_scale": _tiles(first.scales, in_first),
        "gemm2_weights": second.weight.index_select(1, in_second),
        "gemm2_weights_scale": _tiles(second.scales, in_second),
        "output1_scale_scalar": of_input * of_up / of_second,
        "output1_scale_gate_scalar": of_input * of_gate,
        "output2_scale_scalar": of_second * of_down,
        **dict.fromkeys(_NO_TENSORS),
        **_sizes(tensors, num_experts),
    }


def _row_numbers(stacked: Tensor) -> Tensor:
    """int64 [rows, 1] of weights [E, rows, columns]."""
    return torch.arange(stacked.shape[1], device=stacked.device)[:, None]


def _tiles(scales: Tensor, order: Tensor) -> Tensor:
    bits = scales.view(torch.uint8).index_select(1, order)
    return swizzle_scales(bits).view(torch.float8_e4m3fn)


def trtllm_nvfp4_quantise(x: Tensor, inverse: Tensor) -> dict[str, Any]:
    """Arguments of `fp4_quantize`, for scales of a token side by side."""
    return {**quantise_arguments(x, inverse), "is_sf_swizzled_layout": False}


def trtllm_nvfp4_tokens(q: Tensor, scales: Tensor, weights: Tensor, ids: Tensor) -> dict[str, Any]:
    """q: codes uint8 [T, hidden / 2]; scales: E4M3 as bytes [T, hidden / 16]."""
    return {
        "hidden_states": q,
        "hidden_states_scale": scales.view(torch.float8_e4m3fn),
        **_routing(weights, ids),
    }
