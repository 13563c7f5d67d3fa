"""GPTQ and int8 checkpoints on several ranks, and weights whose columns are in activation order."""

import numpy as np
import pytest
import torch
from checkpoint_layouts import LAYOUTS, gptq, gptq_config, store
from test_shards import EVEN, loaded
from test_tokens import load, outputs

from vllm.distributed.layout import Layout
from vllm.entrypoints.cli.main import main
from vllm.errors import CheckpointError
from vllm.kernels.activations import ReorderedInput
from vllm.model_executor.layers.linear import Linear

CONFIG = gptq_config(group_size=32, desc_act=True)


def shuffled(num_columns):
    return np.random.default_rng(num_columns).permutation(num_columns)


@pytest.mark.parametrize(("order", "is_reordered"), [(shuffled, True), (None, False)])
def test_x_is_reordered_only_where_the_columns_are(checkpoint, tmp_path, order, is_reordered):
    wanted = store(checkpoint("llama", **EVEN), tmp_path, gptq(group=32, order=order), CONFIG)
    layers = [m for m in loaded(tmp_path, Layout()).modules() if isinstance(m, Linear)]
    quantised = [layer for layer in layers if layer.problem.weight.is_quantized]
    assert len(quantised) == 2 * 4
    for layer in quantised:
        assert isinstance(layer.kernel, ReorderedInput) is is_reordered
        weight = torch.cat([wanted[f"{name}.weight"] for name in layer.shard_names])
        found = layer.kernel(torch.eye(layer.input_size)).T
        assert torch.allclose(found, weight, rtol=1e-6, atol=1e-7)


def test_ranks_cannot_share_columns_in_activation_order(checkpoint, tmp_path, capsys):
    store(checkpoint("llama", **EVEN), tmp_path, gptq(group=32, order=shuffled), CONFIG)
    says = r"o_proj on each of 2 .*activation order.*--tensor-parallel-size 1"
    with pytest.raises(CheckpointError, match=says):
        loaded(tmp_path, Layout(1, tensor_size=2))
    words = ["kernels", "explain", str(tmp_path), "--device", "cpu", "--libs", "none"]
    assert main(words) == 0
    assert "int4-group[32]" in capsys.readouterr().out
    assert main([*words, "--tp", "2"]) == 1
    assert "o_proj: its columns are in activation order" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gptq-32-zeros", "ct-int8"])
def test_two_ranks_give_the_tokens_of_one(checkpoint, tmp_path, layout):
    """Weight-only: ranks that share the columns of x scale their parts of a token each."""
    store(checkpoint("llama", vocab_size=97, **EVEN), tmp_path, *LAYOUTS[layout])
    one, two = (outputs(load(tmp_path, tensor_parallel_size=size)) for size in (1, 2))
    assert two[0] == one[0]
    for ours, theirs in zip(two[1], one[1], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4)
