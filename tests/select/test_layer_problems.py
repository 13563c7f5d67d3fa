"""The problems listed from a config.json are those that the model itself asks for."""

import json
import math
import re
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slowness import slowness
from tiny_models import ARCHITECTURES
from transformers import AutoConfig, AutoModelForCausalLM

from vllm.architectures.registry import builtin_config, model_type, model_types
from vllm.config import ModelConfig, VllmConfig
from vllm.errors import CheckpointError, ConfigError, VllmError
from vllm.formats.readers.registry import resolve_quantization
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.problems import layer_problems
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import (
    DeltaRuleProblem,
    KVQuantProblem,
    LinearProblem,
    MoEProblem,
)
from vllm.kernels.selection import Selection
from vllm.machine import Device, Lib, Libs
from vllm.model_executor.model_loader import model_context
from vllm.model_executor.model_loader.checkpoint import Checkpoint
from vllm.model_executor.models.decoder import CausalLM

BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BF16 = WeightFormat("bf16")
QUANTISATIONS = {
    "none": None,
    "block": BLOCK_FP8,
    "block-but-some": BLOCK_FP8 | {"modules_to_not_convert": ["model.layers.1.mlp", "o_proj"]},
    "static": {"quant_method": "fp8", "activation_scheme": "static"},
    "dynamic": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}


def problems_of(config: dict, **options):
    quant = resolve_quantization(config.get("quantization_config"), None, "model")
    return layer_problems(config, quant, **({"dtype": "bf16", "kv_format": "bf16"} | options))


def by_name(config: dict, **options):
    """Layer name -> its problem; of the two under an attention's name, the attention."""
    return dict(reversed(problems_of(config, **options)))


def tiny(name: str = "qwen3_moe", **changes) -> dict:
    return TINY[name] | changes


COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 100,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}
HYBRID = COMMON | {
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 12,
}
TINY = {
    "llama": COMMON | {"model_type": "llama"},
    "qwen3_moe": COMMON | {"model_type": "qwen3_moe", "num_experts": 8},
    "qwen3_moe, some layers dense": COMMON
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
        "attention_bias": True,
    },
    "qwen3_5_text": HYBRID | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": HYBRID
    | {"model_type": "qwen3_5_moe_text", "num_experts": 8, "shared_expert_intermediate_size": 40},
    "deepseek_v3": COMMON
    | {
        "model_type": "deepseek_v3",
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 28,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}
TINY["deepseek_v3, plain queries"] = TINY["deepseek_v3"] | {"q_lora_rank": None}


# ---------------------------------------------------------------- equal to the engine


def asked_by_engine(folder, dtype: str, load_format: str):
    model_config = ModelConfig.load(str(folder), dtype=dtype, load_format=load_format)
    config = VllmConfig(model_config=model_config)
    checkpoint = None if load_format == "dummy" else Checkpoint(model_config.path)
    selection = Selection(Device("cpu"), Libs.of([Lib("torch")]), Policy())
    with torch.device("meta"):
        CausalLM(model_context(config, selection, checkpoint))
    return [(layer, decision.problem) for layer, decision in selection.records], model_config


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_they_equal_what_the_engine_asks_for(name, quantisation, checkpoint, tmp_path):
    raw = json.loads((checkpoint(name) / "config.json").read_text())
    if QUANTISATIONS[quantisation]:
        raw["quantization_config"] = QUANTISATIONS[quantisation]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    asked, model_config = asked_by_engine(tmp_path, "bfloat16", "dummy")
    assert problems_of(raw) == asked
    assert model_type(raw) == model_config.model_type


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral3", "qwen2", "qwen3_moe"])
def test_they_equal_it_for_weights_on_disk(name, dtype, checkpoint):
    folder = checkpoint(name)
    asked, _ = asked_by_engine(folder, dtype, "auto")
    raw = json.loads((folder / "config.json").read_text())
    assert problems_of(raw, dtype=dtype, kv_format=dtype) == asked


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral"])
def test_what_a_config_leaves_out_is_what_transformers_assumes(name, checkpoint, tmp_path):
    raw = json.loads((checkpoint(name) / "config.json").read_text())
    for field in ("head_dim", "num_key_value_heads", "sliding_window", "layer_types"):
        raw.pop(field, None)
    raw |= {"num_attention_heads": 32, "hidden_size": 2048, "use_sliding_window": name == "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"max_window_layers": 1}))
    asked, _ = asked_by_engine(tmp_path, "bfloat16", "dummy")
    assert problems_of(raw | {"max_window_layers": 1}) == asked


def test_experts_are_counted_under_the_name_of_published_configs_and_of_new_ones(checkpoint):
    raw = json.loads((checkpoint("qwen3_moe") / "config.json").read_text())
    both = {name: raw.pop(name, None) for name in ("num_experts", "num_local_experts")}
    count = next(value for value in both.values() if value is not None)
    listed = [problems_of(raw | {name: count}) for name in both]
    assert listed[0] == listed[1]
    assert {p.num_experts for _, p in listed[0] if isinstance(p, MoEProblem)} == {6}


# ---------------------------------------------------------------- equal to transformers' weights

MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate": ("gate", "shared_expert_gate"),
}


def weights_of_transformers(config: dict) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of all matrices but the embedding, and the names of those with a bias."""
    with torch.device("meta"):
        kind = config["model_type"]
        rest = {key: value for key, value in config.items() if key != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **rest))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    matrices = {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if len(shape) >= 2 and not re.search("embed_tokens|conv1d", name)
    }
    return matrices, {name.removesuffix(".bias") for name in shapes if name.endswith(".bias")}


@pytest.mark.parametrize("name", TINY)
def test_together_they_are_all_matrices_of_the_model_and_no_others(name):
    expected, biased = weights_of_transformers(TINY[name])
    covered = {}
    for layer, problem in problems_of(TINY[name]):
        parent, _, last = layer.rpartition(".")
        if isinstance(problem, MoEProblem):
            size = (problem.num_experts, problem.intermediate, problem.hidden)
            covered[f"{layer}.gate_up_proj"] = (size[0], 2 * size[1], size[2])
            covered[f"{layer}.down_proj"] = (size[0], size[2], size[1])
        if not isinstance(problem, LinearProblem):
            continue
        # The router alone is merged with something in some models only.
        names = MERGED.get(last, ()) if problem.parts else ()
        members = [f"{parent}.{part}" for part in names] or [layer]
        rows = problem.parts or (problem.n,)
        assert sum(rows) == problem.n
        assert {problem.bias} == {member in biased for member in members}
        covered |= {member: (n, problem.k) for member, n in zip(members, rows, strict=True)}
    absorbed = {name for name in expected if name.endswith("kv_b_proj")}
    assert covered.keys().isdisjoint(absorbed), "it is absorbed at load, no kernel multiplies by it"
    assert covered == {name: size for name, size in expected.items() if name not in absorbed}


# ---------------------------------------------------------------- tensor and expert parallelism


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("tp", [2, 4])
def test_the_ranks_together_do_the_work_of_one(name, tp):
    whole, share = by_name(TINY[name]), by_name(TINY[name], tp=tp)
    assert list(whole) == list(share)
    for layer, problem in share.items():
        if isinstance(problem, LinearProblem):
            assert problem.n * problem.cut_n == whole[layer].n
            assert problem.k * problem.cut_k == whole[layer].k
            assert problem.cut_n == 1 or problem.cut_k == 1
        elif isinstance(problem, MoEProblem):
            assert problem.intermediate * problem.cut == whole[layer].intermediate
            assert (problem.cut, problem.num_experts) == (tp, 8)
        elif isinstance(problem, DeltaRuleProblem):
            assert problem.num_key_heads * tp == whole[layer].num_key_heads
            assert problem.num_value_heads * tp == whole[layer].num_value_heads
        else:
            assert problem.num_heads * tp == whole[layer].num_heads


def test_kv_heads_fewer_than_the_ranks_are_replicated():
    problems = by_name(tiny("llama", num_key_value_heads=2), tp=8)
    assert problems["model.layers.0.self_attn.qkv_proj"].parts == (16, 16, 16)
    attention = problems["model.layers.0.self_attn.attn"]
    assert (attention.num_heads, attention.num_kv_heads) == (1, 1)
    written = [p for _, p in problems_of(tiny("llama"), tp=8) if isinstance(p, KVQuantProblem)]
    assert {problem.num_kv_heads for problem in written} == {1}


def test_a_gate_of_the_query_doubles_its_rows_alone():
    problems = by_name(tiny("qwen3_5_text"), tp=2)
    assert problems["model.layers.3.self_attn.qkv_proj"].parts == (2 * 4 * 16, 2 * 16, 2 * 16)
    assert problems["model.layers.3.self_attn.o_proj"].k == 4 * 16


def test_a_delta_net_is_cut_inside_its_merged_checkpoint_weight():
    name = "model.layers.0.linear_attn.in_proj_qkvz"
    assert by_name(tiny("qwen3_5_text"))[name].parts == (32 + 32 + 96, 96)
    assert by_name(tiny("qwen3_5_text"), tp=2)[name].parts == (16, 16, 48, 48)


def test_the_vocabulary_is_cut_with_the_last_shard_filled_up():
    head = by_name(tiny("llama"), tp=8)["lm_head"]
    assert (head.n, head.cut_n) == (math.ceil(100 / 8), 8)


def test_expert_parallel_ranks_hold_whole_experts():
    experts = by_name(tiny(), tp=4, ep=4)["model.layers.0.mlp.experts"]
    assert (experts.num_experts, experts.cut_experts) == (8, 4)
    assert (experts.intermediate, experts.cut) == (24, 1)


def test_latent_attention_has_one_kv_head_on_every_rank_and_replicated_down_projections():
    problems = by_name(tiny("deepseek_v3"), tp=4)
    attention = problems["model.layers.0.self_attn.attn"]
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (2, 1, 32)
    assert problems["model.layers.0.self_attn.fused_qkv_a_proj"].parts == (20, 32)


@pytest.mark.parametrize(
    ("name", "ranks", "field"),
    [
        ("llama", {"tp": 3}, "num_attention_heads"),
        ("llama", {"tp": 16}, "num_attention_heads"),
        ("qwen3_5_text", {"tp": 8}, "linear_num_key_heads"),
        ("qwen3_moe", {"ep": 3}, "num_experts"),
        ("deepseek_v3", {"ep": 5}, "n_routed_experts"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_both_numbers(name, ranks, field):
    with pytest.raises(ConfigError) as caught:
        problems_of(TINY[name], **ranks)
    ((axis, count),) = ranks.items()
    assert f"{field} = {TINY[name][field]} " in str(caught.value)
    assert f"{axis} = {count}" in str(caught.value)


@pytest.mark.parametrize("bad", [{"tp": 0}, {"tp": "2"}, {"ep": -1}, {"tp": True}, {"ep": 1 << 40}])
def test_ranks_must_be_a_positive_number(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        problems_of(tiny(), **bad)


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [("dtype", "bf61", "bf16"), ("kv_format", "fp88", "fp8")],
)
def test_an_unknown_argument_is_refused_with_what_was_meant(option, value, meant):
    with pytest.raises(ConfigError, match=f"{option} '{value}'.*did you mean {meant}"):
        problems_of(tiny(), **{option: value})


# ---------------------------------------------------------------- formats


def test_routers_are_never_quantised_even_where_the_config_forgets_them():
    config = tiny("qwen3_5_moe_text", quantization_config=BLOCK_FP8)
    problems = by_name(config)
    plain = {name for name, p in problems.items() if getattr(p, "weight", None) == BF16}
    layers = range(4)
    assert plain == {
        "lm_head",
        *(f"model.layers.{i}.mlp.gate" for i in layers),
    }


@pytest.mark.parametrize(
    "prefix", ["model.language_model.", "language_model.model.", "model.", "language_model."]
)
def test_excluded_modules_may_have_the_names_of_a_multimodal_checkpoint(prefix):
    names = ["in_proj_a", "in_proj_b"]
    entries = [f"{prefix}layers.{i}.linear_attn.{name}" for i in range(4) for name in names]
    quant = BLOCK_FP8 | {"modules_to_not_convert": entries}
    text = TINY["qwen3_5_text"]
    outer = {"model_type": "qwen3_5", "text_config": text, "quantization_config": quant}
    problems = by_name(outer)
    assert problems["model.layers.0.linear_attn.in_proj_ba"].weight == BF16
    assert problems["model.layers.0.linear_attn.in_proj_qkvz"].weight.kind == "fp8-block"


def test_weights_that_are_not_quantised_stay_as_stored_unless_that_is_wider():
    for stored, activations, kept in (
        ("bfloat16", "fp32", "bf16"),
        ("float32", "bf16", "bf16"),
        (None, "fp16", "fp16"),
    ):
        config = tiny("llama", torch_dtype=stored)
        assert by_name(config, dtype=activations)["lm_head"].weight.element == kept


def test_the_outer_dtype_holds_where_the_text_config_has_none():
    outer = {"model_type": "qwen3_5", "dtype": "bfloat16", "text_config": TINY["qwen3_5_text"]}
    assert by_name(outer, dtype="fp32")["lm_head"].weight == BF16
    inner = outer | {"text_config": TINY["qwen3_5_text"] | {"dtype": "float16"}}
    assert by_name(inner, dtype="fp32")["lm_head"].weight.element == "fp16"


# ---------------------------------------------------------------- hostile configs

SIZES = {
    "llama": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "vocab_size"),
    "qwen3_moe": ("moe_intermediate_size", "num_experts", "num_experts_per_tok"),
    "qwen3_5_text": ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads",
                     "linear_value_head_dim"),
    "qwen3_5_moe_text": ("shared_expert_intermediate_size",),
    "deepseek_v3": ("n_routed_experts", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                    "v_head_dim"),
}  # fmt: skip
FIELDS = [(name, field) for name, fields in SIZES.items() for field in fields]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_missing_size_is_named(name, field):
    config = {key: value for key, value in TINY[name].items() if key != field}
    with pytest.raises(CheckpointError, match=rf"\b{field}\b"):
        problems_of(config)


@pytest.mark.parametrize("value", [0, -1, 1 << 60, "64", 64.0, True, None, [64], {}])
@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_size_that_is_none_is_named(name, field, value):
    with pytest.raises(CheckpointError, match=rf"\b{field}\b"):
        problems_of(TINY[name] | {field: value})


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama", {"num_key_value_heads": "4"}, "num_key_value_heads"),
        ("llama", {"head_dim": None, "num_attention_heads": 128}, "num_attention_heads"),
        ("llama", {"attention_bias": "no"}, "attention_bias"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen3_5_text", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_5_text", {"layer_types": [1, 2, 3, 4]}, "layer_types"),
        ("qwen3_5_text", {"layer_types": ["full_atention"] * 4}, "did you mean full_attention"),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 10**6}, "layer_types"),
        ("qwen3_5_text", {"full_attention_interval": "4"}, "full_attention_interval"),
        ("deepseek_v3", {"moe_layer_freq": 0}, "moe_layer_freq"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(name, changes, named):
    with pytest.raises(CheckpointError, match=named):
        problems_of(TINY[name] | changes)


def test_an_unknown_model_type_is_refused_with_all_known_and_the_nearest():
    with pytest.raises(CheckpointError) as caught:
        problems_of(tiny(model_type="qwen3_mo"))
    assert "did you mean qwen3_moe" in str(caught.value)
    assert all(name in str(caught.value) for name in model_types())


@pytest.mark.parametrize(
    "config",
    [
        [],
        "llama",
        None,
        {},
        {"model_type": 3},
        {"model_type": ["llama"]},
        {"model_type": "qwen3_5_moe"},
        {"model_type": "mistral3", "text_config": "mistral"},
        {"model_type": "mistral3", "text_config": {"model_type": "mistral3"}},
        {"model_type": "mistral3", "text_config": {"model_type": "gpt2"}},
    ],
)
def test_what_is_no_model_config_is_refused(config):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        layer_problems(config, None, dtype="bf16", kv_format="bf16")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(TINY)), st.data())
def test_no_config_ends_in_anything_but_problems_or_our_own_error(name, data):
    keys = st.sampled_from([*TINY[name], "layer_types", "sliding_window", "use_sliding_window"])
    changes = data.draw(st.dictionaries(keys, JSON, max_size=3))
    tp, ep = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    try:
        problems = layer_problems(
            TINY[name] | changes, None, dtype="bf16", kv_format="fp8", tp=tp, ep=ep
        )
    except VllmError:
        return
    assert problems[-1][0] == "lm_head"


# ---------------------------------------------------------------- cost


def test_torch_is_not_imported():
    code = (
        "import sys, vllm.kernels.problems, vllm.architectures.registry\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_large_model_is_listed_in_well_under_50_ms():
    excluded = [f"model.layers.{i}.mlp.gate" for i in range(94)]
    config = builtin_config("Qwen3-30B-A3B-FP8") | {
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
        "quantization_config": BLOCK_FP8 | {"modules_to_not_convert": ["lm_head", *excluded]},
    }
    times = []
    for _ in range(5):
        start = time.perf_counter()
        problems = problems_of(config, tp=8, ep=8)
        times.append(time.perf_counter() - start)
    assert len(problems) == 94 * 6 + 1
    assert min(times) < 0.025 * slowness()
