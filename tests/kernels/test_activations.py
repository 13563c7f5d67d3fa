"""Inputs that are quantised where they are made: what the kernel itself would have made of them."""

from types import SimpleNamespace

import pytest
import torch

from vllm.kernels.activations import (
    InputQuant,
    KernelByTokens,
    QuantizedInput,
    QuantizingKernel,
    input_quant,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.ops import torch_ops
from vllm.ops.fp8_quant import ScaleLayout

QUANT = InputQuant(ScaleLayout.ROW_MAJOR)
CONTEXT = SimpleNamespace(ops=torch_ops, decoder=SimpleNamespace(rms_norm_eps=1e-6))


def widened(x: QuantizedInput) -> torch.Tensor:
    return (x.q.float().unflatten(1, (-1, 128)) * x.scales[..., None]).flatten(1)


KERNEL = QuantizingKernel(QUANT, widened)
PLAIN = torch.Tensor.clone


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16()


class Reader:
    """A layer as norms and activations see it."""

    def __init__(self, kernel):
        self.kernel = kernel

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        return input_quant(self.kernel, num_tokens)


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_the_norm_quantises_as_the_kernel_would_have(use_ue8m0):
    kernel = QuantizingKernel(InputQuant(ScaleLayout.TMA_ALIGNED, use_ue8m0), widened)
    norm = RMSNorm(CONTEXT, "norm", 256)
    norm.weight.data.uniform_(0.5, 2)
    x, residual = inputs(5, 256), inputs(5, 256).flip(0)
    plain, kept = norm.add(x.clone(), expected_residual := residual.clone()), residual.clone()
    fused = norm.add(x.clone(), kept, Reader(kernel))
    assert isinstance(fused, QuantizedInput) and fused.shape == (5, 256)
    assert torch.equal(kept, expected_residual)
    assert torch.equal(kernel(fused), kernel(plain))


def test_the_activation_quantises_as_the_kernel_would_have():
    x = inputs(5, 512)
    fused = Reader(KERNEL).input_quant(5).silu_and_mul(x)
    assert torch.equal(KERNEL(fused), KERNEL(torch_ops.silu_and_mul(x)))


def test_a_reader_that_takes_floats_gets_them():
    norm, x = RMSNorm(CONTEXT, "norm", 256), inputs(5, 256)
    for reader in (Reader(PLAIN), Reader(None), None):
        assert isinstance(norm.add(x.clone(), x.clone(), reader), torch.Tensor)


@pytest.mark.parametrize(("num_tokens", "is_quantised"), [(1, False), (8, False), (9, True)])
def test_of_a_split_the_part_that_runs_says_what_it_takes(num_tokens, is_quantised):
    split, x = KernelByTokens([(8, PLAIN), (None, KERNEL)]), inputs(num_tokens, 256)
    asked = input_quant(split, num_tokens)
    assert asked == (QUANT if is_quantised else None)
    given = asked.quantise(x) if asked else x
    assert torch.equal(split(given), KERNEL(x) if is_quantised else x)
