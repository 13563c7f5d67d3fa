"""Shapes of well-known models, so that their kernel choices can be listed without a download.

Each is the part of a public config.json that decides kernels. Lists of modules that are not
quantised are shortened to the last parts of their names, which mean the same layers.
"""

import copy
from typing import Any

_FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}

_QWEN3_5_MOE_TEXT = {
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "num_key_value_heads": 2,
    "vocab_size": 248320,
}

_QWEN3_5_35B_A3B_FP8 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": _QWEN3_5_MOE_TEXT
    | {
        "hidden_size": 2048,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "shared_expert_intermediate_size": 512,
    },
    "quantization_config": _FP8_BLOCK
    | {
        "modules_to_not_convert": [
            "lm_head",
            "model.visual",
            "embed_tokens",
            "mlp.gate",
            "mlp.shared_expert_gate",
            "linear_attn.conv1d",
            "linear_attn.in_proj_a",
            "linear_attn.in_proj_b",
        ]
    },
}

_QWEN3_5_397B_A17B_NVFP4 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": _QWEN3_5_MOE_TEXT
    | {
        "hidden_size": 4096,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 60,
        "shared_expert_intermediate_size": 1024,
    },
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": [
            "lm_head",
            "model.visual*",
            "*.linear_attn*",
            "*.self_attn*",
            "*.mlp.shared_expert*",
            "*.mlp.shared_expert_gate",
        ],
    },
}

_QWEN3_8B_FP8 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "quantization_config": _FP8_BLOCK | {"modules_to_not_convert": ["lm_head"]},
}

_QWEN3_30B_A3B_FP8 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "quantization_config": _FP8_BLOCK | {"modules_to_not_convert": ["lm_head", "mlp.gate"]},
}

_DEVSTRAL_SMALL_2_24B = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "ministral3",
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    },
}

_LLAMA_3_1_8B_NVFP4 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
    },
}

_DEEPSEEK_V3_1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "quantization_config": _FP8_BLOCK | {"scale_fmt": "ue8m0"},
}

# Our name -> (name on the Hugging Face hub, what its config.json says).
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-35B-A3B-FP8": ("Qwen/Qwen3.5-35B-A3B-FP8", _QWEN3_5_35B_A3B_FP8),
    "Qwen3.5-397B-A17B-NVFP4": ("nvidia/Qwen3.5-397B-A17B-NVFP4", _QWEN3_5_397B_A17B_NVFP4),
    "Qwen3-8B-FP8": ("Qwen/Qwen3-8B-FP8", _QWEN3_8B_FP8),
    "Qwen3-30B-A3B-FP8": ("Qwen/Qwen3-30B-A3B-FP8", _QWEN3_30B_A3B_FP8),
    "Devstral-Small-2-24B": (
        "mistralai/Devstral-Small-2-24B-Instruct-2512",
        _DEVSTRAL_SMALL_2_24B,
    ),
    "Llama-3.1-8B-NVFP4": ("nvidia/Llama-3.1-8B-Instruct-FP4", _LLAMA_3_1_8B_NVFP4),
    "DeepSeek-V3.1": ("deepseek-ai/DeepSeek-V3.1", _DEEPSEEK_V3_1),
}
BUILTIN_NAMES = tuple(_MODELS)
HUB_NAMES = {name: hub_name for name, (hub_name, _) in _MODELS.items()}


def builtin_config(name: str) -> dict[str, Any] | None:
    """The config of a built-in model, by its short or its hub name in any case; None for others."""
    for short, (hub_name, config) in _MODELS.items():
        if name.lower() in (short.lower(), hub_name.lower()):
            return copy.deepcopy(config)
    return None
