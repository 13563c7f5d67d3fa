"""The layers of models that the engine does not serve, from configs and safetensors headers."""

import json
import random
from argparse import Namespace
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest

from vllm.architectures.decoder import CachedAttention, ExpertsSpec
from vllm.architectures.explained import layers_of
from vllm.architectures.registry import is_described
from vllm.architectures.sharding import LinearSpec
from vllm.entrypoints.cli.kernels_explain import asked_model
from vllm.errors import CheckpointError, VllmError
from vllm.formats.readers.registry import resolve_quantization
from vllm.formats.readers.unread import UnreadConfig
from vllm.kernels.problems import layer_problems
from vllm.kernels.select.problem import AttentionProblem, LinearProblem, MoEProblem
from vllm.machine import Device
from vllm.utils.safetensors_files import TensorShape

CONFIGS = {
    file.stem: json.loads(file.read_text())
    for file in sorted((Path(__file__).parent / "configs").glob("*.json"))
}


def quantisation(config: dict):
    return resolve_quantization(config.get("quantization_config"), None, "model")


def problems_of(config: dict, tensors: dict | None = None, **ranks) -> list:
    layers = layers_of(config, lambda: tensors or {})
    return layer_problems(
        config, quantisation(config), dtype="bf16", kv_format="bf16", layers=layers, **ranks
    )


def by_name(problems) -> dict:
    return dict(reversed(problems))


# ---------------------------------------------------------------- from config.json alone

# Per config: layers of the decoder; then of some layers the format and N and K, or experts,
# intermediate size, hidden size and top_k, all computed by hand from the fields.
BY_HAND = {
    "DeepSeek-V3.2": (61, {
        "model.layers.0.mlp.gate_up_proj": ("fp8-block", 2 * 18432, 7168),
        "model.layers.3.self_attn.fused_qkv_a_proj": ("fp8-block", 1536 + 512 + 64, 7168),
        "model.layers.3.self_attn.q_b_proj": ("fp8-block", 128 * (128 + 64), 1536),
        "model.layers.3.mlp.experts": ("fp8-block", 256, 2048, 7168, 8),
    }),
    "GLM-4.6-FP8": (92, {
        "model.layers.2.mlp.down_proj": ("fp8-channel", 5120, 12288),
        "model.layers.3.mlp.gate": ("bf16", 160, 5120),
        "model.layers.3.mlp.experts": ("fp8-channel", 160, 1536, 5120, 8),
        "model.layers.91.self_attn.qkv_proj": ("fp8-channel", (96 + 8 + 8) * 128, 5120),
    }),
    "Gemma-4-31B-IT-NVFP4": (60, {
        "model.layers.0.self_attn.qkv_proj": ("bf16", (32 + 16 + 16) * 256, 5376),
        "model.layers.5.self_attn.qkv_proj": ("bf16", (32 + 4) * 512, 5376),  # K is V too
        "model.layers.5.mlp.gate_up_proj": ("nvfp4", 2 * 21504, 5376),
    }),
    "Gemma-4-26B-A4B-NVFP4": (30, {
        "model.layers.0.self_attn.qkv_proj": ("bf16", (16 + 8 + 8) * 256, 2816),
        "model.layers.5.self_attn.qkv_proj": ("bf16", (16 + 2) * 512, 2816),
        "model.layers.0.mlp.down_proj": ("bf16", 2816, 2112),
        "model.layers.0.router.proj": ("bf16", 128, 2816),
        "model.layers.0.experts": ("nvfp4", 128, 704, 2816, 8),
    }),
    "Kimi-K2-Instruct": (61, {
        "model.layers.0.mlp.down_proj": ("fp8-block", 7168, 18432),
        "model.layers.1.mlp.experts": ("fp8-block", 384, 2048, 7168, 8),
        "model.layers.1.self_attn.o_proj": ("fp8-block", 7168, 64 * 128),
    }),
    "Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": (48, {
        "model.layers.0.self_attn.qkv_proj": ("bf16", (40 + 8 + 8) * 128, 5120),
        "model.layers.0.feed_forward.experts": ("fp8-channel", 16, 8192, 5120, 1),
        "model.layers.0.feed_forward.shared_expert.down_proj": ("fp8-channel", 5120, 8192),
    }),
    "MiMo-V2-Flash": (48, {
        "model.layers.0.self_attn.qkv_proj": ("fp8-block", (64 + 4) * 192 + 4 * 128, 4096),
        "model.layers.1.self_attn.qkv_proj": ("fp8-block", (64 + 8) * 192 + 8 * 128, 4096),
        "model.layers.5.self_attn.o_proj": ("fp8-block", 4096, 64 * 128),
        "model.layers.0.mlp.down_proj": ("fp8-block", 4096, 16384),
        "model.layers.1.mlp.experts": ("fp8-block", 256, 2048, 4096, 8),
    }),
    "MiniMax-M2": (62, {
        "model.layers.0.block_sparse_moe.experts": ("fp8-block", 256, 1536, 3072, 8),
        "model.layers.0.self_attn.o_proj": ("fp8-block", 3072, 48 * 128),
    }),
    "Mistral-Large-3-675B-Instruct-2512": (61, {
        "model.layers.0.mlp.gate_up_proj": ("fp8-block", 2 * 16384, 7168),
        "model.layers.3.self_attn.fused_qkv_a_proj": ("bf16", 1536 + 512 + 64, 7168),
        "model.layers.3.mlp.experts": ("fp8-block", 128, 4096, 7168, 4),
    }),
    "Nemotron-3-Super-120B-A12B-NVFP4": (88, {
        # z and x of 128 heads of 64, B and C of 8 groups with 128 states, a step for each head
        "model.layers.0.mixer.in_proj": ("fp8-tensor", 2 * 8192 + 2 * 8 * 128 + 128, 4096),
        "model.layers.1.mixer.experts": ("nvfp4", 512, 2688, 1024, 22),
        "model.layers.1.mixer.fc1_latent_proj": ("fp8-tensor", 1024, 4096),
        "model.layers.8.mixer.fc1_latent_proj": ("bf16", 1024, 4096),
        "model.layers.1.mixer.shared_experts.up_proj": ("fp8-tensor", 5376, 4096),
        "model.layers.7.mixer.qkv_proj": ("bf16", (32 + 2 + 2) * 128, 4096),
    }),
    "Qwen3-Next-80B-A3B-Instruct-FP8": (48, {
        "model.layers.0.linear_attn.in_proj_qkvz": ("fp8-block", 2 * 2048 + 2 * 4096, 2048),
        "model.layers.0.linear_attn.in_proj_ba": ("bf16", 2 * 32, 2048),
        "model.layers.3.self_attn.qkv_proj": ("fp8-block", (2 * 16 + 2 + 2) * 256, 2048),
        "model.layers.3.mlp.experts": ("fp8-block", 512, 512, 2048, 10),
        "model.layers.3.mlp.gate": ("bf16", 512 + 1, 2048),
    }),
    "gpt-oss-120b": (36, {
        "model.layers.0.self_attn.qkv_proj": ("bf16", (64 + 8 + 8) * 64, 2880),
        "model.layers.0.mlp.experts": ("mxfp4", 128, 2880, 2880, 4),
    }),
    "phi-4-FP8-dynamic": (40, {
        "model.layers.0.self_attn.qkv_proj": ("fp8-channel", (40 + 10 + 10) * 128, 5120),
        "model.layers.39.mlp.gate_up_proj": ("fp8-channel", 2 * 17920, 5120),
    }),
}  # fmt: skip


def test_every_config_here_is_checked():
    assert set(BY_HAND) == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tp", [1, 2])
def test_layers_have_the_sizes_and_formats_of_the_config(name, tp):
    num_layers, expected = BY_HAND[name]
    problems = by_name(problems_of(CONFIGS[name], tp=tp))
    layers = {int(layer.split(".")[2]) for layer in problems if ".layers." in layer}
    assert layers == set(range(num_layers))
    assert "lm_head" in problems
    for layer, (kind, *sizes) in expected.items():
        problem = problems[layer]
        if tp > 1 and kind == "fp8-tensor" and layer.endswith("in_proj"):
            kind = (
                "fp8-channel"  # A rank has pieces of one weight, and each piece brings its scale.
            )
        assert problem.format == kind, layer
        if isinstance(problem, MoEProblem):
            inner = problem.intermediate * problem.cut
            assert [problem.num_experts, inner, problem.hidden, problem.top_k] == sizes, layer
        else:
            assert [problem.n * problem.cut_n, problem.k * problem.cut_k] == sizes, layer


# Published parameters in 10^9, with embeddings and what is left out here.
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("DeepSeek-V3.2", 665, 672),
        ("GLM-4.6-FP8", 350, 357),
        ("Kimi-K2-Instruct", 1015, 1030),
        ("Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", 105, 109),
        ("MiniMax-M2", 226, 230),
        ("Nemotron-3-Super-120B-A12B-NVFP4", 118, 124),
        ("Qwen3-Next-80B-A3B-Instruct-FP8", 78, 81),
        ("gpt-oss-120b", 115, 117.5),
        ("phi-4-FP8-dynamic", 13.8, 14.7),
    ],
)
def test_the_weights_add_up_to_the_published_size(name, least, most):
    total = 0
    for _, item in layers_of(CONFIGS[name]).items:
        if isinstance(item, LinearSpec):
            total += sum(part.num_rows for part in item.parts) * item.inputs.size
        elif isinstance(item, ExpertsSpec):
            total += item.count.count * len(item.parts) * item.hidden * item.intermediate.size
    assert least < total / 1e9 < most


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if is_described(c)])
def test_models_that_have_a_description_since_are_served_and_nothing_is_left_out(name):
    layers = layers_of(CONFIGS[name])
    assert layers.is_served and layers.notes == ()


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if not is_described(c)])
def test_it_is_said_that_they_are_not_served_and_what_is_left_out(name):
    layers = layers_of(CONFIGS[name])
    assert not layers.is_served
    assert "is not served by this engine" in layers.notes[0]
    text = " ".join(layers.notes)
    said = {
        "DeepSeek-V3.2": "1 x multi-token prediction; the indexers",
        "MiniMax-M2": "3 x multi-token prediction",
        "Nemotron-3-Super-120B-A12B-NVFP4": "state updates of mamba layers",
        "Qwen3-Next-80B-A3B-Instruct-FP8": "recurrences of linear attention",
    }
    assert said.get(name, "") in text


def test_kinds_of_layers_that_are_not_known_are_counted():
    config = CONFIGS["phi-4-FP8-dynamic"] | {
        "model_type": "unheard_of",
        "layer_types": ["full_attention", "lightning", "lightning", "conv"] * 10,
        "moe_shape_shift": 3,
    }
    text = " ".join(layers_of(config).notes)
    assert "left out: 20 x lightning; 10 x conv" in text
    assert "not taken into account: moe_shape_shift" in text


def test_windows_and_variants_of_attention_are_those_of_each_layer():
    def attentions(name):
        found = (i for _, i in layers_of(CONFIGS[name]).items if isinstance(i, CachedAttention))
        return Counter((getattr(i.cache, "window", 0), i.cache.head_dim, i.variant) for i in found)

    assert attentions("gpt-oss-120b") == {(128, 64, "sinks"): 18, (0, 64, "sinks"): 18}
    assert attentions("Gemma-4-31B-IT-NVFP4") == {(1024, 256, ""): 50, (0, 512, ""): 10}
    assert attentions("MiMo-V2-Flash") == {(129, 192, "sinks"): 39, (0, 192, ""): 9}
    assert attentions("DeepSeek-V3.2") == {(0, 576, "sparse MLA"): 61}
    assert attentions("Llama-4-Scout-17B-16E-Instruct-FP8-dynamic") == {
        (8192, 128, "chunks"): 36, (0, 128, ""): 12
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"first_k_dense_replace": 2}, [2, 3, 4, 5]),
        ({"moe_layer_freq": [0, 1, 0, 1, 0, 0]}, [1, 3]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"mlp_only_layers": [0, 5]}, [1, 2, 3, 4]),
        ({"interleave_moe_layer_step": 3}, [2, 5]),
        ({"moe_layers": [1, 4]}, [1, 4]),
        ({"mlp_layer_types": ["dense", "sparse"] * 3}, [1, 3, 5]),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 4}, [2, 3, 4]),
    ],
)
def test_which_layers_have_experts_is_read_as_families_write_it(changes, sparse):
    config = CONFIGS["phi-4-FP8-dynamic"] | {
        "model_type": "unheard_of",
        "num_hidden_layers": 6,
        "num_experts": 8,
        "moe_topk": 2,
        "moe_intermediate_size": 64,
    }
    items = layers_of(config | changes).items
    layers = [prefix for prefix, item in items if isinstance(item, ExpertsSpec)]
    assert layers == [f"model.layers.{layer}." for layer in sparse]


def test_a_config_without_sizes_is_refused_with_the_nearest_type_and_the_field():
    with pytest.raises(CheckpointError) as caught:
        layers_of({"model_type": "qwen3_mo"})
    assert "did you mean qwen3_moe?" in str(caught.value)
    assert "num_hidden_layers" in str(caught.value)


# ---------------------------------------------------------------- from safetensors headers

TEXT = {
    "model_type": "unheard_of",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "num_experts_per_tok": 2,
}


def checkpoint(**more) -> dict[str, TensorShape]:
    """Two layers: FP8 attention, experts in NVFP4 (two codes a byte), what is no layer."""
    shapes = {
        "model.embed_tokens.weight": ("BF16", (100, 64)),
        "lm_head.weight": ("BF16", (100, 64)),
    }
    for layer in range(3):  # the last is one of multi-token prediction
        prefix = f"model.layers.{layer}."
        for name, rows in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64)):
            shapes[f"{prefix}self_attn.{name}.weight"] = ("F8_E4M3", (rows, 64))
            shapes[f"{prefix}self_attn.{name}.weight_scale_inv"] = ("F32", (1, 1))
        shapes[f"{prefix}input_layernorm.weight"] = ("BF16", (64,))
        shapes[f"{prefix}conv.conv1d.weight"] = ("BF16", (64, 1, 4))
        shapes[f"{prefix}moe.gate.weight"] = ("BF16", (8, 64))
        for expert in range(8):
            own = f"{prefix}moe.experts.{expert}."
            for name, (rows, columns) in (("w1", (48, 32)), ("w3", (48, 32)), ("w2", (64, 24))):
                shapes[f"{own}{name}.weight"] = ("U8", (rows, columns))
                shapes[f"{own}{name}.weight_scale"] = ("F8_E4M3", (rows, columns // 8))
    shapes["vision_tower.layers.0.fc1.weight"] = ("BF16", (64, 64))
    return {name: TensorShape(*shape) for name, shape in (shapes | more).items()}


def test_linear_layers_and_experts_are_found_by_their_names_and_shapes():
    problems = problems_of(TEXT, checkpoint())
    assert [layer for layer, _ in problems if ".0." in layer] == [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.moe.gate",
        "model.layers.0.self_attn.attn",
        "model.layers.0.self_attn.attn",
        "model.layers.0.moe.experts",
    ]
    found = by_name(problems)
    assert found["model.layers.1.self_attn.qkv_proj"].parts == (64, 32, 32)
    experts = found["model.layers.1.moe.experts"]
    assert (experts.num_experts, experts.intermediate, experts.hidden) == (8, 48, 64)
    attention = found["model.layers.1.self_attn.attn"]
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 16)
    assert (found["lm_head"].n, found["lm_head"].k) == (100, 64)
    assert "model.layers.2.self_attn.o_proj" not in found
    notes = layers_of(TEXT, checkpoint).notes
    assert "its layers are those of its safetensors headers" in notes[0]
    assert "x weight of multi-token prediction" in notes[1]
    assert "1 x weight of vision_tower" in notes[1]


def test_biases_sinks_and_keys_that_are_values_too_are_seen_in_the_tensors():
    prefix = "model.layers.0.self_attn."
    more = {f"{prefix}q_proj.bias": ("BF16", (64,)), f"{prefix}sinks": ("BF16", (4,))}
    found = by_name(problems_of(TEXT, checkpoint(**more)))
    assert found[f"{prefix}qkv_proj"].bias and not found[f"{prefix}o_proj"].bias
    assert found[f"{prefix}attn"].variant == "sinks"
    shared = checkpoint()
    del shared[f"{prefix}v_proj.weight"]
    assert by_name(problems_of(TEXT, shared))[f"{prefix}qkv_proj"].parts == (64, 32)


def test_weights_that_are_stored_merged_are_cut_as_their_parts():
    prefix = "model.layers.0."
    more = {
        f"{prefix}attention.qkv_proj.weight": ("BF16", ((4 + 2 + 2) * 16, 64)),
        f"{prefix}mlp.gate_up_proj.weight": ("BF16", (192, 64)),
    }
    found = by_name(problems_of(TEXT, checkpoint(**more), tp=2))
    assert found[f"{prefix}attention.qkv_proj"].parts == (32, 16, 16)
    assert found[f"{prefix}mlp.gate_up_proj"].parts == (48, 48)


def test_tensor_parallelism_cuts_what_is_stored_as_its_name_says():
    found = by_name(problems_of(TEXT, checkpoint(), tp=2))
    assert found["model.layers.0.self_attn.qkv_proj"].parts == (32, 16, 16)
    assert (found["model.layers.0.self_attn.o_proj"].k, found["model.layers.0.moe.gate"].n) == (
        32,
        8,
    )
    assert found["model.layers.0.moe.experts"].intermediate == 24


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        (("BF16", (8, 96, 64)), ("BF16", (8, 64, 48))),
        (("BF16", (8, 64, 96)), ("BF16", (8, 48, 64))),  # inputs first
    ],
)
def test_stacked_experts_are_read_in_both_orders(gate_up, down):
    stacks = {
        "model.layers.0.mlp.experts.gate_up_proj": gate_up,
        "model.layers.0.mlp.experts.down_proj": down,
    }
    experts = by_name(problems_of(TEXT, checkpoint(**stacks)))["model.layers.0.mlp.experts"]
    assert (experts.num_experts, experts.intermediate, experts.hidden) == (8, 48, 64)


def test_packed_weights_have_the_sizes_of_their_codes():
    prefix = "model.layers.0.mlp."
    more = {
        f"{prefix}experts.gate_up_proj_blocks": ("U8", (8, 96, 2, 16)),  # MXFP4
        f"{prefix}experts.gate_up_proj_scales": ("U8", (8, 96, 2)),
        f"{prefix}experts.down_proj_blocks": ("U8", (8, 64, 2, 12)),
        f"{prefix}up_proj.weight_packed": ("I32", (48, 8)),
        f"{prefix}awq.qweight": ("I32", (64, 6)),
    }
    found = by_name(problems_of(TEXT, checkpoint(**more)))
    assert found[f"{prefix}experts"].intermediate == 48
    assert (found[f"{prefix}up_proj"].n, found[f"{prefix}up_proj"].k) == (48, 64)
    assert (found[f"{prefix}awq"].n, found[f"{prefix}awq"].k) == (48, 64)


def test_experts_without_a_gate_are_no_gated_ones():
    more = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": ("BF16", shape)
        for expert in range(4)
        for name, shape in (("up_proj", (48, 64)), ("down_proj", (64, 48)))
    }
    experts = by_name(problems_of(TEXT, checkpoint(**more)))["model.layers.0.mlp.experts"]
    assert experts.activation == "silu without a gate"


@pytest.mark.parametrize("shape", [(0, 64), (1 << 40, 64)])
def test_impossible_sizes_are_refused_by_name(shape):
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has the shape"):
        layers_of(TEXT, lambda: checkpoint(**{name: ("BF16", shape)}))


# ---------------------------------------------------------------- quantisation that is not read


def test_a_config_that_no_reader_takes_still_says_what_is_quantised():
    unread = UnreadConfig({"quant_method": "hqq", "modules_to_not_convert": ["down_proj"]}, "why")
    assert unread.format == "hqq"
    assert unread.is_quantised(["model.layers.0.mlp.up_proj"])
    assert not unread.is_quantised(["model.layers.0.mlp.down_proj"])
    assert not unread.is_quantised(["lm_head"])


# ---------------------------------------------------------------- hostile configs

_VALUES = (
    None,
    True,
    -1,
    0,
    1,
    3,
    1 << 60,
    2.5,
    float("nan"),
    "",
    "silu",
    [],
    [1],
    ["a"],
    {},
    [[]],
)
_MORE = ("layer_types", "sliding_window", "hybrid_override_pattern", "moe_layer_freq", "moe_layers",
         "attn_type_list", "mlp_layer_types", "kv_lora_rank", "sliding_window_pattern",
         "attention_chunk_size", "no_rope_layers", "num_experts", "shared_intermediate_size",
         "global_head_dim", "text_config", "model_type", "architectures")  # fmt: skip


def mutated(config: dict, choose: random.Random) -> dict:
    changed = json.loads(json.dumps(config))
    for _ in range(choose.randint(1, 3)):
        place = changed
        if isinstance(place.get("text_config"), dict) and choose.random() < 0.7:
            place = place["text_config"]
        name = choose.choice([*place, *_MORE])
        if choose.random() < 0.2:
            place.pop(name, None)
        else:
            place[name] = deepcopy(choose.choice(_VALUES))
    return changed


@pytest.mark.parametrize("count", [15, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_mutation_of_a_config_ends_in_anything_but_an_answer_or_our_own_error(
    name, count, tmp_path
):
    choose = random.Random(name)
    file, answers = tmp_path / "config.json", 0
    for _ in range(count):
        file.write_text(json.dumps(mutated(CONFIGS[name], choose)))
        args = Namespace(dtype="auto", tp=choose.choice([1, 1, 2, 3]), ep=1)
        try:
            asked = asked_model(str(file), args, Device.parse("sm_100"))
        except VllmError as error:
            assert "\n" not in str(error)
            continue
        answers += 1
        for _, problem in asked.problems:
            sizes = {
                LinearProblem: ("n", "k"),
                MoEProblem: ("num_experts", "intermediate", "hidden", "top_k"),
                AttentionProblem: ("num_heads", "num_kv_heads", "head_dim"),
            }.get(type(problem), ())
            assert all(getattr(problem, size) > 0 for size in sizes)
    assert answers > count // 10


def test_no_header_ends_in_anything_but_layers_or_our_own_error():
    choose = random.Random(7)
    for _ in range(300):
        tensors = checkpoint()
        for name in choose.sample(sorted(tensors), 5):
            shape = tuple(choose.choice([0, 1, 2, 7, 64]) for _ in range(choose.randint(0, 4)))
            tensors[choose.choice([name, name + ".weight", name.replace("w2", "x")])] = TensorShape(
                choose.choice(["BF16", "U8", "I32", "F4", "?"]), shape
            )
        try:
            problems_of(TEXT, tensors)
        except VllmError as error:
            assert "\n" not in str(error)
