"""cpu_ops.linear against float64 products, and the same bits whatever is computed beside a row."""

import multiprocessing
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.conftest import ISAS, LINEAR_ISAS, use_isa
from vllm.ops import cpu_ops, torch_ops
from vllm.platforms import native

E4M3 = torch.float8_e4m3fn
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, E4M3)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# n, k, block_k: one column, partial panels, partial and odd blocks, blocks longer than any buffer.
SHAPES = (
    (1, 1, 1),
    (33, 100, 128),
    (100, 577, 128),
    (64, 130, 50),
    (31, 1000, 1000),
    (96, 1537, 384),
)
BATCHES = (1, 2, 3, 4, 7, 12, 13, 40, 129)


def make_layer(n: int, k: int, block_k: int, dtype: torch.dtype) -> dict[str, Tensor | int]:
    return {
        "weight": torch.randn(n, k).to(dtype),
        "row_scales": torch.rand(n, -(-k // block_k)) + 0.5,
        "block_k": block_k,
        "bias": torch.randn(n),
    }


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def assert_close_to_float64(x: Tensor, layer: dict[str, Tensor | int], out: Tensor) -> None:
    weight = torch_ops.pack_linear(**layer).dequantize().double()
    expected = x.double() @ weight.T + layer["bias"]
    magnitude = x.double().abs() @ weight.abs().T + layer["bias"].abs()
    # float32 chains of a few hundred terms, then one rounding to the output type
    bound = magnitude * 2e-6 + expected.abs() * torch.finfo(out.dtype).eps
    error = (out.double() - expected).abs()
    assert bool((error <= bound).all()), (error / bound).max()


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("n,k,block_k", SHAPES)
def test_linear_is_the_scaled_product_plus_bias(linear_isa, n, k, block_k, dtype):
    layer = make_layer(n, k, block_k, dtype)
    packed = cpu_ops.pack_linear(**layer)
    for m in BATCHES:
        x = torch.randn(m, k)
        out = poisoned(m, n)
        assert cpu_ops.linear(x, packed, out) is out
        assert_close_to_float64(x, layer, out)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("m", (1, 2, 40))
def test_linear_takes_and_gives_half_precision(linear_isa, m, dtype):
    layer = make_layer(100, 577, 128, E4M3)
    x = torch.randn(m, 577).to(dtype)
    out = cpu_ops.linear(x, cpu_ops.pack_linear(**layer))
    assert out.dtype == dtype
    assert_close_to_float64(x, layer, out)


def test_reference_and_kernel_agree(linear_isa):
    layer = make_layer(96, 577, 128, E4M3)
    x = torch.randn(9, 577)
    torch.testing.assert_close(
        cpu_ops.linear(x, cpu_ops.pack_linear(**layer)),
        torch_ops.linear(x, torch_ops.pack_linear(**layer)),
        atol=2e-4,
        rtol=1e-5,
    )


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("n,k,block_k", ((100, 577, 128), (33, 1000, 1000)))
def test_a_row_has_the_same_bits_in_every_batch(linear_isa, n, k, block_k, dtype):
    packed = cpu_ops.pack_linear(**make_layer(n, k, block_k, dtype))
    x = torch.randn(500, k)
    whole = cpu_ops.linear(x, packed)
    for m in (*range(1, 41), 129, 385):
        for start in (0, 3, 500 - m):
            part = cpu_ops.linear(x[start : start + m], packed)
            assert torch.equal(part, whole[start : start + m]), (m, start)


@pytest.mark.parametrize("m", (1, 7, 40))
def test_avx512_and_avx2_give_the_same_bits(m):
    layer = make_layer(100, 577, 128, E4M3)
    packed = cpu_ops.pack_linear(**layer)
    x = torch.randn(m, 577)
    default = native.load().cpu_isa()
    results = []
    for name in ISAS[:2]:
        use_isa(name)
        results.append(cpu_ops.linear(x, packed))
    native.load(default)
    assert torch.equal(*results)


def test_every_e4m3_code_is_decoded_exactly(linear_isa):
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    values = finite.view(E4M3).float()
    assert len(finite) == 254
    column = cpu_ops.pack_linear(finite.view(E4M3).unsqueeze(1))
    row = cpu_ops.pack_linear(finite.view(E4M3).unsqueeze(0))
    for m in (1, 3, 20):
        assert torch.equal(cpu_ops.linear(torch.ones(m, 1), column), values.expand(m, 254))
        one_hot = torch.eye(254).repeat(m, 1)
        assert torch.equal(cpu_ops.linear(one_hot, row).squeeze(1), values.repeat(m))
        for k in range(0, 254, 17):
            assert torch.equal(cpu_ops.linear(one_hot[k : k + 1], row)[0], values[k : k + 1])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_every_finite_half_precision_weight_is_widened_exactly(linear_isa, dtype):
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    packed = cpu_ops.pack_linear(values.unsqueeze(1))
    for m in (1, 20):
        out = cpu_ops.linear(torch.ones(m, 1), packed)
        assert torch.equal(out, values.float().expand(m, -1))


def test_e4m3_nan_codes_are_refused_and_counted():
    weight = torch.randn(40, 50).to(E4M3)
    weight.view(torch.uint8)[3, 7] = 0x7F
    weight.view(torch.uint8)[39, 49] = 0xFF
    with pytest.raises(ValueError, match="2 E4M3 NaN codes"):
        cpu_ops.pack_linear(weight)


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(0, 30),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    block_k=st.integers(1, 310),
    dtype=st.sampled_from(WEIGHT_DTYPES),
    x_dtype=st.sampled_from(FLOAT_DTYPES),
    isa_name=st.sampled_from(LINEAR_ISAS),
)
def test_small_integers_are_multiplied_exactly(m, n, k, block_k, dtype, x_dtype, isa_name):
    default = native.load().cpu_isa()
    use_isa(isa_name)
    weight = torch.randint(-1, 2, (n, k)).to(dtype)
    scales = torch.randint(1, 3, (n, -(-k // block_k))).float()
    x = torch.randint(-1, 2, (m, k)).to(x_dtype)
    if x_dtype == torch.bfloat16:  # sums up to 256 are exact in bfloat16
        x[:, 120:] = 0
    bias = torch.randint(-2, 3, (n,)).float()
    layer = (weight, scales, block_k, bias)
    out = poisoned(m, n, dtype=x_dtype)
    cpu_ops.linear(x, cpu_ops.pack_linear(*layer), out)
    native.load(default)
    assert torch.equal(out, torch_ops.linear(x, torch_ops.pack_linear(*layer)))


def test_rows_of_input_weight_and_output_may_be_apart(linear_isa):
    layer = make_layer(70, 130, 64, E4M3)
    wide = torch.zeros(70, 200, dtype=torch.uint8).view(E4M3)
    wide.view(torch.uint8)[:, 30:160] = layer["weight"].view(torch.uint8)
    strided = cpu_ops.pack_linear(**{**layer, "weight": wide[:, 30:160]})
    packed = cpu_ops.pack_linear(**layer)
    for m in (1, 2, 33):
        x = torch.randn(m, 300)[:, 10:140]
        expected = cpu_ops.linear(x.contiguous(), packed)
        out = poisoned(m, 100)
        cpu_ops.linear(x, strided, out[:, 5:75])
        assert torch.equal(out[:, 5:75], expected)
        assert out[:, :5].isnan().all() and out[:, 75:].isnan().all()


def test_merged_layers_with_partial_blocks_equal_their_parts(linear_isa):
    parts = [make_layer(n, 576, 128, E4M3) for n in (576, 192, 192)]
    merged = {
        "weight": torch.cat([p["weight"].view(torch.uint8) for p in parts]).view(E4M3),
        "row_scales": torch.cat([p["row_scales"] for p in parts]),
        "block_k": 128,
        "bias": torch.cat([p["bias"] for p in parts]),
    }
    x = torch.randn(5, 576)
    separate = [cpu_ops.linear(x, cpu_ops.pack_linear(**p)) for p in parts]
    assert torch.equal(cpu_ops.linear(x, cpu_ops.pack_linear(**merged)), torch.cat(separate, 1))


@pytest.mark.parametrize("threads", (1, 2, 3, 7))
def test_bits_do_not_depend_on_the_number_of_threads(num_threads, threads):
    packed = cpu_ops.pack_linear(**make_layer(960, 576, 128, E4M3))
    x = torch.randn(40, 576)
    expected = [cpu_ops.linear(x[:m], packed) for m in (1, 8, 40)]
    native.load().cpu_set_num_threads(threads)
    for _ in range(200):
        for m, result in zip((1, 8, 40), expected, strict=True):
            assert torch.equal(cpu_ops.linear(x[:m], packed), result)


def test_calls_from_several_python_threads_do_not_disturb_each_other(num_threads):
    native.load().cpu_set_num_threads(3)
    packed = cpu_ops.pack_linear(**make_layer(960, 576, 128, E4M3))
    inputs = [torch.randn(m, 576) for m in (1, 5, 9, 20)]
    expected = [cpu_ops.linear(x, packed) for x in inputs]
    num_wrong = []

    def run(x: Tensor, result: Tensor) -> None:
        wrong = sum(not torch.equal(cpu_ops.linear(x, packed), result) for _ in range(200))
        num_wrong.append(wrong)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(inputs, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_wrong == [0, 0, 0, 0]


def _linear_in_child(packed: cpu_ops.LinearWeight, x: Tensor, queue) -> None:
    queue.put(cpu_ops.linear(x, packed).tolist())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_computes_too(num_threads):
    native.load().cpu_set_num_threads(2)
    packed = cpu_ops.pack_linear(**make_layer(960, 576, 128, E4M3))
    x = torch.randn(2, 576)
    expected = cpu_ops.linear(x, packed)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_linear_in_child, args=(packed, x, queue))
    child.start()
    assert queue.get(timeout=120) == expected.tolist()
    child.join(timeout=120)
