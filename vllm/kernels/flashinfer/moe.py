"""FlashInfer's fused experts: `cutlass_fused_moe` for FP8 with block scales on Hopper and for NVFP4
on Blackwell, and TensorRT-LLM's binaries for FP8 with block scales on Blackwell.

Both take the router's choice as it is, and want the rows of up before those of gate. Written for
the public functions of version 0.6.13; not run on hardware. What they are called with is made by
functions of its own, which are read back on the CPU (tests/kernels/test_flashinfer_calls.py).
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from vllm.kernels.activations import Activation, InputQuant, QuantizedInput
from vllm.kernels.interface import MoETensors
from vllm.ops.fp8_quant import ScaleLayout
from vllm.ops.nvfp4 import swizzle_scales

# RoutingMethodType.TopK: weights are taken as they are, and not made from logits.
_TOP_K_ALONE = 5
_MAJOR_K = 0  # WeightLayout: rows of weights are contiguous


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
    assert tensors.gate_up_scales is not None and tensors.down_scales is not None
    return {
        "fc1_expert_weights": up_first(tensors.gate_up),
        "fc2_expert_weights": tensors.down.contiguous(),
        "quant_scales": [up_first(tensors.gate_up_scales), tensors.down_scales.contiguous()],
        "use_deepseek_fp8_block_scale": True,
    }


def nvfp4_weights(tensors: MoETensors) -> dict[str, Any]:
    """E2M1 codes, 16 in an int64, with E4M3 scales, four in an int32, in tiles of 128 x 4; and for
    each expert what inputs of a product are multiplied by, and what its sums are.

    One factor serves the sums of gate and of up. Where their global scales differ, up comes out
    divided by their ratio, and so does its product with gate: it is multiplied by the ratio when it
    is quantised. The same numbers are rounded then, but for roundings before them.
    """
    first, second = tensors.all_experts()
    assert first.scales is not None and first.global_scales is not None
    assert second.scales is not None and second.global_scales is not None
    assert first.input_scale is not None and second.input_scale is not None
    # [E], as of `MoETensors.expert`.
    of_first, of_second = (one.float().amax(1) for one in (first.input_scale, second.input_scale))
    of_gate, of_up = first.global_scales.float().unbind(1)
    ratio = of_up / of_gate
    return {
        "fc1_expert_weights": up_first(tensors.gate_up).view(torch.int64),
        "fc2_expert_weights": tensors.down.contiguous().view(torch.int64),
        "quant_scales": [
            of_first.reciprocal(),
            swizzle_scales(up_first(first.scales)).view(torch.int32),
            of_first * of_gate,
            ratio / of_second,
            swizzle_scales(second.scales).view(torch.int32),
            of_second * second.global_scales.float()[:, 0],
        ],
    }


def up_first(gate_up: Tensor) -> Tensor:
    """A copy of [E, 2 * rows, columns] with the second half of rows before the first."""
    bits = gate_up if gate_up.element_size() > 1 else gate_up.view(torch.uint8)
    return bits.roll(gate_up.shape[1] // 2, 1).view(gate_up.dtype)


# ---------------------------------------------------------------- TensorRT-LLM


class TrtllmBlockExperts:
    """A MoE kernel: tokens in FP8 with scales of 128 columns, or floats. The router's weights are
    rounded to bf16, which is how the library takes them."""

    def __init__(self, tensors: MoETensors):
        library: Any = import_module("flashinfer.fused_moe")
        self._function: Any = library.trtllm_fp8_block_scale_routed_moe
        self._weights = trtllm_block_weights(tensors)
        self._quant = InputQuant(ScaleLayout.COLUMN_MAJOR)

    def input_quant(self, num_tokens: int) -> InputQuant:
        return self._quant

    def __call__(self, x: Activation, weights: Tensor, ids: Tensor) -> Tensor:
        tokens = self._quant.quantise(x) if isinstance(x, Tensor) else x
        out = tokens.q.new_empty(tokens.shape, dtype=torch.bfloat16)
        if tokens.shape[0]:
            self._function(**trtllm_tokens(tokens, weights, ids), **self._weights, output=out)
        return out


def trtllm_block_weights(tensors: MoETensors) -> dict[str, Any]:
    """As `block_weights`, in the order of rows that they are stored in but for up and gate."""
    assert tensors.gate_up_scales is not None and tensors.down_scales is not None
    return {
        "gemm1_weights": up_first(tensors.gate_up),
        "gemm1_weights_scale": up_first(tensors.gate_up_scales),
        "gemm2_weights": tensors.down.contiguous(),
        "gemm2_weights_scale": tensors.down_scales.contiguous(),
        "num_experts": tensors.num_experts,
        "intermediate_size": tensors.inner,
        "local_expert_offset": 0,
        "local_num_experts": tensors.num_experts,
        "use_shuffled_weight": False,
        "weight_layout": _MAJOR_K,
    }


def trtllm_tokens(x: QuantizedInput, weights: Tensor, ids: Tensor) -> dict[str, Any]:
    """Scales [hidden / 128, T]; and the router's choice, int32 [T, top_k]: an expert in the upper
    half, its weight in bf16 in the lower."""
    bits = weights.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return {
        "topk_ids": (ids.to(torch.int32) << 16) | bits,
        "routing_bias": None,
        "hidden_states": x.q,
        "hidden_states_scale": x.scales.T.contiguous(),
        "top_k": ids.shape[1],
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": None,
        "routing_method_type": _TOP_K_ALONE,
        "do_finalize": True,
    }
