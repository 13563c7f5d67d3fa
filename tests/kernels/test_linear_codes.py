"""Linear layers of 4-bit codes: the bits of the same layer in E4M3, from half the memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.conftest import ISAS, LINEAR_ISAS, use_isa
from tests.kernels.test_linear import assert_close_to_float64, poisoned
from tests.weight_only_cases import SHARDS, make_linear, make_moe
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.backends.cpu import pack_tensors
from vllm.kernels.interface import LinearTensors
from vllm.ops import cpu_ops
from vllm.ops.nvfp4 import pack_e2m1
from vllm.ops.packed_weights import element_values, pack_with
from vllm.platforms import native

FORMATS = (
    "mxfp4",
    "nvfp4",
    "int4-group[32]",  # with zero points
    "int4-group[64]",
    "int4-group[128]",
    "int4-channel",  # with zero points
)
BATCHES = (1, 2, 3, 5, 8, 9, 13, 40, 129)
# n, k, block_k of the kernel alone: partial panels, quads and blocks.
SHAPES = ((1, 2, 1), (33, 100, 32), (100, 578, 128), (64, 130, 50), (31, 1000, 1000), (40, 30, 3))
KINDS = ("int4", "int4 with zero points", "e2m1", "e2m1 with E4M3 scales")


def make_codes(kind: str, n: int, k: int, block_k: int) -> dict[str, object]:
    """Arguments of pack_linear_codes."""
    num_blocks = -(-k // block_k)
    layer: dict[str, object] = {
        "codes": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
        "row_scales": torch.rand(n, num_blocks) + 0.5,
        "block_k": block_k,
        "bias": torch.randn(n),
        "is_e2m1": kind.startswith("e2m1"),
    }
    if kind == "int4 with zero points":
        layer["zero_points"] = torch.randint(0, 16, (n, num_blocks), dtype=torch.uint8)
    if kind == "e2m1 with E4M3 scales":
        layer["row_scales"] = torch.randint(0, 0x7F, (n, num_blocks)).to(torch.uint8)
        layer["row_scales"] = layer["row_scales"].view(torch.float8_e4m3fn)
        layer["row_factors"] = torch.rand(n) + 0.1
    return layer


def widened(layer: dict[str, object]) -> dict[str, object]:
    """The same layer as arguments of pack_linear, its codes as E4M3."""
    tensors = LinearTensors(
        WeightFormat.parse("mxfp4" if layer["is_e2m1"] else "int4-group[32]"),
        layer["codes"],
        (len(layer["codes"]),),
    )
    k = 2 * layer["codes"].shape[1]
    values = element_values(replace(tensors, zero_points=None))
    if "zero_points" in layer:
        shifts = layer["zero_points"].float().repeat_interleave(layer["block_k"], 1)[:, :k]
        values = (values.float() + 8 - shifts).to(torch.float8_e4m3fn)
    scales = layer["row_scales"].float()
    if "row_factors" in layer:
        scales = scales * layer["row_factors"][:, None]
    return {
        "weight": values,
        "row_scales": scales,
        "block_k": layer["block_k"],
        "bias": layer["bias"],
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n,k,block_k", SHAPES)
def test_results_have_the_bits_of_the_same_weight_in_e4m3(linear_isa, kind, n, k, block_k):
    layer = make_codes(kind, n, k, block_k)
    packed, wide = cpu_ops.pack_linear_codes(**layer), widened(layer)
    expected = cpu_ops.pack_linear(**wide)
    for m in BATCHES:
        x = torch.randn(m, k)
        out = poisoned(m, n)
        assert cpu_ops.linear(x, packed, out) is out
        assert torch.equal(out, cpu_ops.linear(x, expected)), m
        assert_close_to_float64(x, wide, out)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch(linear_isa, kind):
    packed = cpu_ops.pack_linear_codes(**make_codes(kind, 100, 546, 32))
    x = torch.randn(200, 546)
    whole = cpu_ops.linear(x, packed)
    for m in (*range(1, 28), 129):
        for start in (0, 3, 200 - m):
            part = cpu_ops.linear(x[start : start + m], packed)
            assert torch.equal(part, whole[start : start + m]), (m, start)


@pytest.mark.parametrize("kind", KINDS)
def test_avx512_and_avx2_give_the_same_bits(kind):
    packed = cpu_ops.pack_linear_codes(**make_codes(kind, 100, 546, 32))
    default = native.load().cpu_isa()
    for m in (1, 7, 40):
        x = torch.randn(m, 546)
        results = []
        for name in ISAS[:2]:
            use_isa(name)
            results.append(cpu_ops.linear(x, packed))
        native.load(default)
        assert torch.equal(*results)


def test_every_code_is_widened_exactly_at_every_place_of_a_quad(linear_isa):
    # Column c of the layer has the codes c, c + 1, ...: each code at each row and lane.
    codes = (torch.arange(32)[:, None] + torch.arange(20)) % 16
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for is_e2m1, values in ((False, torch.arange(16) - 8.0), (True, torch.cat((e2m1, -e2m1)))):
        packed = cpu_ops.pack_linear_codes(
            pack_e2m1(codes.to(torch.uint8)), torch.ones(32, 1), 20, is_e2m1=is_e2m1
        )
        for m in (1, 3, 20):
            one_hot = torch.eye(20)[:m]
            assert torch.equal(cpu_ops.linear(one_hot, packed), values[codes[:, :m].T])


def test_every_code_less_every_zero_point_is_exact(linear_isa):
    codes = pack_e2m1(torch.arange(16, dtype=torch.uint8).repeat(16, 1))
    zeros = torch.arange(16, dtype=torch.uint8).unsqueeze(1)
    packed = cpu_ops.pack_linear_codes(codes, torch.ones(16, 1), 16, zero_points=zeros)
    expected = torch.arange(16.0)[:, None] - torch.arange(16.0)
    for m in (1, 2, 16):
        assert torch.equal(cpu_ops.linear(torch.eye(16)[:m], packed), expected[:m])


@settings(max_examples=100, deadline=None)
@given(
    m=st.integers(0, 30),
    n=st.integers(1, 70),
    half_k=st.integers(1, 150),
    block_k=st.integers(1, 310),
    kind=st.sampled_from(KINDS),
    x_dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    isa_name=st.sampled_from(LINEAR_ISAS),
)
def test_any_size_has_the_bits_of_the_weight_in_e4m3(
    m, n, half_k, block_k, kind, x_dtype, isa_name
):
    default = native.load().cpu_isa()
    use_isa(isa_name)
    layer = make_codes(kind, n, 2 * half_k, block_k)
    x = torch.randn(m, 2 * half_k).to(x_dtype)
    out = poisoned(m, n, dtype=x_dtype)
    cpu_ops.linear(x, cpu_ops.pack_linear_codes(**layer), out)
    expected = cpu_ops.linear(x, cpu_ops.pack_linear(**widened(layer)))
    native.load(default)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_layers_of_every_format_have_the_bits_of_the_weight_in_e4m3(weight_format, shards):
    tensors, _ = make_linear(weight_format, shards, 416)
    x = torch.randn(9, 416)
    expected = cpu_ops.linear(x, pack_with(cpu_ops.pack_linear, tensors))
    assert torch.equal(cpu_ops.linear(x, pack_tensors(tensors)), expected)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_experts_have_the_bits_of_the_weight_in_e4m3(weight_format):
    experts, _ = make_moe(weight_format, 3, 128, 256)
    x = torch.randn(4, 128)
    for index in range(3):
        for part in experts.expert(index):
            rows = x.repeat(1, 2)[:, : 2 * part.weight.shape[1]]
            expected = cpu_ops.linear(rows, pack_with(cpu_ops.pack_linear, part))
            assert torch.equal(cpu_ops.linear(rows, pack_tensors(part)), expected)


# Bits for each weight: 4, and the scale and zero point of its group.
@pytest.mark.parametrize(
    "weight_format,bits",
    [
        ("mxfp4", 4.5),
        ("nvfp4", 4.5),
        ("int4-group[32]", 4.75),
        ("int4-group[64]", 4.25),
        ("int4-group[128]", 4.125),
    ],
)
def test_a_packed_weight_takes_its_four_bits_and_its_scales(weight_format, bits):
    packed = pack_tensors(make_linear(weight_format, (512,), 1024)[0])
    of_rows = 2 * 4 * 512  # bias, and NVFP4's global scales
    assert packed.num_bytes <= 512 * 1024 * bits / 8 + of_rows


def test_scales_that_16_bits_do_not_hold_stay_float32():
    scales = torch.tensor([[1.0 + 2.0**-20]])
    packed = cpu_ops.pack_linear_codes(torch.tensor([[0x99]], dtype=torch.uint8), scales, 2)
    assert cpu_ops.linear(torch.tensor([[1.0, 0.0]]), packed).item() == scales.item()


def test_rows_of_codes_may_be_apart():
    layer = make_codes("int4", 40, 100, 32)
    wide = torch.zeros(40, 80, dtype=torch.uint8)
    wide[:, 20:70] = layer["codes"]
    x = torch.randn(2, 100)
    expected = cpu_ops.linear(x, cpu_ops.pack_linear_codes(**layer))
    apart = cpu_ops.pack_linear_codes(**{**layer, "codes": wide[:, 20:70]})
    assert torch.equal(cpu_ops.linear(x, apart), expected)


def of_other_codes(packed: cpu_ops.LinearWeight, code_type: int) -> cpu_ops.LinearWeight:
    return replace(packed, code_type=code_type)


def test_wrong_codes_are_refused():
    def expect(message: str, **changes: Tensor | int | bool) -> None:
        layer = make_codes("int4 with zero points", 40, 100, 32) | changes
        with pytest.raises(ValueError, match=message):
            cpu_ops.pack_linear_codes(**layer)

    expect(r"codes: given torch.int8 of shape \[4, 4\]", codes=torch.ones(4, 4, dtype=torch.int8))
    expect(r"codes: .*shape \[50\]; accepted: \[n, k / 2\]", codes=torch.ones(50).byte())
    expect("codes: given a last dimension with stride 40", codes=torch.ones(50, 40).byte().T)
    expect("block_k: given 0; accepted: 1 or more", block_k=0)
    expect(r"row_scales: .*\[40, 3\]; accepted: .*\[40, 4\]", row_scales=torch.ones(40, 3))
    expect("row_scales: given torch.float64", row_scales=torch.ones(40, 4).double())
    nans = torch.full((40, 4), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expect("row_scales: given E4M3 NaN codes", row_scales=nans)
    expect("zero_points: given torch.float32", zero_points=torch.ones(40, 4))
    expect(r"zero_points: .*\[40, 1\]; accepted: .*\[40, 4\]", zero_points=torch.ones(40, 1).byte())
    expect("zero_points: given with E2M1 codes", is_e2m1=True)
    expect(r"row_factors: .*\[3\]; accepted: .*\[40\]", row_factors=torch.ones(3))
    expect(r"bias: .*\[39\]; accepted: .*\[40\]", bias=torch.ones(39))


def test_codes_of_one_kind_are_not_computed_as_another():
    x = torch.randn(1, 100)
    packed = cpu_ops.pack_linear_codes(**make_codes("int4", 40, 100, 32))
    with pytest.raises(ValueError, match=r"code_type: given 4; accepted: 0 .none., 1"):
        cpu_ops.linear(x, of_other_codes(packed, 4))
    with pytest.raises(ValueError, match=r"zero_points: given none; .*code_type 2"):
        cpu_ops.linear(x, of_other_codes(packed, 2))
    with pytest.raises(ValueError, match=r"weight: .*dimension 1 must be 100 .columns of x"):
        cpu_ops.linear(x, of_other_codes(packed, 0))
    with pytest.raises(ValueError, match=r"scales: .*dimension 1 must be 4 .blocks of block_k"):
        cpu_ops.linear(x, replace(packed, scales=packed.scales[:, :3]))
    with pytest.raises(ValueError, match=r"scale_factors: .*must be 64 .padded columns"):
        cpu_ops.linear(x, replace(packed, scale_factors=torch.ones(40)))
    zeros = cpu_ops.pack_linear_codes(**make_codes("int4 with zero points", 40, 100, 32))
    with pytest.raises(ValueError, match=r"zero_points: given none.*code_type 2"):
        cpu_ops.linear(x, replace(zeros, zero_points=None))
    with pytest.raises(ValueError, match="zero_points: given some"):
        cpu_ops.linear(x, of_other_codes(zeros, 1))
