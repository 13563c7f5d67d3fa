"""torch's block-scaled FP8 GEMM on Hopper, against the float reference of the format."""

from dataclasses import replace

import pytest
import torch
from fp8_linear_cases import block_layer, inputs, make, relative
from torch.nn.functional import pad

from vllm.platforms.libraries import installed_libs

pytestmark = pytest.mark.gpu
BACKEND = "scaled_mm-blockwise"
LIMIT = 4e-3
# rows, columns: squares, projections of DeepSeek-V3, a last block of half the rows, numbers of
# column blocks that are no multiple of four, one block.
SIZES = [(4096, 4096), (1536, 7168), (576, 7168), (2048, 2304), (7168, 640), (1552, 128), (16, 384)]
TOKENS = (1, 2, 3, 4, 5, 16, 17, 33, 64, 127, 130, 1000, 1023, 4096)


@pytest.fixture(autouse=True)
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of capability 9.0")
    torch_here = installed_libs().get("torch")
    if torch_here is None or "scaled-blocks" not in torch_here.archs:
        pytest.skip("needs torch for CUDA 12.9 or newer")


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_blocks_are_computed_as_the_format_says(size, m):
    n, k = size
    problem, tensors = block_layer((n,), k, has_bias=m % 2 == 1, device="cuda")
    x = inputs(m, k, "cuda")
    expected = make(problem, tensors, "emulation")(x)
    kernel = make(problem, tensors, BACKEND)
    quantised = kernel.input_quant(m).quantise(x)
    for given in (x, quantised):
        y = kernel(given)
        assert y.shape == (m, n) and y.dtype == torch.bfloat16
        assert relative(y, expected) < LIMIT


def test_every_scale_has_its_place():
    """Scales that differ by octaves, each of which is in one block alone: a product with the scale
    of another block is wrong by a factor of two or more."""
    n, k = 384, 1152  # 3 rows of 9 columns of blocks
    problem, tensors = block_layer((n,), k, device="cuda")
    tensors.scales = torch.exp2(torch.arange(27.0, device="cuda").reshape(3, 9) % 13 - 18)
    kernel, emulation = (make(problem, tensors, name) for name in (BACKEND, "emulation"))
    for m in (1, 6):
        for column in range(9):
            # One block of columns at a time, so that no larger product hides its error.
            x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
            x[:, column * 128 : column * 128 + 128] = torch.randn(m, 128, device="cuda")
            x *= torch.exp2(torch.arange(m, device="cuda"))[:, None]
            y, expected = kernel(x), emulation(x)
            for rows in range(3):
                part = slice(rows * 128, rows * 128 + 128)
                for token in range(m):
                    assert relative(y[token, part], expected[token, part]) < LIMIT


@pytest.mark.parametrize("parts", [(320, 64, 64), (576, 192, 192)])
def test_merged_parts_of_partial_blocks_are_padded(parts):
    problem, tensors = block_layer(parts, 1152, has_bias=True, device="cuda")
    x = inputs(33, 1152, "cuda")
    expected = make(problem, tensors, "emulation")(x)
    assert relative(make(problem, tensors, BACKEND)(x), expected) < LIMIT


def test_no_token_gives_no_row():
    problem, tensors = block_layer((256,), 256, device="cuda")
    assert make(problem, tensors, BACKEND)(inputs(0, 256, "cuda")).shape == (0, 256)


@pytest.mark.parametrize("m", (1, 3, 8, 129))
def test_rows_after_the_last_token_change_nothing(m):
    problem, tensors = block_layer((256,), 1152, device="cuda")
    kernel = make(problem, tensors, BACKEND)
    x = inputs(m + 8, 1152, "cuda")
    expected = kernel(x[:m].clone())
    x[m:] = float("nan")
    assert torch.equal(kernel(x[:m]), expected)
    # Quantised by what is before the layer, with NaN in the memory behind.
    given = kernel.input_quant(m).quantise(x[:m])
    behind = pad(given.q.view(torch.uint8), (0, 0, 0, 8), value=0x7F).view(given.q.dtype)
    assert torch.equal(kernel(replace(given, q=behind[:m])), expected)


@pytest.mark.parametrize("m", (1, 8))
def test_a_captured_graph_serves_other_tokens(m):
    problem, tensors = block_layer((1536,), 1152, device="cuda")
    kernel = make(problem, tensors, BACKEND)
    held = inputs(m, 1152, "cuda")
    kernel(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(held)
    held.copy_(inputs(m, 1152, "cuda") * 3)
    graph.replay()
    assert torch.equal(y, kernel(held))
