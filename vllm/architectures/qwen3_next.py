"""Qwen3-Next: the layers of Qwen3.5, with the projections of the delta net stored interleaved."""

from functools import partial

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import decoder
from vllm.architectures.qwen import feed_forward, moe_with_shared_expert
from vllm.architectures.qwen3_5 import layer_types, mixer, mtp

_feed_forward = partial(feed_forward, make_moe=moe_with_shared_expert)

ARCHITECTURES = (
    Architecture(
        "qwen3_next",
        ("Qwen3NextForCausalLM",),
        partial(
            decoder,
            mixer=partial(mixer, is_interleaved=True),
            feed_forward=_feed_forward,
            norm="rms_zero_centred",
        ),
        CAUSAL_LM
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
            "mlp_only_layers": None,
            "layer_types": None,
        },
        nullable=frozenset({"layer_types", "mlp_only_layers"}),
        layer_types=layer_types,
        derives_layer_types=("full_attention_interval",),
        partial_rotary_factor=0.25,
        skipped_tensors=("mtp.",),
        describe_mtp=partial(mtp, feed_forward=_feed_forward),
        family="Qwen3-Next",
    ),
)
