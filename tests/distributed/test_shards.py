"""What the ranks of a model hold are the parts of it, whatever the weights are stored in.

No rank talks to another here: a rank is the model loaded with its place among the ranks.
"""

import json

import checkpoint_layouts
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm.config import CacheConfig, KernelConfig, ModelConfig, VllmConfig
from vllm.distributed.layout import Layout
from vllm.distributed.parallel import planned
from vllm.errors import CheckpointError, ConfigError
from vllm.executor.uniproc import make_selection
from vllm.kernels.problems import layer_problems
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.model_loader import load_model, model_context
from vllm.model_executor.models.decoder import CausalLM
from vllm.utils.fp8 import per_block_cast_to_fp8

# Blocks of 128 end inside every shard of every weight.
UNEVEN = {"hidden_size": 180, "intermediate_size": 300, "head_dim": 24, "num_hidden_layers": 2}
# Every shard is whole groups of 128 columns and whole words of eight rows.
EVEN = checkpoint_layouts.SHAPE | {"num_attention_heads": 16, "num_key_value_heads": 4}
BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CUT_COLUMNS = ("o_proj", "down_proj")
NOT_CUT = ("mlp.gate",)


def loaded(folder, layout: Layout, is_expert_parallel: bool = False, kernel=(), **options):
    config = VllmConfig(
        model_config=ModelConfig.load(str(folder), dtype="float32", **options),
        cache_config=CacheConfig(num_blocks=2),
        kernel_config=KernelConfig(kernel=kernel),
    )
    with torch.inference_mode():
        return load_model(config, make_selection(config), planned(layout, is_expert_parallel))


def ranks(folder, tp: int, **options):
    return [loaded(folder, Layout(rank, tensor_size=tp), **options) for rank in range(tp)]


@torch.inference_mode()
def weights(model) -> dict[str, torch.Tensor]:
    """float32 weight of every linear layer by its checkpoint name, as its kernel multiplies."""
    found = {}
    for layer in model.modules():
        if isinstance(layer, Linear):
            # Row i of the identity gives column i of the weight, and the bias.
            whole = layer.kernel(torch.eye(layer.input_size)).T
            whole = whole - layer.kernel(torch.zeros(1, layer.input_size)).T
            pieces = whole.split(layer.shard_rows)
            found |= dict(zip(layer.shard_names, pieces))
    return found


def together(parts: list[dict], num_kv_heads: int) -> dict[str, torch.Tensor]:
    """The weights of the whole model, of those of its ranks."""
    whole = {}
    for name in parts[0]:
        shards = [part[name] for part in parts]
        if name.endswith(NOT_CUT):
            assert all(torch.equal(shard, shards[0]) for shard in shards)
            whole[name] = shards[0]
        elif name.endswith(CUT_COLUMNS):
            whole[name] = torch.cat(shards, 1)
        else:
            if name.endswith(("k_proj", "v_proj")) and num_kv_heads < len(shards):
                shards = shards[:: len(shards) // num_kv_heads]
            whole[name] = torch.cat(shards)
    return whole


def same(ours: dict, wanted: dict) -> bool:
    """Whether each of `wanted` is there, to the rounding of one product."""
    assert wanted
    return all(
        torch.allclose(ours[name.removesuffix(".weight")], weight, rtol=1e-6, atol=0)
        for name, weight in wanted.items()
    )


@pytest.mark.parametrize("name", checkpoint_layouts.LAYOUTS)
def test_shards_of_every_format_are_the_whole(name, checkpoint, tmp_path):
    build, quantization = checkpoint_layouts.LAYOUTS[name]
    source = checkpoint("llama", **EVEN)
    wanted = checkpoint_layouts.store(source, tmp_path, build, quantization)
    assert same(together([weights(m) for m in ranks(tmp_path, 2)], 4), wanted)


@pytest.fixture(scope="module")
def block_checkpoint(checkpoint, tmp_path_factory):
    """(FP8 folder, float32 weights it stands for, the same quantised at load)."""
    source, folder = checkpoint("qwen3", **UNEVEN), tmp_path_factory.mktemp("block")
    stored, wide = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = weight
        if name.endswith("_proj.weight"):
            q, scales = per_block_cast_to_fp8(weight, (128, 128))
            stored |= {name: q, name + "_scale_inv": scales}
            rows, columns = (torch.arange(size) // 128 for size in weight.shape)
            wide[name] = q.float() * scales[rows][:, columns]
    save_file(stored, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": BLOCK}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, wide, source


@pytest.mark.parametrize("tp", [2, 6])
@pytest.mark.parametrize("backend", [None, "torch"])
def test_cut_scale_blocks_keep_their_scales(block_checkpoint, checkpoint, tp, backend):
    folder, wide, _ = block_checkpoint
    models = ranks(folder, tp)
    assert same(together([weights(m) for m in models], 2), wide)
    fits = {
        layer.decision.winner.fit.how
        for layer in models[1].modules()
        if isinstance(layer, Linear) and layer.decision.winner.fit
    }
    assert fits == {"refined"}


def test_shards_quantised_at_load_are_shards_of_the_whole_quantised(block_checkpoint):
    _, wide, source = block_checkpoint
    assert same(together([weights(m) for m in ranks(source, 2, quantization="fp8")], 2), wide)


@pytest.mark.parametrize("name", ["llama-tied-biased", "llama"])
def test_a_vocabulary_that_does_not_divide_is_filled_up_with_zeros(checkpoint, name):
    folder = checkpoint(name, vocab_size=97, intermediate_size=114)
    parts = [weights(model)["lm_head"] for model in ranks(folder, 6)]
    assert {len(part) for part in parts} == {17}
    tensors = load_file(folder / "model.safetensors")
    wanted = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    filled = torch.cat(parts)
    assert torch.equal(filled[:97], wanted)
    assert not filled[97:].any()


def test_the_bias_of_summed_outputs_is_added_once(checkpoint):
    folder = checkpoint("llama-tied-biased")
    name = "model.layers.1.mlp.down_proj"
    wanted = load_file(folder / "model.safetensors")[f"{name}.bias"]
    nothing = torch.zeros(1, 56)
    biases = [model.get_submodule(name).kernel(nothing)[0] for model in ranks(folder, 2)]
    assert torch.equal(biases[0], wanted)
    assert not biases[1].any()


@pytest.mark.parametrize("cut", ["tensor", "expert"])
def test_ranks_of_experts_add_up_to_all_of_them(checkpoint, cut):
    changes = {"hidden_size": 180, "moe_intermediate_size": 152, "num_hidden_layers": 1}
    folder = checkpoint("qwen3_moe", **changes)
    layouts = [Layout(rank, tensor_size=2) for rank in range(2)]
    whole = loaded(folder, Layout(), quantization="fp8")
    models = [loaded(folder, own, cut == "expert", quantization="fp8") for own in layouts]
    x = torch.randn(9, 180, generator=torch.Generator().manual_seed(0))
    weights, ids = torch.rand(9, 2), torch.stack([torch.randperm(6)[:2] for _ in range(9)])

    @torch.inference_mode()
    def result(model, ids) -> torch.Tensor:
        (layer,) = (m for m in model.modules() if isinstance(m, FusedMoE))
        return layer.kernel(x, weights, ids)

    if cut == "expert":
        own_ids = [torch.where(ids < 3, ids, -1), torch.where(ids >= 3, ids - 3, -1)]
    else:
        own_ids = [ids, ids]
    total = sum(result(model, own) for model, own in zip(models, own_ids))
    assert torch.allclose(total, result(whole, ids), rtol=1e-4, atol=1e-5)


def test_stages_take_every_weight_once(checkpoint):
    folder = checkpoint("llama", num_hidden_layers=5)
    stages = [loaded(folder, Layout(stage, pipeline_size=3)) for stage in range(3)]
    taken = [set(weights(model)) for model in stages]
    assert set().union(*taken) == set(weights(loaded(folder, Layout())))
    assert sum(map(len, taken)) == len(set().union(*taken))
    held = [[i for i in range(5) if f"model.layers.{i}.mlp.down_proj" in names] for names in taken]
    assert held == [[0], [1, 2], [3, 4]]


def test_a_flag_may_mean_layers_of_one_stage_alone(checkpoint):
    folder, kernel = checkpoint("llama"), ("*.layers.0.mlp.down_proj=torch",)
    for stage in range(2):
        loaded(folder, Layout(stage, pipeline_size=2), kernel=kernel)
    with pytest.raises(ConfigError, match="means no layer"):
        loaded(folder, Layout(0, pipeline_size=2), kernel=("*.layers.9.*=torch",))


@pytest.mark.parametrize(
    ("layout", "is_expert_parallel"),
    [(Layout(0, pipeline_size=2), False), (Layout(1, tensor_size=2), True)],
)
def test_a_weight_of_no_rank_is_refused_by_all(checkpoint, tmp_path, layout, is_expert_parallel):
    source = checkpoint("qwen3_moe")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.99.up_proj.weight"] = torch.zeros(40, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"experts\.99"):
        loaded(tmp_path, layout, is_expert_parallel)


@pytest.mark.parametrize("name", ["awq-128", "ct-int4-128"])
def test_groups_that_ranks_would_cut_are_refused_with_the_size(checkpoint, tmp_path, name):
    build, quantization = checkpoint_layouts.LAYOUTS[name]
    source = checkpoint("llama", **checkpoint_layouts.SHAPE)
    checkpoint_layouts.store(source, tmp_path, build, quantization)
    with pytest.raises(CheckpointError, match=r"on each of 2 tensor-parallel ranks: 64 columns"):
        loaded(tmp_path, Layout(0, tensor_size=2))


QUANTISATIONS = {
    "none": None,
    "block": BLOCK,
    "static": {"quant_method": "fp8", "activation_scheme": "static"},
}


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize(
    ("name", "sizes", "data_size"),
    [
        ("llama-tied-biased", {"vocab_size": 97}, 0),
        ("qwen2-window", {}, 0),
        ("qwen3", {"num_key_value_heads": 1}, 0),
        ("qwen3_moe", {}, 0),
        ("qwen3_moe", {}, 1),
        ("qwen3_moe", {}, 3),
        ("qwen3_5", {}, 0),
        ("qwen3_5_moe", {}, 3),
    ],
)
def test_each_rank_asks_for_the_problems_that_explain_lists(
    name, sizes, data_size, quantisation, checkpoint, tmp_path
):
    """data_size: engines whose ranks share the experts; 0: every rank has a share of each."""
    raw = json.loads((checkpoint(name, **sizes) / "config.json").read_text())
    if QUANTISATIONS[quantisation]:
        raw["quantization_config"] = QUANTISATIONS[quantisation]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model_config = ModelConfig.load(str(tmp_path), dtype="bfloat16", load_format="dummy")
    config = VllmConfig(model_config=model_config)
    listed = layer_problems(
        raw, config.quant_config, dtype="bf16", kv_format="bf16", tp=2, ep=max(1, 2 * data_size)
    )
    for rank in range(2):
        selection = make_selection(config)
        layout = Layout(rank, tensor_size=2, data_size=max(1, data_size))
        with torch.device("meta"):
            CausalLM(model_context(config, selection, None, planned(layout, data_size > 0)))
        assert [(layer, decision.problem) for layer, decision in selection.records] == listed


def test_random_weights_are_those_of_one_rank(checkpoint):
    folder = checkpoint("llama")
    whole = weights(loaded(folder, Layout(), load_format="dummy"))
    parts = [weights(model) for model in ranks(folder, 2, load_format="dummy")]
    assert same(together(parts, 2), whole)
