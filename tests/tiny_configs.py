"""Sizes of tiny models of every architecture, as config.json has them."""

VOCAB = 96

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Two key heads for four value heads, whose sizes are no multiple of sixteen. The norm of a head's
# output magnifies the rounding of an output close to zero, less so with a larger epsilon.
_HYBRID = {
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
}
_HYBRID_MOE = _HYBRID | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}

_LLAMA4 = {
    "num_hidden_layers": 4,
    "intermediate_size": 40,
    "intermediate_size_mlp": 112,
    "num_local_experts": 6,
    "moe_layers": [0, 1, 2],
    "no_rope_layers": [1, 0, 1, 1],
    "attention_chunk_size": 20,
    "floor_scale": 24,
    "rope_parameters": _LLAMA3,
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.0 + 0.7 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
_WINDOWS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}

_GEMMA4 = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
    "head_dim": 16,
    "global_head_dim": 40,
    "num_key_value_heads": 6,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_EXPERTS = _GEMMA4 | {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
}

# A dense layer first; two shared experts.
_GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

# No size is a multiple of sixteen. Queries and keys are rotated in pairs of neighbours.
_MLA = {
    "num_key_value_heads": 6,
    "head_dim": None,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

# Mamba2 layers of two groups of heads, one layer of attention, and MLPs.
_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "layer_norm_epsilon": 1e-3,
    "ssm_state_size": 12,
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "n_groups": 2,
}
_NEMOTRON_H_MOE = _NEMOTRON_H | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.5,
}

# Name of a test model -> model_type, differences from COMMON.
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    # Chunks of no whole number of blocks. The last layer is dense, the second sees everything.
    "llama4": ("llama4_text", _LLAMA4),
    "llama4-multimodal": ("llama4", _LLAMA4),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    # Of its layers only the last has experts, and a token goes to all of them.
    "qwen3_moe-some-dense": (
        "qwen3_moe",
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "num_experts": 5,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 24,
            "attention_bias": True,
        },
    ),
    "glm4_moe": ("glm4_moe", _GLM | {"n_group": 4, "topk_group": 2, "attention_bias": True}),
    "glm4_moe-normed": ("glm4_moe", _GLM | {"use_qk_norm": True, "norm_topk_prob": False}),
    # The first layer is dense, the second sees everything and does not rotate.
    "afmoe": (
        "afmoe",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 20,
            "mup_enabled": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "num_shared_experts": 2,
            "route_scale": 1.5,
        },
    ),
    # The second layer has a window.
    "dots1": (
        "dots1",
        _GLM
        | {
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
        },
    ),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "alpha": 50.0,
            },
        },
    ),
    # Numbers of each layer, as published.
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {
            "intermediate_size": 40,
            "num_experts": 6,
            "moe_topk": [3, 3, 3],
            "moe_intermediate_size": [40, 40, 40],
            "attention_bias": True,
        },
    ),
    # The last layer is dense too.
    "hy_v3": (
        "hy_v3",
        {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "attention_bias": True,
        },
    ),
    # Heads of values are narrower; layers with a window have more of keys and sinks.
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            "num_attention_heads": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "attention_bias": True,
        },
    ),
    # Half of each head is rotated.
    "minimax_m2": (
        "minimax_m2",
        {
            "intermediate_size": 40,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rotary_dim": 8,
        },
    ),
    "mixtral": (
        "mixtral",
        {"intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "mixtral-window": (
        "mixtral",
        {
            "intermediate_size": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
        },
    ),
    "olmoe": ("olmoe", {"intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": _YARN,
            },
        },
    ),
    # The first layer is dense.
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    # The second layer is dense; of the others every second slides.
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    # As V2-Lite: no latents of queries.
    "deepseek_v2": ("deepseek_v2", _MLA | {"q_lora_rank": None}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        _MLA
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _MLA | {"n_group": 4, "topk_group": 2, "rope_parameters": _YARN | {"mscale_all_dim": 0.8}},
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        _MLA | {"n_group": 1, "topk_group": 1, "rope_interleave": False, "attention_bias": True},
    ),
    "kimi_k25-multimodal": ("kimi_k25", _MLA | {"n_group": 1, "topk_group": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", _MLA | {"rms_norm_eps": 1e-5}),
    # The first layer is dense.
    "qwen3_next": ("qwen3_next", _HYBRID_MOE | {"mlp_only_layers": [0]}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}, "max_position_embeddings": 256},
    ),
    "mistral3": ("mistral3", {}),
    "mistral4-multimodal": (
        "mistral3",
        _MLA
        | {
            "model_type": "mistral4",
            "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.3},
        },
    ),
    "mistral4-direct-multimodal": (
        "mistral3",
        _MLA
        | {
            "model_type": "mistral4",
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1, "mscale_all_dim": 0.0},
        },
    ),
    "phi3": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 512}),
    "phi3-window": ("phi3", {"sliding_window": 24}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
    ),
    "seed_oss": ("seed_oss", {"attention_bias": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 20},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "exaone4": (
        "exaone4",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "exaone4-full": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "gemma2": (
        "gemma2",
        _WINDOWS | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("gemma3_text", _WINDOWS),
    "gemma3-multimodal": ("gemma3", _WINDOWS),
    # Layers that see everything have larger heads, fewer of keys, and no values of their own.
    "gemma4": ("gemma4_text", _GEMMA4 | {"final_logit_softcapping": 3.0}),
    "gemma4-values": ("gemma4_text", _GEMMA4 | {"attention_k_eq_v": False}),
    "gemma4-experts": ("gemma4_text", _GEMMA4_EXPERTS),
    "gemma4-multimodal": ("gemma4", _GEMMA4_EXPERTS),
    # A window that is no whole number of blocks, and weights of experts large enough to be clamped.
    "gpt_oss": (
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "swiglu_limit": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3_vl-multimodal": ("qwen3_vl", {"rope_parameters": _MROPE}),
    # The first layer is dense.
    "qwen3_vl_moe-multimodal": (
        "qwen3_vl_moe",
        {
            "rope_parameters": _MROPE,
            "mlp_only_layers": [0],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "qwen3_5": ("qwen3_5_text", _HYBRID),
    "qwen3_5-multimodal": ("qwen3_5", _HYBRID | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", _HYBRID_MOE),
    "qwen3_5_moe-multimodal": ("qwen3_5_moe", _HYBRID_MOE),
    "nemotron_h": ("nemotron_h", _NEMOTRON_H),
    "nemotron_h-moe": ("nemotron_h", _NEMOTRON_H_MOE),
    "nemotron_h-latent": (
        "nemotron_h",
        _NEMOTRON_H_MOE | {"moe_latent_size": 24, "n_group": 4, "topk_group": 2},
    ),
}
# Heads of these are hidden_size / num_attention_heads wide.
WITHOUT_HEAD_DIM = {
    *("qwen2", "qwen2_moe", "olmoe", "phi3", "granite", "smollm3", "exaone4"),
    *("olmo2", "olmo3", "ernie4_5_moe", "dots1"),
}
# model_type of a multimodal test model -> of the text model in it.
MULTIMODAL = {
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
