"""Layers that ask for quantised tokens get them from the norm before, and those beside them floats:
routers beside experts, the gates of a delta-net beside its large projection."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.distributed.groups import Group
from vllm.executor.uniproc import make_selection
from vllm.kernels.activations import Activation, InputQuant, QuantizedInput, source_of
from vllm.kernels.interface import LinearKernel, MoEKernel
from vllm.model_executor.layers.delta_net import GatedDeltaNet
from vllm.model_executor.model_loader import load_model
from vllm.ops.fp8_quant import ScaleLayout

QUANT = InputQuant(ScaleLayout.ROW_MAJOR)


def widened(x: Activation) -> torch.Tensor:
    x = QUANT.quantise(x) if isinstance(x, torch.Tensor) else x
    scales = x.scales.repeat_interleave(128, 1)[:, : x.q.shape[1]]
    return (x.q.float() * scales).to(x.dtype)


@dataclass
class Asking:
    """Experts of FP8 activations over `kernel`, which takes floats."""

    kernel: MoEKernel
    given: Activation | None = None

    def input_quant(self, num_tokens: int) -> InputQuant:
        return QUANT

    def __call__(self, x: Activation, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.given = x
        return self.kernel(widened(x), weights, ids)


@dataclass
class AskingLinear:
    """A linear kernel of FP8 activations over `kernel`, which takes floats."""

    kernel: LinearKernel
    given: Activation | None = None

    def input_quant(self, num_tokens: int) -> InputQuant:
        return QUANT

    def __call__(self, x: Activation) -> torch.Tensor:
        self.given = x
        return self.kernel(widened(x))


def loaded(folder):
    config = VllmConfig(
        model_config=ModelConfig.load(str(folder), dtype="float32"),
        cache_config=CacheConfig(num_blocks=2),
    )
    with torch.inference_mode():
        return load_model(config, make_selection(config))


@pytest.fixture(params=["qwen3_moe", "qwen3_5_moe"])
def layer(request, checkpoint):
    """A decoder layer whose experts ask."""
    layer = loaded(checkpoint(request.param, hidden_size=256)).model.layers[-1]
    layer.mlp.experts.kernel = Asking(layer.mlp.experts.kernel)
    return layer


@torch.inference_mode()
def test_the_norm_quantises_what_experts_ask_for_and_the_router_reads_floats(layer):
    x, residual = torch.randn(2, 9, 256)
    norm, kernel = layer.post_attention_layernorm, layer.mlp.experts.kernel
    tokens = norm.add(x.clone(), residual.clone(), layer.mlp.reader)
    torch.testing.assert_close(source_of(tokens), norm.add(x.clone(), residual.clone()))
    given = layer.mlp(tokens)
    assert kernel.given is tokens and isinstance(tokens, QuantizedInput)
    assert torch.equal(given, layer.mlp(source_of(tokens)))
    assert isinstance(kernel.given, torch.Tensor)


@pytest.mark.parametrize("gates_ask", [False, True])
@torch.inference_mode()
def test_both_projections_of_a_delta_net_read_what_they_ask_for(checkpoint, gates_ask):
    model = loaded(checkpoint("qwen3_5_moe", hidden_size=256))
    layers = [part for part in model.model.layers if isinstance(part.mixer, GatedDeltaNet)]
    net, norm = layers[0].mixer, layers[0].input_layernorm
    large = net.in_proj_qkvz.kernel = AskingLinear(net.in_proj_qkvz.kernel)
    if gates_ask:
        net.in_proj_ba.kernel = AskingLinear(net.in_proj_ba.kernel)
    given = []
    net.in_proj_ba.register_forward_pre_hook(lambda module, inputs: given.append(*inputs))
    net.allocate(3, torch.device("cpu"))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    at = SimpleNamespace(
        state_slots=torch.tensor([1, 2], dtype=torch.int32),
        query_start_loc=starts,
        seq_lens=starts.diff(),
        draft_slots=None,
        max_query_len=5,
    )
    batch = SimpleNamespace(attention=at)
    x, residual = torch.randn(2, 9, 256)
    tokens = norm.add(x.clone(), residual.clone(), net.reader)
    found = net(tokens, batch)
    assert large.given is tokens and isinstance(tokens, QuantizedInput)
    assert given == [tokens] if gates_ask else given[0] is tokens.source
    floats = replace(net.input_quant(9), keeps_source=True)
    source = floats.add_rms_norm(x.clone(), residual.clone(), norm.weight, norm.eps).source
    assert torch.equal(found, net(source, batch)) and isinstance(large.given, torch.Tensor)


def test_with_other_ranks_experts_take_floats(layer):
    assert layer.mlp.experts.input_quant(4) is not None
    layer.mlp.experts.ranks = Group(0, 2, (0, 1))
    assert layer.mlp.experts.input_quant(4) is None
