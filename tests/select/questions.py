"""Random questions: a model on a machine under flags and variables, as `explain` and an engine are
asked them. A question is the same whenever its number is."""

import copy
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from vllm.architectures.registry import builtin_config, builtin_names
from vllm.config.hf_config import read_config
from vllm.kernels.report.question import CPUS, GPUS
from vllm.machine import CHIPS

# hidden_size, intermediate_size, heads, KV heads, head_dim: published models, and odd ones.
_SIZES = (
    (4096, 12288, 32, 8, 128),
    (4096, 14336, 32, 8, 128),
    (2048, 6144, 32, 4, 128),
    (2048, 5632, 16, 16, 128),
    (5120, 32768, 32, 8, 128),
    (576, 1536, 12, 4, 64),
    (2880, 2880, 64, 8, 64),
    (1024, 2816, 16, 16, 64),
    (48, 112, 8, 2, 16),
    (528, 1008, 8, 4, 80),
)
# Experts, experts of a token, moe_intermediate_size.
_EXPERTS = ((128, 8, 768), (256, 8, 512), (64, 6, 1408), (60, 4, 1408), (8, 2, 320), (6, 2, 40))
# Key heads, value heads, their sizes.
_STATES = ((16, 32, 128, 128), (16, 64, 128, 128), (2, 4, 24, 20))

_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_TOKEN = {**FP8_WEIGHTS, "strategy": "token", "dynamic": True}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_TOKEN = {"strategy": "token", "dynamic": True}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed(form: str, weights: dict, inputs: dict | None, *targets: str) -> dict[str, Any]:
    group = {"targets": targets or ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"0": group}}


_QUANTIZATIONS: tuple[dict[str, Any] | None, ...] = (
    None,
    _BLOCKS,
    _BLOCKS,
    _BLOCKS,
    _BLOCKS | {"scale_fmt": "ue8m0"},
    _BLOCKS | {"use_deep_gemm": False},
    _BLOCKS | {"use_deep_gemm": False},
    _BLOCKS | {"use_deep_gemm": True},
    _BLOCKS | {"weight_block_size": [64, 64]},
    {"quant_method": "fp8", "activation_scheme": "dynamic"},
    {"quant_method": "fp8", "activation_scheme": "static"},
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
    {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    {"quant_method": "awq", "bits": 4, "group_size": 128},
    compressed("float-quantized", FP8_WEIGHTS | {"strategy": "channel"}, FP8_TOKEN),
    compressed(
        "float-quantized",
        FP8_WEIGHTS | {"strategy": "block", "block_structure": [128, 128]},
        FP8_WEIGHTS | {"strategy": "group", "group_size": 128, "dynamic": True},
    ),
    compressed("nvfp4-pack-quantized", _FP4, _FP4 | {"dynamic": "local"}),
    compressed("nvfp4-pack-quantized", _FP4, None, "re:.*mlp.*"),
    compressed("pack-quantized", _INT4, None),
    compressed("pack-quantized", _INT4 | {"symmetric": False}, FP8_TOKEN),
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    compressed("int-quantized", _INT8 | {"strategy": "channel"}, _INT8 | _TOKEN),
    {"quant_method": "hqq", "bits": 4, "group_size": 128},
)
# Where a quant_method lists the layers that are not quantised.
_LISTS = {"fp8": "modules_to_not_convert", "awq": "modules_to_not_convert", "modelopt": "ignore",
          "compressed-tensors": "ignore"}  # fmt: skip
_KEPT = ([], ["lm_head"], ["lm_head", "mlp.gate"], ["model.layers.0.mlp", "o_proj"],
         ["re:.*self_attn.*", "lm_head"], ["model.language_model.layers.1.self_attn"])  # fmt: skip

_METHODS = ("fp8", "modelopt", "modelopt_fp4", "compressed-tensors", "fp4")
_OVERRIDES: tuple[dict[str, Any], ...] = (
    {"intermediate_size": 1024},
    {"head_dim": 64},
    {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8},
    {"num_key_value_heads": 3},
    {"vocab_size": 50000},
    {"dtype": "float16"},
    {"torch_dtype": "float32"},
    {"tie_word_embeddings": True},
    {"quantization_config": _BLOCKS},
    {"quantization_config": {"use_deep_gemm": False}},
    {"quantization_config": None},
    {"sliding_window": 256},
    {"hidden_sise": 1},
)

# Chips with kernels of several libraries more often.
_DEVICES = (*CHIPS, *GPUS, *CPUS, "sm_90a", "RTX 5090", "b200", "h100", "sm_103", "sm_121")
_LIBS = (
    "all",
    "all",
    "all",
    "none",
    "deep_gemm",
    "deep_gemm==2.6+sm120",
    "flashinfer==0.6.13",
    "flashinfer==0.2.0,flashinfer_cubin",
    "deep_gemm,flashinfer==0.6.13+fused_moe_90+fused_moe_100,flashinfer_cubin==0.6.13",
    "humming,deep_gemm=broken: it fails",
    None,
)
_FLAGS = (
    "--linear-backend cutlass",
    "--linear-backend deep_gemm",
    "--linear-backend triton",
    "--linear-backend marlin --on-unmet fallback",
    "--linear-backend flashinfer-cutlass --on-unmet fallback",
    "--linear-backend cpu",
    "--linear-backend emulate:sm_100",
    "--linear-backend emulate:deep_gemm@sm_90",
    "--attention-backend torch",
    "--attention-backend flashinfer --on-unmet fallback",
    "--kernel *.down_proj=triton",
    "--kernel *.qkv_proj=torch --kernel lm_head=torch",
    "--kernel model.layers.0.*=marlin --on-unmet fallback",
    "--kernel *.no_such_layer=torch",
    "--require-native",
    "--require-evidence run",
    "--require-evidence measured",
    "--requant exact-only",
    "--requant allow",
)
_FLAGS_OF_EXPERTS = (
    "--moe-backend triton",
    "--moe-backend deep_gemm --on-unmet fallback",
    "--moe-backend emulate:sm_100",
    "--kernel *.experts=torch",
)
_BUDGETS = ("0.0", "0.01", "0.0266", "0.05")
_VARIABLES = (
    "VLLM_USE_DEEP_GEMM=0",
    "VLLM_USE_DEEP_GEMM=1",
    "VLLM_MOE_USE_DEEP_GEMM=0",
    "VLLM_MOE_USE_DEEP_GEMM=1",
    "VLLM_USE_DEEP_GEMM_E8M0=0",
    "VLLM_USE_DEEP_GEMM_E8M0=1",
    "VLLM_NVFP4_GEMM_BACKEND=marlin",
    "VLLM_NVFP4_GEMM_BACKEND=flashinfer-cutlass",
    "VLLM_TEST_FORCE_FP8_MARLIN=1",
    "VLLM_LINEAR_BACKEND=triton",
    "VLLM_LINEAR_BACKEND=cutlass",
)


@dataclass(frozen=True)
class Question:
    """config: of config.json. device, libs, dtype, kv_cache_dtype: as `explain` takes them; libs
    None: those installed here. flags: words that both commands take. variables: that are set.
    tp, dp: ranks; is_ep: whether experts are dealt out to all of them. pp: pipeline stages. rank:
    which of the tensor-parallel ranks the engine's JSON is of. stored: by name the dtypes, as
    safetensors calls them, and bytes of tensors in a file beside config.json; without any, weights
    are dummies."""

    config: dict[str, Any]
    device: str
    libs: str | None
    flags: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    tp: int = 1
    dp: int = 1
    pp: int = 1
    is_ep: bool = False
    rank: int = 0
    stored: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """The model, with weights where some are stored."""
        for file in folder.iterdir():
            file.unlink()
        (folder / "config.json").write_text(json.dumps(self.config))
        if not self.stored:
            return
        header, end = {}, 0
        for name, (dtype, content) in self.stored.items():
            shape = [1, len(content) // (4 if dtype == "F32" else 2)]
            offsets = [end, end := end + len(content)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        text = json.dumps(header).encode()
        contents = b"".join(content for _, content in self.stored.values())
        file = folder / "model.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text + contents)


def question(number: int) -> Question:
    rng = Random(number)
    config = _config(rng)
    tp = rng.choice((1, 1, 1, 1, 2, 2, 4, 8))
    has_experts = "moe" in config["model_type"]
    texts = _some(rng, _FLAGS, 2)
    if has_experts and rng.random() < 0.25:
        texts.append(rng.choice(_FLAGS_OF_EXPERTS))
    flags = [word for text in texts for word in text.split()]
    if rng.random() < 0.25:
        flags += ["--max-requant-error", rng.choice(_BUDGETS)]
    flags += _flags_of_model(rng, config)
    dp = rng.choice((1, 1, 2))
    num_layers = config.get("text_config", config)["num_hidden_layers"]
    return Question(
        config,
        rng.choice(_DEVICES),
        rng.choice(_LIBS),
        flags,
        dict(text.split("=") for text in _some(rng, _VARIABLES, 2)),
        rng.choice(("auto", "auto", "auto", "bfloat16", "float16", "float32")),
        rng.choice(("auto", "auto", "auto", "fp8", "bfloat16")),
        tp,
        dp,
        min(rng.choice((1, 1, 1, 1, 1, 2)), num_layers),
        tp * dp > 1 and rng.random() < (0.6 if has_experts else 0.01),
        rng.randrange(tp),
        _stored(rng) if rng.random() < 0.25 else {},
    )


def _some(rng: Random, texts: tuple[str, ...], most: int) -> list[str]:
    """Mostly none or one, of which all can be followed more often than of several."""
    return rng.sample(texts, rng.choice((0, 0, 0, 0, 1, 1, most)))


def _flags_of_model(rng: Random, config: dict[str, Any]) -> list[str]:
    """Mostly none: what else than its config.json says how the model is read."""
    words = []
    if rng.random() < 0.12:
        parts = config, config.get("text_config", {})
        stored = next((one for part in parts if (one := part.get("quantization_config"))), {})
        own = stored.get("quant_method", "fp8")
        words += ["--quantization", rng.choice((own, own, own, *_METHODS))]
    if rng.random() < 0.12 and read_config(config) is not None:
        text = rng.choice(_OVERRIDES)
        is_nested = "text_config" in config and rng.random() < 0.9
        words += ["--hf-overrides", json.dumps({"text_config": text} if is_nested else text)]
    return words


def _stored(rng: Random) -> dict[str, tuple[str, bytes]]:
    """What of a checkpoint's weights decisions depend on."""
    dtypes = {"F32": bytes(8), "BF16": bytes(4), "F16": bytes(4)}
    names = ["model.embed_tokens.weight", "model.language_model.embed_tokens.weight",
             "lm_head.weight", "model.norm.weight"]  # fmt: skip
    names = rng.sample(names, rng.randrange(1, 4))
    found = {name: (dtype, dtypes[dtype]) for name in names for dtype in rng.sample([*dtypes], 1)}
    if rng.random() < 0.6:
        powers = struct.pack("<2f", 0.25, rng.choice((2.0, 3.0)))
        found["model.layers.0.mlp.gate_proj.weight_scale_inv"] = "F32", powers
    return found


def _config(rng: Random) -> dict[str, Any]:
    return _published(rng) if rng.random() < 0.3 else _made_up(rng)


def _published(rng: Random) -> dict[str, Any]:
    """A few layers of a model that `explain` knows by name."""
    names = [name for name in builtin_names() if "DeepSeek" not in name]
    config = copy.deepcopy(builtin_config(rng.choice(names)))
    assert config is not None
    config.get("text_config", config)["num_hidden_layers"] = rng.choice((1, 2, 4))
    return config


def _made_up(rng: Random) -> dict[str, Any]:
    text = rng.choice(_TEXT_MODELS)(rng)
    hidden, inner, heads, kv_heads, head_dim = rng.choice(_SIZES)
    layers = rng.choice((1, 2, 3, 4))
    text |= {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": rng.choice((32000, 151936, 100)),
        "max_position_embeddings": rng.choice((512, 32768)),
    }
    if hidden != heads * head_dim or "qwen3" in text["model_type"] or rng.random() < 0.5:
        text["head_dim"] = head_dim
    text |= {name: rng.choice((True, False)) for name in ("attention_bias", "mlp_bias")
             if rng.random() < 0.2}  # fmt: skip
    if kv_heads == heads and rng.random() < 0.5:
        del text["num_key_value_heads"]
    if rng.random() < 0.2 and (kinds := _LAYER_TYPES.get(text["model_type"])):
        text["layer_types"] = rng.choices(kinds, k=layers)
    if text["model_type"] == "nemotron_h":
        text["hybrid_override_pattern"] = "".join(rng.choices("MM*-E", k=layers))
    if rng.random() < 0.04:
        text["auto_map"] = {}  # a config that transformers reads
    name = rng.choice(("dtype", "torch_dtype"))
    stored = rng.choice((None, "bfloat16", "bfloat16", "float16", "float32"))
    quantization = _quantization(rng)
    config, outer = text, _COMPOSITES.get(text["model_type"])
    if outer is not None and rng.random() < 0.5:
        text.pop("architectures")
        config = {"model_type": outer[0], "architectures": [outer[1]], "text_config": text}
    if stored is not None:
        rng.choice((text, config))[name] = stored
    if rng.random() < 0.5:
        config["tie_word_embeddings"] = rng.choice((True, False))
    if quantization is not None:
        rng.choice((text, config, config))["quantization_config"] = quantization
    return config


def _quantization(rng: Random) -> dict[str, Any] | None:
    found = rng.choice(_QUANTIZATIONS)
    if found is None or found["quant_method"] not in _LISTS:
        return found
    kept = rng.choice(_KEPT)
    return {**found, _LISTS[found["quant_method"]]: kept} if kept else found


def _llama(rng: Random) -> dict[str, Any]:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _mistral(rng: Random) -> dict[str, Any]:
    window = {} if rng.random() < 0.5 else {"sliding_window": rng.choice((None, 1024))}
    return {"model_type": "mistral", "architectures": ["MistralForCausalLM"]} | window


def _ministral(rng: Random) -> dict[str, Any]:
    return {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}


def _qwen2(rng: Random) -> dict[str, Any]:
    window = {"use_sliding_window": rng.random() < 0.5, "max_window_layers": 1}
    if rng.random() < 0.5:
        window["sliding_window"] = 2048
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]} | window


def _qwen3(rng: Random) -> dict[str, Any]:
    return _qwen2(rng) | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def _experts(rng: Random) -> dict[str, Any]:
    count, top_k, inner = rng.choice(_EXPERTS)
    return {
        rng.choice(("num_experts", "num_local_experts")): count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": inner,
    }


def _qwen3_moe(rng: Random) -> dict[str, Any]:
    rest = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    some_dense = {"mlp_only_layers": [0], "decoder_sparse_step": rng.choice((1, 2))}
    return rest | _experts(rng) | (some_dense if rng.random() < 0.3 else {})


def _qwen3_5(rng: Random) -> dict[str, Any]:
    keys, values, key_dim, value_dim = rng.choice(_STATES)
    interval = {} if rng.random() < 0.5 else {"full_attention_interval": rng.choice((2, 4))}
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    } | interval


def _qwen3_5_moe(rng: Random) -> dict[str, Any]:
    name = {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    experts = _experts(rng)
    experts["num_experts"] = experts.pop("num_local_experts", experts.get("num_experts"))
    return _qwen3_5(rng) | name | experts | {"shared_expert_intermediate_size": 512}


def _nemotron_h(rng: Random) -> dict[str, Any]:
    """The kinds of its layers go by their number."""
    count, top_k, inner = rng.choice(_EXPERTS)
    return {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_routed_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": 512,
    }


def _deepseek(rng: Random) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }


_TEXT_MODELS = (
    _llama,
    _mistral,
    _ministral,
    _qwen2,
    _qwen3,
    _qwen3_moe,
    _qwen3_5,
    _qwen3_5_moe,
) * 3
_TEXT_MODELS += (_qwen3_moe, _qwen3_5_moe, _deepseek, _nemotron_h)
_LAYER_TYPES = {
    "qwen2": ("full_attention", "sliding_attention"),
    "qwen3": ("full_attention", "sliding_attention"),
    "qwen3_5_text": ("full_attention", "linear_attention"),
    "qwen3_5_moe_text": ("full_attention", "linear_attention"),
}
# By the type of the text model.
_COMPOSITES = {
    "mistral": ("mistral3", "Mistral3ForConditionalGeneration"),
    "ministral3": ("mistral3", "Mistral3ForConditionalGeneration"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
}
