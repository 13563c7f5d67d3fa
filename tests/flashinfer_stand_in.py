"""TensorRT-LLM's experts as FlashInfer 0.6.13 documents them, computed in torch on any device: what
the arguments mean, read back from them alone.

Rows of a tile are written in an order of the library's own. Here it is another one, from
`shuffle_matrix_a`, which is undone before anything is multiplied.
"""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm.ops.nvfp4 import e2m1_decode, nvfp4_dequantize, nvfp4_quantize, unpack_e2m1
from vllm.ops.nvfp4 import unswizzle_scales as unswizzled

FP8 = torch.float8_e4m3fn
_BLOCK_OF_ROWS = 32


def install(patch: pytest.MonkeyPatch) -> ModuleType:
    """As the package `flashinfer` of this process."""
    package, experts = ModuleType("flashinfer"), ModuleType("flashinfer.fused_moe")
    jit, env, core = (ModuleType(f"flashinfer.{name}") for name in ("jit", "jit.env", "jit.core"))
    env.FLASHINFER_AOT_DIR = Path()
    core.JitSpec = SimpleNamespace(build=None)
    for function in (shuffle_matrix_a, reorder_rows_for_gated_act_gemm, fp4_quantize):
        setattr(package, function.__name__, function)
    for function in (trtllm_fp8_block_scale_routed_moe, trtllm_fp4_block_scale_routed_moe):
        setattr(experts, function.__name__, function)
    for module in (package, experts, jit, env, core):
        patch.setitem(__import__("sys").modules, module.__name__, module)
    return package


def shuffle_matrix_a(matrix, epilogue_tile_m):
    assert epilogue_tile_m == 128 and matrix.shape[0] % epilogue_tile_m == 0
    return matrix[_order(len(matrix), matrix.device)]


def _order(num_rows, device):
    rows = torch.arange(num_rows, device=device).view(-1, _BLOCK_OF_ROWS)
    return rows.view(len(rows), 4, 8).transpose(1, 2).flatten()


def reorder_rows_for_gated_act_gemm(matrix):
    """Of its halves by turns."""
    first, second = matrix.chunk(2)
    return torch.stack((first, second), 1).flatten(0, 1)


def fp4_quantize(input, global_scale, sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout):
    assert (sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout) == (16, False, False)
    q, scales = nvfp4_quantize(input, global_scale)
    return q, scales.view(torch.uint8)


def trtllm_fp8_block_scale_routed_moe(
    *, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm2_weights,
    gemm2_weights_scale, use_shuffled_weight, weight_layout, output, **others,
):  # fmt: skip
    assert not use_shuffled_weight and weight_layout == 0
    x = hidden_states.float() * hidden_states_scale.T.repeat_interleave(128, 1)

    def product(weights, scales, expert):
        wide = scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return lambda rows: rows @ (weights[expert].float() * wide).T

    def compute(expert, rows):
        up, gate = product(gemm1_weights, gemm1_weights_scale, expert)(rows).bfloat16().chunk(2, 1)
        between = _requantised(torch.nn.functional.silu(gate.float()) * up.float())
        return product(gemm2_weights, gemm2_weights_scale, expert)(between)

    _finalize(x, len(gemm1_weights), compute, output, **others)


def _requantised(x):
    groups = x.view(len(x), -1, 128)
    scales = groups.abs().amax(2, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scales).to(FP8).float() * scales).flatten(1)


def trtllm_fp4_block_scale_routed_moe(
    *, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm1_bias,
    gemm1_alpha, gemm1_beta, gemm1_clamp_limit, gemm2_weights, gemm2_weights_scale, gemm2_bias,
    output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar, output, **others,
):  # fmt: skip
    without = (gemm1_bias, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, gemm2_bias)
    assert without == (None,) * 5 and hidden_states_scale.dtype == FP8
    one = torch.ones(1, device=output.device)
    x = nvfp4_dequantize(hidden_states, hidden_states_scale, one)

    def wide(weights, tiles, expert):
        assert weights.dtype == torch.uint8 and tiles.dtype == FP8
        num_rows, columns = weights[expert].shape[0], weights[expert].shape[1] * 2
        scales = unswizzled(tiles[expert].view(torch.uint8), num_rows, columns // 16)
        values = e2m1_decode(unpack_e2m1(weights[expert].contiguous()))
        values = values * scales.view(FP8).float().repeat_interleave(16, 1)
        restored = torch.empty_like(values)
        restored[_order(num_rows, values.device)] = values
        return restored

    def compute(expert, rows):
        up, gate = (
            (rows @ wide(gemm1_weights, gemm1_weights_scale, expert).T)
            .unflatten(1, (-1, 2))
            .unbind(2)
        )
        gate = torch.nn.functional.silu(gate * output1_scale_gate_scalar[expert])
        between = (up * output1_scale_scalar[expert] * gate).bfloat16()
        between = nvfp4_dequantize(*nvfp4_quantize(between, one), one)
        second = wide(gemm2_weights, gemm2_weights_scale, expert)
        return between @ second.T * output2_scale_scalar[expert]

    _finalize(x, len(gemm1_weights), compute, output, **others)


def _finalize(
    x, num_weights, compute, output, *, topk_ids, routing_bias, top_k, num_experts, n_group,
    topk_group, intermediate_size, local_expert_offset, local_num_experts, routed_scaling_factor,
    routing_method_type, do_finalize,
):  # fmt: skip
    """output: the sum over a token's experts. An expert in the upper half of an id, its weight as
    bf16 in the lower."""
    assert (routing_method_type, do_finalize, local_expert_offset) == (5, True, 0)
    assert (routing_bias, n_group, topk_group, routed_scaling_factor) == (None,) * 4
    assert topk_ids.dtype == torch.int32 and topk_ids.shape == (len(x), top_k)
    assert num_weights == local_num_experts <= num_experts and intermediate_size > 0
    assert num_experts % 4 == 0 and top_k < num_experts
    ids = topk_ids >> 16
    weights = (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()
    total = torch.zeros(output.shape, device=output.device)
    for expert in range(local_num_experts):
        rows, places = torch.where(ids == expert)
        if len(rows):
            total.index_add_(0, rows, compute(expert, x[rows]) * weights[rows, places, None])
    output.copy_(total)
