"""What FlashInfer is called with, on the CPU: read by its documentation, it is our layer.

Where the library is installed, its signatures and its own shuffle of rows are asked too.
"""

from types import SimpleNamespace

import flashinfer_calls as calls
import flashinfer_stand_in
import pytest
import torch
from weight_only_cases import make_linear, make_moe

from vllm.kernels.activations import InputQuant, ScaleLayout
from vllm.kernels.flashinfer import linear, moe
from vllm.ops.nvfp4 import (
    e2m1_decode,
    unpack_e2m1,
    unswizzle_scales,
)

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_near(found, wanted):
    assert ((found - wanted).norm() / wanted.norm()) < 1e-5


def nvfp4_wide(codes, scales):
    """float32 [N, K] without global scales. codes: any integers; scales: swizzled, as any."""
    num_rows = codes.shape[0]
    values = e2m1_decode(unpack_e2m1(codes.contiguous().view(torch.uint8)))
    tiles = scales.contiguous().view(torch.uint8)
    scales = unswizzle_scales(tiles, num_rows, values.shape[1] // 16).view(FP8).float()
    return values * scales.repeat_interleave(16, 1)


def block_wide(weight, scales):
    repeated = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.float() * repeated


def experts_by(parts, x, weights, ids):
    """What the library documents. parts: of an expert (first, second, factor of what comes between,
    factor of the result); the first has linear rows and then gate's."""
    out = torch.zeros(x.shape)
    for token in range(len(x)):
        for place, expert in enumerate(ids[token].tolist()):
            if 0 <= expert < len(parts):
                first, second, between, after = parts[expert]
                linear, gate = (first @ x[token].float()).chunk(2)
                inner = torch.nn.functional.silu(gate) * linear * between
                out[token] += weights[token, place] * after * (second @ inner)
    return out


def expected(wide, x, weights, ids):
    out = torch.zeros(x.shape)
    for token in range(len(x)):
        for place, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                gate, up = (wide[expert][0] @ x[token].float()).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                out[token] += weights[token, place] * (wide[expert][1] @ inner)
    return out


# ---------------------------------------------------------------- the library itself


def test_the_library_has_a_place_for_every_argument():
    pytest.importorskip("flashinfer", reason="asks the signatures of the library that is here")
    assert calls.refused() == []


def test_rows_for_tensorrt_llm_are_shuffled_with_their_scales():
    """By the library's own function: wherever a row goes, its scales go."""
    library = pytest.importorskip("flashinfer", reason="shuffles rows by the library's function")
    tensors, wide = calls.nvfp4_linear((256,))
    (part,) = linear.nvfp4_parts(tensors, "trtllm", library.shuffle_matrix_a)
    places = library.shuffle_matrix_a(torch.arange(256)[:, None], 128)[:, 0]
    assert sorted(places.tolist()) == list(range(256)) and places.tolist() != list(range(256))
    found = nvfp4_wide(part.weight, part.scales) * tensors.global_scales
    assert_near(found, wide[places])


def test_rows_of_nvfp4_experts_are_ordered_as_the_library_orders_one_matrix():
    """Its documented steps: the halves by turns, then the order of a tile."""
    library = pytest.importorskip("flashinfer", reason="orders rows by the library's functions")
    tensors, _ = calls.nvfp4_experts()
    given = moe.trtllm_nvfp4_weights(tensors, calls.NUM_EXPERTS, library)
    up_first = tensors.up_first()
    for e in range(calls.NUM_EXPERTS):
        by_turns = library.reorder_rows_for_gated_act_gemm(up_first.gate_up[e])
        wanted = library.shuffle_matrix_a(by_turns, 128)
        assert torch.equal(given["gemm1_weights"][e], wanted)
        wanted = library.shuffle_matrix_a(tensors.down[e], 128)
        assert torch.equal(given["gemm2_weights"][e], wanted)


# ---------------------------------------------------------------- dense layers


@pytest.mark.parametrize("num_tokens", [1, 4, 7])
@pytest.mark.parametrize(
    ("layout", "path"),
    [(ScaleLayout.ROW_MAJOR, "cutlass"), (ScaleLayout.COLUMN_MAJOR, "trtllm")],
    ids=["cutlass", "trtllm"],
)
def test_fp8_blocks_are_handed_over_as_they_are(layout, path, num_tokens):
    tensors, wide = make_linear("fp8-block", (256, 128), 384)
    x = InputQuant(layout).quantise(torch.randn(num_tokens, 384).bfloat16())
    given = linear.block_arguments(x, tensors, path)
    a, a_scale, b_scale = given["a"], given["a_scale"], given["b_scale"]
    assert a.shape[0] % 4 == 0 and a_scale.shape == (a.shape[0], 3)
    if layout is ScaleLayout.ROW_MAJOR:
        assert a_scale.is_contiguous() and b_scale.is_contiguous() and b_scale.shape == (3, 3)
    else:  # strides of 1 along the first dimension of both
        assert a_scale.stride(0) == b_scale.stride(0) == 1
        b_scale = b_scale.T
    tokens = a.float() * a_scale.repeat_interleave(128, 1)
    assert not tokens[num_tokens:].any()
    wanted = x.q.float() * x.scales.repeat_interleave(128, 1)
    assert_near(tokens[:num_tokens], wanted)
    assert_near(block_wide(given["b"], b_scale), wide)


@pytest.mark.parametrize("factors", [[1e-4] * 3, [1e-4, 3e-4, 3e-4], [1e-4, 2e-4, 3e-4]])
def test_nvfp4_products_have_one_alpha_for_each_run_of_parts(factors):
    tensors, _ = calls.nvfp4_linear((64, 32, 160), k=96)
    tensors.global_scales = torch.tensor(factors)
    parts = linear.nvfp4_parts(tensors, "cutlass", None)
    assert len(parts) == len(set(factors))
    rows = []
    for part in parts:
        given = part.arguments(torch.empty(0), torch.empty(0), torch.bfloat16)
        assert given["alpha"].shape == (1,) and given["b"].T.is_contiguous()
        wide = nvfp4_wide(given["b"].T, given["b_descale"].T)
        rows.append(wide * given["alpha"] / tensors.input_scale)
    values = e2m1_decode(unpack_e2m1(tensors.weight))
    assert_near(torch.cat(rows), values * tensors.row_scales().repeat_interleave(16, 1))


# ---------------------------------------------------------------- experts


def test_fp8_experts_are_those_of_the_layer():
    tensors, wide = make_moe("fp8-block", calls.NUM_EXPERTS, 256, 128)
    x, routed = calls.tokens(), calls.choice()
    given = {**moe.cutlass_tokens(x, *routed), **moe.block_weights(tensors)}
    scales = given["quant_scales"]
    parts = [
        (block_wide(first, first_scales), block_wide(second, second_scales), 1.0, 1.0)
        for first, first_scales, second, second_scales in zip(
            given["fc1_expert_weights"], scales[0], given["fc2_expert_weights"], scales[1]
        )
    ]
    chosen = given["token_final_scales"], given["token_selected_experts"]
    assert chosen[1].dtype == torch.int32 and given["use_deepseek_fp8_block_scale"]
    assert_near(experts_by(parts, given["input"], *chosen), expected(wide, x, *routed))


@pytest.mark.parametrize("hidden", [256, 320])
def test_nvfp4_experts_are_those_of_the_layer_with_one_factor_for_gate_and_up(hidden):
    tensors, wide = make_moe("nvfp4", 3, hidden, 64)
    tensors.gate_up_input_scales = torch.rand(3, 2) / 100 + 1e-3
    tensors.down_input_scales = torch.rand(3, 1) / 100 + 1e-3
    x = torch.randn(5, hidden).bfloat16()
    weights, ids = torch.rand(5, 2), torch.tensor([[0, 1], [2, 0], [1, -1], [2, 1], [0, 2]])
    given = moe.nvfp4_weights(tensors)
    first, second = given["fc1_expert_weights"], given["fc2_expert_weights"]
    assert first.dtype == second.dtype == torch.int64
    assert second.shape[2] * 16 * 2 == first.shape[1]
    by_first, first_scales, alpha, by_second, second_scales, beta = given["quant_scales"]
    assert first_scales.dtype == second_scales.dtype == torch.int32
    parts = []
    for e in range(3):
        # Tokens are multiplied, quantised, and their sums multiplied: here nothing is rounded.
        wide_first = nvfp4_wide(first[e], first_scales[e]) * by_first[e] * alpha[e]
        parts.append((wide_first, nvfp4_wide(second[e], second_scales[e]), by_second[e], beta[e]))
    assert_near(experts_by(parts, x, weights, ids), expected(wide, x, weights, ids))


def test_what_comes_between_nvfp4_products_is_quantised_by_the_checkpoint_s_scale():
    """Whatever gate and up differ by: the numbers that are rounded are the same."""
    tensors, wide = calls.nvfp4_experts()
    given = moe.nvfp4_weights(tensors)
    by_first, first_scales, alpha, by_second = given["quant_scales"][:4]
    x = calls.tokens()[0].float()
    for e in range(calls.NUM_EXPERTS):
        first = nvfp4_wide(given["fc1_expert_weights"][e], first_scales[e])
        linear, gate = (first @ x * by_first[e] * alpha[e]).chunk(2)
        found = torch.nn.functional.silu(gate) * linear * by_second[e]
        gate, up = (wide[e][0] @ x).chunk(2)
        assert_near(found, torch.nn.functional.silu(gate) * up / tensors.down_input_scales[e])
        assert_near(by_first[e], 1 / tensors.gate_up_input_scales[e].max())


def test_experts_of_tensorrt_llm_are_those_of_the_layer():
    tensors, wide = make_moe("fp8-block", calls.NUM_EXPERTS, calls.HIDDEN, calls.INNER)
    x, (weights, ids) = calls.tokens(), calls.choice()
    quantised = InputQuant(ScaleLayout.COLUMN_MAJOR).quantise(x)
    given = moe.trtllm_block_weights(tensors, calls.NUM_EXPERTS)
    given |= moe.trtllm_tokens(quantised, weights, ids)
    scales = given["hidden_states_scale"]
    assert scales.shape == (calls.HIDDEN // 128, calls.NUM_TOKENS) and scales.is_contiguous()
    rounded = given["hidden_states"].float() * scales.T.repeat_interleave(128, 1)
    parts = [
        (block_wide(first, first_scales), block_wide(second, second_scales), 1.0, 1.0)
        for first, first_scales, second, second_scales in zip(
            given["gemm1_weights"], given["gemm1_weights_scale"],
            given["gemm2_weights"], given["gemm2_weights_scale"],
        )
    ]  # fmt: skip
    packed = given["topk_ids"]
    found_ids = packed >> 16
    found_weights = (packed & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()
    assert torch.equal(found_ids, ids.int())
    assert torch.equal(found_weights, weights.bfloat16().float())
    wanted = expected(wide, rounded, found_weights, ids)
    assert_near(experts_by(parts, rounded, found_weights, found_ids), wanted)


def test_nvfp4_experts_of_tensorrt_llm_are_those_of_the_layer():
    """Nothing is rounded here: tokens are codes already, and what comes between is not quantised.
    Gate and up have global scales of their own."""
    tensors, wide = calls.nvfp4_experts()
    inverse = moe.one_input_scale(tensors).reciprocal()
    x = calls.tokens()
    q, scales = flashinfer_stand_in.fp4_quantize(**moe.trtllm_nvfp4_quantise(x, inverse))
    given = moe.trtllm_nvfp4_weights(tensors, calls.NUM_EXPERTS, SimpleNamespace(
        shuffle_matrix_a=lambda matrix, tile: matrix,
        reorder_rows_for_gated_act_gemm=lambda matrix: matrix,
    ))  # fmt: skip
    rounded = e2m1_decode(unpack_e2m1(q)) * scales.view(FP8).float().repeat_interleave(16, 1)
    parts = []
    for e in range(calls.NUM_EXPERTS):
        first = nvfp4_wide(given["gemm1_weights"][e], given["gemm1_weights_scale"][e])
        up, gate = first.chunk(2)
        gate = gate * given["output1_scale_gate_scalar"][e]
        second = nvfp4_wide(given["gemm2_weights"][e], given["gemm2_weights_scale"][e])
        factors = given["output1_scale_scalar"][e], given["output2_scale_scalar"][e]
        parts.append((torch.cat((up, gate)), second, *factors))
    weights, ids = calls.choice()
    wanted = expected(wide, rounded / inverse, weights, ids)
    assert_near(experts_by(parts, rounded, weights, ids), wanted)


def test_what_comes_between_is_quantised_by_the_scale_of_its_expert():
    tensors, _ = calls.nvfp4_experts()
    given = calls.trtllm_nvfp4_arguments(tensors, calls.tokens(), *calls.choice())
    assert_near(
        given["output1_scale_scalar"] * given["output2_scale_scalar"],
        tensors.gate_up_input_scales.max()
        * tensors.gate_up_global_scales[:, 1]
        * tensors.down_global_scales[:, 0],
    )
    assert_near(
        given["output2_scale_scalar"],
        tensors.down_input_scales[:, 0] * tensors.down_global_scales[:, 0],
    )
