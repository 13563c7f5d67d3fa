"""vllm._custom_ops on CPU tensors: its choices, layouts, refusals, and what it tells torch."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_packed_for_deepgemm,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.ops import torch_ops
from vllm.ops.fp4_ops import (
    scaled_fp4_quant_grouped,
    silu_and_mul_scaled_fp4_quant,
    silu_and_mul_scaled_fp4_quant_grouped,
)
from vllm.ops.fp8_quant import (
    ScaleLayout,
    per_token_group_fp8_quant,
    rms_norm_group_quant,
    silu_and_mul_group_quant,
)
from vllm.ops.nvfp4 import nvfp4_quantize
from vllm.platforms import native
from vllm.utils.fp8 import FP8, round_to_fp8

SHAPES = [(0, 256), (1, 128), (3, 300), (5, 1152)]


def same(given: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    (q, scales), (expected_q, expected_scales) = given, expected
    assert q.dtype == expected_q.dtype and scales.dtype == expected_scales.dtype
    is_same_q = torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))
    return is_same_q and torch.equal(scales, expected_scales)


# ---------------------------------------------------------------- scaled_fp8_quant


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize(
    ("arguments", "group_shape"),
    [
        ({}, GroupShape.PER_TENSOR),
        ({"group_shape": (-1, -1)}, GroupShape.PER_TENSOR),
        ({"use_per_token_if_dynamic": True}, GroupShape.PER_TOKEN),
        ({"group_shape": (1, -1)}, GroupShape.PER_TOKEN),
        ({"group_shape": (1, 128)}, GroupShape(1, 128)),
        ({"group_shape": (1, 32)}, GroupShape(1, 32)),
    ],
)
def test_computed_scales_are_those_of_the_reference(shape, arguments, group_shape):
    x = torch.randn(shape).bfloat16()
    expected = QuantFP8(False, group_shape, use_ue8m0=False if group_shape.col > 0 else None)(x)
    assert same(ops.scaled_fp8_quant(x, **arguments), expected)


def test_a_given_scale_comes_back_and_divides_every_element():
    x, scale = torch.randn(4, 96).half(), torch.tensor(0.3)
    q, returned = ops.scaled_fp8_quant(x, scale)
    assert returned is scale
    assert same((q, scale), (round_to_fp8(x, scale), scale))


@pytest.mark.parametrize(
    ("scale_shape", "group_shape", "grid", "block"),
    [
        ((4, 3), None, (4, 3), (1, 40)),
        ((4, 1), None, (4, 1), (1, 120)),
        ((120,), (-1, 1), (1, 120), (4, 1)),
        ((4,), (1, -1), (4, 1), (1, 120)),
        ((2, 2), (3, 64), (2, 2), (3, 64)),
    ],
)
def test_given_scales_of_blocks_divide_their_block(scale_shape, group_shape, grid, block):
    x, scale = torch.randn(4, 120), torch.rand(scale_shape) + 0.1
    q, _ = ops.scaled_fp8_quant(x, scale, group_shape=group_shape)
    for row in range(4):
        for column in range(120):
            own = scale.view(grid)[row // block[0], column // block[1]]
            assert q[row, column].float() == round_to_fp8(x[row, column], own).float()


def test_padding_adds_rows_of_zeros_and_no_scales():
    x = torch.randn(3, 64)
    q, scales = ops.scaled_fp8_quant(x, num_token_padding=17, use_per_token_if_dynamic=True)
    assert q.shape == (17, 64) and scales.shape == (3, 1)
    assert not q[3:].float().any()
    assert same((q[:3], scales), ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True))
    assert ops.scaled_fp8_quant(x, num_token_padding=2)[0].shape == (3, 64)


def test_the_upper_bound_limits_scales_but_not_nan():
    x = torch.tensor([[1.0, 100.0], [1.0, 2.0], [1.0, float("nan")]])
    q, scales = ops.scaled_fp8_quant(
        x, use_per_token_if_dynamic=True, scale_ub=torch.tensor([44.8])
    )
    assert torch.allclose(scales[:2], torch.tensor([[0.1], [2 / 448]])) and scales[2].isnan()
    assert q[0].float().tolist() == [10.0, 448.0]


def test_output_is_filled_in_place():
    x, output = torch.randn(3, 64), torch.empty(3, 64, dtype=FP8)
    q, _ = ops.scaled_fp8_quant(x, output=output)
    assert q is output and same((q, x), (ops.scaled_fp8_quant(x)[0], x))


@pytest.mark.parametrize("arguments", [{}, {"group_shape": (1, -1)}, {"group_shape": (1, 128)}])
def test_an_empty_input_has_empty_results(arguments):
    q, scales = ops.scaled_fp8_quant(torch.empty(0, 256), **arguments)
    assert q.shape == (0, 256)
    assert scales.shape[0] == (0 if arguments else 1) and scales.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input": torch.ones(2)}, r"input: given shape \[2\]; accepted: \[tokens, columns\]"),
        (
            {"output": torch.empty(3, 8, dtype=FP8), "num_token_padding": 9},
            "num_token_padding and output: give one",
        ),
        ({"output": torch.empty(2, 8, dtype=FP8)}, r"output: given .* \[2, 8\]; .*\[3, 8\]"),
        ({"output": torch.empty(3, 8)}, "output: given torch.float32"),
        ({"scale": torch.ones(1), "scale_ub": torch.ones(1)}, "leave scale out"),
        ({"scale": torch.ones(1), "use_per_token_if_dynamic": True}, "leave scale out"),
        ({"scale": torch.ones(3)}, r"scale: given shape \[3\] for an input of \[3, 8\]"),
        ({"scale": torch.ones(2, 2)}, r"scale: given shape \[2, 2\]"),
        ({"scale": torch.ones(5), "group_shape": (1, -1)}, r"given 5 elements; .*\[3, 1\]"),
        ({"scale_ub": torch.ones(1)}, "scale_ub is for scales per token"),
        ({"group_shape": (128, 128)}, r"group_shape: given \(128, 128\) without a scale"),
        ({"group_shape": (1, 4), "use_per_token_if_dynamic": True}, "contradicts"),
    ],
)
def test_combinations_without_a_meaning_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ops.scaled_fp8_quant(**{"input": torch.ones(3, 8), **arguments})


# ---------------------------------------------------------------- groups


QUANTISERS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "plain": lambda x, **layout: per_token_group_fp8_quant(x, **layout),
    "silu": lambda x, **layout: silu_and_mul_group_quant(torch.cat([x, x], -1), **layout),
    "norm": lambda x, **layout: rms_norm_group_quant(x, torch.ones(x.shape[1]), 1e-6, **layout),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", QUANTISERS)
def test_layouts_hold_the_same_scales(kind, shape):
    x, quantise = torch.randn(shape).bfloat16(), QUANTISERS[kind]
    q, scales = quantise(x, use_ue8m0=True)
    rows, groups = scales.shape
    assert scales.is_contiguous() and scales.dtype == torch.float32
    _, column_major = quantise(x, layout=ScaleLayout.COLUMN_MAJOR, use_ue8m0=True)
    assert torch.equal(column_major, scales) and column_major.t().is_contiguous()
    aligned_rows = -(rows // -4) * 4
    _, aligned = quantise(x, layout=ScaleLayout.TMA_ALIGNED, use_ue8m0=True)
    assert torch.equal(aligned, scales)
    packed_q, packed = quantise(x, layout=ScaleLayout.PACKED_UE8M0)
    assert torch.equal(packed_q.view(torch.uint8), q.view(torch.uint8))
    assert packed.dtype == torch.int32 and packed.shape == (rows, -(groups // -4))
    if rows:
        assert aligned.stride() == packed.stride() == (1, aligned_rows)
        exponents = (packed.unsqueeze(-1) >> torch.arange(0, 32, 8) & 0xFF).flatten(1)
        assert torch.equal(exponents[:, :groups], scales.view(torch.int32) >> 23)
        assert not exponents[:, groups:].any()


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_results_are_those_of_the_references(shape):
    x, weight = torch.randn(shape).bfloat16(), torch.rand(shape[1])
    assert same(per_token_group_fp8_quant(x), per_token_group_quant_fp8(x, 128, use_ue8m0=False))
    packed = per_token_group_fp8_quant(x, layout=ScaleLayout.PACKED_UE8M0)
    assert same(packed, per_token_group_quant_fp8_packed_for_deepgemm(x, 128))
    gated = torch.cat([x, x.flip(0)], -1)
    expected = per_token_group_quant_fp8(torch_ops.silu_and_mul(gated), 128, use_ue8m0=False)
    assert same(silu_and_mul_group_quant(gated), expected)
    normed = torch_ops.rms_norm(x, weight, 1e-5)
    expected = per_token_group_quant_fp8(normed, 128, use_ue8m0=False)
    assert same(rms_norm_group_quant(x, weight, 1e-5), expected)


def test_the_residual_is_updated_in_place_and_its_norm_quantised():
    x, residual, weight = torch.randn(3, 256).half(), torch.randn(3, 256).half(), torch.rand(256)
    before, total = x.clone(), residual + x
    given = rms_norm_group_quant(x, weight, 1e-6, residual)
    assert torch.equal(residual, total) and torch.equal(x, before)
    assert same(given, rms_norm_group_quant(total, weight, 1e-6))


def test_the_norm_is_kept_beside_its_quantised_values():
    x, weight = torch.randn(3, 256).bfloat16(), torch.rand(256)
    normed = torch.full_like(x, float("nan"))
    given = rms_norm_group_quant(x, weight, 1e-6, normed=normed)
    assert torch.equal(normed, torch_ops.rms_norm(x, weight, 1e-6))
    assert same(given, per_token_group_fp8_quant(normed))


def test_filling_rows_are_zeros():
    scales = torch.full((2, 8), float("nan")).t()
    q = torch.empty(5, 256, dtype=FP8)
    torch.ops.vllm.fp8_quant_group(torch.randn(5, 256), q, scales, 128, 1e-10, False)
    assert scales[:5].isfinite().all() and not scales[5:].any()


def test_silu_needs_an_even_number_of_columns():
    with pytest.raises(ValueError, match="input: given 7 columns; accepted: an even number"):
        silu_and_mul_group_quant(torch.ones(1, 7))


# ---------------------------------------------------------------- NVFP4


@pytest.mark.parametrize("is_swizzled", [True, False])
@pytest.mark.parametrize("shape", [(0, 64), (1, 16), (130, 80), (256, 128)])
def test_nvfp4_results_are_those_of_the_reference(shape, is_swizzled):
    x, global_scale = torch.randn(shape).half(), torch.tensor(350.0)
    q, scales = ops.scaled_fp4_quant(x, global_scale, is_sf_swizzled_layout=is_swizzled)
    expected_q, expected_scales = nvfp4_quantize(x, global_scale, is_swizzled)
    assert q.dtype == torch.uint8 and scales.dtype == FP8
    assert torch.equal(q, expected_q)
    assert torch.equal(scales.view(torch.uint8), expected_scales.view(torch.uint8))


def test_nvfp4_needs_whole_groups():
    with pytest.raises(ValueError, match=r"input: given shape \(1, 24\).*a multiple of 16"):
        ops.scaled_fp4_quant(torch.ones(1, 24).half(), torch.ones(1))
    with pytest.raises(ValueError, match=r"input: given shape \(1, 48\).*a multiple of 32"):
        silu_and_mul_scaled_fp4_quant(torch.ones(1, 48).half(), torch.ones(1))


@pytest.mark.parametrize("is_swizzled", [False, True])
def test_gated_nvfp4_results_are_those_of_the_product(is_swizzled):
    x, global_scale = torch.randn(130, 96).bfloat16(), torch.tensor([350.0])
    gated = torch_ops.silu_and_mul(x)
    given = silu_and_mul_scaled_fp4_quant(x, global_scale, is_swizzled)
    for one, other in zip(given, ops.scaled_fp4_quant(gated, global_scale, is_swizzled)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_grouped_nvfp4_results_are_those_of_each_expert():
    x, global_scales = torch.randn(200, 64).half(), torch.tensor([300.0, 200.0, 500.0])
    offsets = torch.tensor([0, 130, 130, 200], dtype=torch.int32)
    q, scales = scaled_fp4_quant_grouped(x, global_scales, offsets)
    first, first_scales = ops.scaled_fp4_quant(x[:130], global_scales[:1])
    last, last_scales = ops.scaled_fp4_quant(x[130:], global_scales[2:])
    assert torch.equal(q, torch.cat((first, last)))
    expected = torch.cat((first_scales.view(torch.uint8), last_scales.view(torch.uint8)))
    assert torch.equal(scales.view(torch.uint8)[: len(expected)], expected)
    gated = torch.cat((x, x), 1)
    q2, _ = silu_and_mul_scaled_fp4_quant_grouped(gated, global_scales, offsets)
    q3, _ = scaled_fp4_quant_grouped(torch_ops.silu_and_mul(gated), global_scales, offsets)
    assert torch.equal(q2, q3)


# ---------------------------------------------------------------- what torch is told


def _op_arguments() -> dict[str, tuple]:
    x, q = torch.randn(3, 256), torch.empty(3, 256, dtype=FP8)
    group = (q, torch.empty(3, 2), 128, 1e-10, False)
    return {
        "fp8_quant_static": (x, torch.ones(1), q),
        "fp8_quant_tensor": (x, q, torch.empty(1), 1e-10),
        "fp8_quant_token": (x, q, torch.empty(3), 1e-10, torch.ones(1)),
        "fp8_quant_group": (x, *group),
        "silu_and_mul_fp8_quant_group": (torch.randn(3, 512), *group),
        "rms_norm_fp8_quant_group": (
            x,
            torch.randn(3, 256),
            torch.ones(256),
            1e-6,
            torch.empty(3, 256),
            *group,
        ),
        "nvfp4_quant": (
            x.bfloat16(),
            torch.ones(1),
            torch.empty(3, 128, dtype=torch.uint8),
            torch.empty(3, 16, dtype=FP8),
            False,
        ),
        "nvfp4_quant_grouped": (
            x.bfloat16(),
            torch.ones(2),
            torch.tensor([0, 2, 5]),
            torch.tensor([0, 3, 5, 1, 2, 4], dtype=torch.int32),
            2,
            torch.empty(6, 128, dtype=torch.uint8),
            torch.empty(256, 16, dtype=FP8),
        ),
        "cutlass_nvfp4_gemm_grouped": (
            torch.zeros(6, 16, dtype=torch.uint8),
            torch.zeros(256, 4).to(FP8),
            torch.zeros(4, 8, 16, dtype=torch.uint8),
            torch.zeros(4, 128, 4).to(FP8),
            torch.ones(4),
            torch.tensor([0, 2, 5], dtype=torch.int32),
            torch.empty(6, 16),
        ),
    }


@pytest.mark.parametrize("name", _op_arguments())
def test_fake_implementations_and_autograd_keys_are_right(name):
    # torch's own test_schema computes with copies of the arguments, which E4M3 has no kernels for.
    op = getattr(torch.ops.vllm, name).default
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, _op_arguments()[name], test_utils=utils)


@pytest.mark.parametrize("name", _op_arguments())
def test_schemas_name_exactly_the_arguments_that_change(name):
    op, arguments = getattr(torch.ops.vllm, name).default, _op_arguments()[name]
    for tensor in arguments:
        if isinstance(tensor, Tensor) and tensor.dtype in (FP8, torch.uint8):
            tensor.view(torch.uint8).fill_(0x7F)  # so that writing shows
    before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    op(*arguments)
    for declared, old, new in zip(op._schema.arguments, before, arguments):
        if isinstance(new, Tensor):
            has_changed = not torch.equal(old.view(torch.uint8), new.view(torch.uint8))
            assert has_changed == (declared.alias_info is not None), declared.name


def test_plain_tensors_reach_the_same_function_without_the_dispatcher(monkeypatch):
    x = torch.randn(5, 256).bfloat16()
    expected = torch.empty(5, 256, dtype=FP8), torch.empty(5, 2)
    torch.ops.vllm.fp8_quant_group(x, *expected, 128, 1e-10, False)
    dispatched = []
    monkeypatch.setattr(
        torch._ops.OpOverloadPacket, "__call__", lambda op, *_: dispatched.append(op)
    )
    assert same(per_token_group_fp8_quant(x), expected) and not dispatched
    per_token_group_fp8_quant(torch.nn.Parameter(x))
    assert len(dispatched) == 1, "of a subclass, which may want to know"
    per_token_group_fp8_quant(x.to("meta"))
    assert len(dispatched) == 2, "without data, for which there is a fake"


def test_who_traces_real_tensors_sees_ops():
    from torch.fx.experimental.proxy_tensor import make_fx

    def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
        return per_token_group_fp8_quant(x)

    x, other = torch.randn(2, 5, 256).bfloat16()
    traced, compiled = make_fx(quantise)(x), []

    def backend(graph, _):
        compiled.extend(node.target for node in graph.graph.nodes)
        return graph

    whole = torch.compile(quantise, fullgraph=True, backend=backend)
    assert same(whole(other), quantise(other)) and same(traced(other), quantise(other))
    assert torch.ops.vllm.fp8_quant_group.default in [node.target for node in traced.graph.nodes]
    assert torch.ops.vllm.fp8_quant_group in compiled


def test_functions_trace_to_ops_without_computing():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(5, 512, dtype=torch.bfloat16)
        q, scales = per_token_group_fp8_quant(x, layout=ScaleLayout.TMA_ALIGNED)
        assert q.shape == (5, 512) and scales.shape == (5, 4) and scales.stride() == (1, 8)
        assert silu_and_mul_group_quant(x)[0].shape == (5, 256)
        assert ops.scaled_fp8_quant(x)[1].shape == (1,)


# ---------------------------------------------------------------- what this build can multiply


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """manifest(kernels) makes it that of the library; without a call there is no library."""
    monkeypatch.setattr(native, "LIBRARY_DIR", tmp_path)
    native.manifest.cache_clear()

    def write(kernels: dict[str, list[str]]) -> None:
        content = {"version": "0", "compiler": "", "kernels": kernels}
        (tmp_path / native.MANIFEST_NAME).write_text(json.dumps(content))

    yield write
    native.manifest.cache_clear()


def test_support_follows_the_manifest(manifest):
    manifest(
        {
            "sm90_fp8_block_gemm": ["90a", "compute_90"],
            "sm100_fp8_block_gemm": ["100f"],
            "sm100_nvfp4_gemm": ["100a"],
            "sm120_nvfp4_gemm": ["121a"],
        }
    )
    chips = (80, 89, 90, 100, 103, 120, 121)
    assert [n for n in chips if ops.cutlass_scaled_mm_supports_block_fp8(n)] == [90, 100, 103]
    assert [n for n in chips if ops.cutlass_scaled_mm_supports_fp4(n)] == [100, 121]


def test_scales_per_tensor_and_channel_are_torchs_to_multiply():
    chips = (75, 80, 89, 90, 100, 110, 120, 121)
    assert [n for n in chips if ops.cutlass_scaled_mm_supports_fp8(n)] == [89, 90, 100, 120, 121]


def test_without_a_library_nothing_of_ours_is_supported_and_cpu_tensors_still_work(manifest):
    assert not ops.cutlass_scaled_mm_supports_block_fp8(90)
    assert ops.scaled_fp8_quant(torch.ones(2, 4))[0].float().unique().tolist() == [448.0]
