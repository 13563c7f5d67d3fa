"""Experts in every format, cut over ranks or dealt out to them: together they are the whole."""

import pytest
import torch
from checkpoint_layouts import LAYOUTS, store
from slow import quick
from test_shards import loaded

from vllm.distributed.layout import Layout
from vllm.errors import CheckpointError
from vllm.model_executor.layers.fused_moe.layer import FusedMoE

SHAPE = {
    "hidden_size": 128,
    "moe_intermediate_size": 256,
    "num_attention_heads": 16,
    "num_hidden_layers": 1,
    "num_experts": 6,
}


@torch.inference_mode()
def result(model, x, weights, ids):
    (layer,) = (module for module in model.modules() if isinstance(module, FusedMoE))
    return layer.kernel(x, weights, ids)


@pytest.mark.parametrize("cut", ["tensor", "expert"])
@pytest.mark.parametrize("layout", quick(LAYOUTS, [*LAYOUTS][::3]))
def test_ranks_of_experts_add_up_to_all_of_them(checkpoint, tmp_path, layout, cut):
    source = checkpoint("qwen3_moe", **SHAPE)
    store(source, tmp_path, *LAYOUTS[layout])
    models = [loaded(tmp_path, Layout(r, tensor_size=2), cut == "expert") for r in range(2)]
    whole = loaded(tmp_path, Layout())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 128, generator=generator)
    weights = torch.rand(9, 2, generator=generator)
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(9)])
    own = [ids, ids]
    if cut == "expert":
        own = [torch.where(ids < 3, ids, -1), torch.where(ids >= 3, ids - 3, -1)]
    total = sum(result(model, x, weights, mine) for model, mine in zip(models, own))
    assert torch.allclose(total, result(whole, x, weights, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "size", "says"),
    [
        ("modelopt-nvfp4", 48, r"\(down_proj\) on each of 2 .*: 24 columns .* groups of 16"),
        ("ct-mxfp8", 96, r"\(down_proj\) on each of 2 .*: 48 columns .* groups of 32"),
        ("ct-mxfp4", 96, r"\(down_proj\) on each of 2 .*: 48 columns .* groups of 32"),
        ("ct-int4-128", 128, r"\(down_proj\) on each of 2 .*: 64 columns .* groups of 128"),
        ("awq-32", 72, r"gate_proj, up_proj\) on each of 2 .*: 36 rows cannot be packed by 8"),
    ],
)
def test_groups_of_experts_that_ranks_would_cut_are_refused_with_the_size(
    checkpoint, tmp_path, layout, size, says
):
    source = checkpoint("qwen3_moe", **SHAPE | {"moe_intermediate_size": size})
    build, config = LAYOUTS[layout]
    store(source, tmp_path, build, config, picks=lambda name: False)
    with pytest.raises(CheckpointError, match=says):
        loaded(tmp_path, Layout(1, tensor_size=2))
