"""DeepGEMM on Hopper: the library works here, reads our layouts, and computes what they say.

Needs a 9.0 GPU, nvcc and sgl-deep-gemm 0.1.3; besides torch, pytest alone. The first run compiles.
"""

import subprocess
import sys
from itertools import product

import pytest
import torch

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.backends import deep_gemm as backend
from vllm.kernels.interface import LinearTensors
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.select import select
from vllm.machine import Device, Libs
from vllm.platforms.libraries import library_state
from vllm.utils import deep_gemm
from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT, calc_diff

pytestmark = pytest.mark.gpu

H100 = Device.parse("sm_90")
# The largest difference of these cases is 2.6e-5 on an H100; scales of another form would cost over
# 1e-4.
TOLERANCE = 5e-5
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module", autouse=True)
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of capability 9.0")
    pytest.importorskip("deep_gemm")
    torch.manual_seed(0)


# ---------------------------------------------------------------- the numbers, worked out here


def power_of_two_at_least(x):
    """Exact: float64 log2 of a float32 power of two is an integer."""
    return torch.exp2(torch.ceil(torch.log2(x.double()))).float()


def quantised(x, rows, use_ue8m0):
    """x as blocks of `rows` x 128 hold it: q * scale in float32, and q."""
    num_rows, k = x.shape
    spare = -num_rows % rows
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, spare))
    blocks = padded.view(-1, rows, k // 128, 128)
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-10) / 448
    if use_ue8m0:
        scales = power_of_two_at_least(scales)
    q = (blocks / scales).clamp(-448, 448).to(FP8)
    held = (q.float() * scales).view(-1, k)[:num_rows]
    return held, q.view(-1, k)[:num_rows].contiguous(), scales.flatten(1).view(-1, k // 128)


class Layer:
    """A weight of several shards quantised to float32 scales, and what each format makes of it."""

    def __init__(self, shard_rows, k, bias=False):
        self.plain = torch.randn(sum(shard_rows), k, device="cuda") * torch.logspace(
            -1, 1, k, device="cuda"
        )
        parts = [quantised(shard, 128, False) for shard in self.plain.split(shard_rows)]
        self.stored = torch.cat([held for held, _, _ in parts])
        weight = torch.cat([q for _, q, _ in parts])
        scales = torch.cat([s for _, _, s in parts])
        made_bias = torch.randn(sum(shard_rows), device="cuda") if bias else None
        weight_format = WeightFormat.parse("fp8-block")
        self.tensors = LinearTensors(weight_format, weight, shard_rows, scales, made_bias)
        self.problem = LinearProblem(
            sum(shard_rows),
            k,
            weight_format,
            (ActScheme.DYNAMIC_GROUP128,),
            bias=bias,
            parts=shard_rows if len(shard_rows) > 1 else (),
        )

    def kernel(self, e8m0):
        lib = library_state("deep_gemm")
        decision = select(
            self.problem, H100, Libs.of([lib] if lib else []), Policy(e8m0=e8m0), (backend.LINEAR,)
        )
        assert decision.chosen == "deep_gemm", decision.candidates[0].reasons
        form = DeepGemmQuantScaleFMT(decision.winner.scales)
        ceil = DeepGemmQuantScaleFMT.FLOAT32_CEIL_UE8M0
        assert form is (ceil if e8m0 else DeepGemmQuantScaleFMT.FLOAT32)
        return backend.linear(self.problem, self.tensors, decision.winner)

    def reference(self, x, use_ue8m0):
        """The product of what the formats hold, in float32."""
        weight = self.stored
        if use_ue8m0:
            shards = weight.split(self.tensors.shard_rows)
            weight = torch.cat([quantised(shard, 128, True)[0] for shard in shards])
        y = quantised(x, 1, use_ue8m0)[0] @ weight.T
        return y if self.tensors.bias is None else y + self.tensors.bias


@pytest.fixture(scope="module")
def layers(hopper):
    return {
        "whole": Layer((512,), 1024),
        "partial": Layer((576,), 640, bias=True),
        "merged": Layer((576, 192, 192), 512, bias=True),
    }


# ---------------------------------------------------------------- the backend


# The library compiles a kernel for each layer's sizes and several ranges of tokens.
@pytest.mark.parametrize("e8m0", [False, True], ids=["float32", "ceil-ue8m0"])
@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [*product(["whole"], [1, 2, 31, 32, 33, 128, 300]), *product(["partial", "merged"], [1, 33])],
)
def test_a_layer_computes_what_its_numbers_say(layers, name, e8m0, num_tokens):
    layer = layers[name]
    x = torch.randn(num_tokens, layer.problem.k, device="cuda", dtype=torch.bfloat16)
    y = layer.kernel(e8m0)(x)
    expected = layer.reference(x, use_ue8m0=e8m0)
    assert y.shape == expected.shape and y.dtype == torch.bfloat16
    assert calc_diff(y, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["whole", "merged"])
def test_float32_scales_lose_less_than_powers_of_two(layers, name):
    layer = layers[name]
    x = torch.randn(300, layer.problem.k, device="cuda", dtype=torch.bfloat16)
    exact = x.float() @ layer.plain.T
    if layer.tensors.bias is not None:
        exact += layer.tensors.bias
    errors = [calc_diff(layer.kernel(e8m0)(x), exact) for e8m0 in (False, True)]
    assert errors[0] < errors[1] < 5e-3


@pytest.mark.parametrize("e8m0", [False, True])
def test_the_checkpoints_tensors_stay_as_they_are(layers, e8m0):
    tensors = layers["merged"].tensors
    weight, scales = tensors.weight.clone(), tensors.scales.clone()
    layers["merged"].kernel(e8m0)(torch.randn(4, 512, device="cuda", dtype=torch.bfloat16))
    assert torch.equal(tensors.weight.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(tensors.scales, scales)


def test_no_tokens_give_no_rows(layers):
    x = torch.empty(0, 640, device="cuda", dtype=torch.bfloat16)
    assert layers["partial"].kernel(False)(x).shape == (0, 576)


@pytest.mark.parametrize("e8m0", [False, True])
def test_a_captured_graph_replays_the_same_numbers(layers, e8m0):
    layer = layers["merged"]
    kernel = layer.kernel(e8m0)
    x = torch.randn(32, layer.problem.k, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernel(x)  # compiles, which no capture may
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, kernel(x))


# ---------------------------------------------------------------- the library


def test_the_library_is_usable_and_passes_its_trial():
    lib = library_state("deep_gemm")
    assert lib is not None and not lib.broken
    assert "sm90" in lib.archs
    assert deep_gemm.is_deep_gemm_supported()
    assert not deep_gemm.is_deep_gemm_e8m0_used()
    assert not deep_gemm.should_auto_disable_deep_gemm("qwen3_5_text")
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == [128, 128]


@pytest.mark.parametrize("num_rows", [1, 3, 4, 127, 300])
def test_our_layout_of_activation_scales_is_the_librarys(num_rows):
    import deep_gemm as library

    sf = torch.rand(num_rows, 5, device="cuda")
    sizes = (num_rows, 640, (1, 128, 128))
    theirs = library.transform_sf_into_required_layout(sf, *sizes, None, True)
    ours = deep_gemm.transform_sf_into_required_layout(sf, *sizes, None, True)
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


@pytest.mark.parametrize(
    ("code", "broken"),
    [
        (
            "def transform_sf_into_required_layout(*args):\n"
            "    assert False, 'dim == 2 or dim == 3'\n",
            "AssertionError: dim == 2 or dim == 3",
        ),
        (
            "def transform_sf_into_required_layout(sf, *args):\n    return sf\n",
            "its layout of scales on cuda:sm_90 is not the documented one",
        ),
    ],
)
def test_a_library_that_imports_and_then_fails_is_broken(code, broken, tmp_path):
    (tmp_path / "deep_gemm.py").write_text(code)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vllm.platforms.libraries import library_state\n"
        "from vllm.utils.import_utils import has_deep_gemm\n"
        "print(library_state('deep_gemm').broken)\n"
        "assert not has_deep_gemm()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert broken in done.stdout
