"""DeepSeek V2, V3 and models of their design, alone or inside a multimodal one: multi-head latent
attention, and experts in groups.

A layer of multi-token prediction follows the decoder of some.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture, Composite
from vllm.architectures.build import (
    MoENames,
    decoder,
    dim,
    gated_mlp,
    moe,
    numbered_mtp,
    shared_experts,
)
from vllm.architectures.decoder import CachedAttention, Decoder, FeedForward, LatentAttention
from vllm.architectures.fields import Fields
from vllm.architectures.kv_cache import MLA, MLAAttentionSpec
from vllm.architectures.router import Router, sigmoid_router
from vllm.architectures.sharding import Dim, LinearSpec, Part, linear
from vllm.errors import CheckpointError

V3_ROUTER = MoENames(correction_bias="gate.e_score_correction_bias")


def _describe(fields: Fields) -> Decoder:
    return mla_decoder(fields, _feed_forward)


def latent_attention(fields: Fields, layer: int) -> LatentAttention:
    """The projections to latents are small and replicated.

    Attention is listed as it runs over the cache: the up-projections absorbed into the queries,
    so that all heads share one KV head of kv_lora_rank + qk_rope_head_dim (512 + 64), whose first
    kv_lora_rank columns are the values. kv_b_proj is the weight that gets absorbed.
    """
    return fields.once("latent_attention", lambda: _latent_attention(fields))


def _latent_attention(fields: Fields) -> LatentAttention:
    hidden, bias = dim(fields, "hidden_size"), fields.flag("attention_bias")
    rope, nope = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    value, latent = fields.size("v_head_dim"), dim(fields, "kv_lora_rank")
    num_heads = fields.size("num_attention_heads")
    if rope % 2:
        raise CheckpointError(
            f"{fields.source}: qk_rope_head_dim = {rope} is odd, but rotations are of pairs"
        )
    queries, absorbed, values = (
        Dim("num_attention_heads", num_heads, size) for size in (nope + rope, nope + value, value)
    )
    kv_a, q_rank = Part("kv_a_proj_with_mqa", (Dim("kv_lora_rank", latent.size + rope),)), 0
    if fields.get("q_lora_rank") is None:
        name = "self_attn.kv_a_proj_with_mqa"
        kv_a_proj = LinearSpec(name, (kv_a,), hidden, "replicated", bias)
        q_proj = linear("self_attn.q_proj", queries, hidden, "column")
    else:
        rank = dim(fields, "q_lora_rank")
        parts, q_rank = (Part("q_a_proj", (rank,)), kv_a), rank.size
        kv_a_proj = LinearSpec("self_attn.fused_qkv_a_proj", parts, hidden, "replicated", bias)
        q_proj = linear("self_attn.q_b_proj", queries, rank, "column")
    kv_b = Part("kv_b_proj", (absorbed,))
    one_head = Dim("kv_lora_rank", 1, latent.size + rope, "repeated")
    cache = MLAAttentionSpec(one_head, latent.size + rope, latent.size)
    return LatentAttention(
        "self_attn",
        kv_a_proj,
        q_proj,
        LinearSpec("self_attn.kv_b_proj", (kv_b,), latent, "column", is_absorbed=True),
        linear("self_attn.o_proj", hidden, values, "row", bias),
        CachedAttention("self_attn.attn", queries, cache, MLA, softmax_scale(fields, nope + rope)),
        q_lora_rank=q_rank,
        nope_dim=nope,
        rope_dim=rope,
        value_dim=value,
        is_interleaved=fields.flag("rope_interleave", True),
    )


def mla_decoder(fields: Fields, feed_forward: Any, mixer: Any = latent_attention) -> Decoder:
    """feed_forward, mixer: of layer i."""
    rotary_dim = fields.size("qk_rope_head_dim")
    return decoder(fields, mixer, feed_forward, rotary_head_dim=rotary_dim)


def softmax_scale(fields: Fields, head_dim: int) -> float:
    """1 / sqrt(head_dim), under YaRN times the square of its temperature: 0.1 * mscale_all_dim *
    ln(factor) + 1. https://arxiv.org/abs/2405.04434, section 3.1.4"""
    rope: Mapping[str, Any] = fields.rope()
    weight, factor = rope.get("mscale_all_dim") or 0, rope.get("factor", 1)
    is_scaled = rope.get("rope_type", "default") != "default" and factor > 1
    temperature = 0.1 * weight * math.log(factor) + 1 if is_scaled else 1.0
    return float(head_dim**-0.5 * temperature**2)


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    is_sparse = layer % fields.optional("moe_layer_freq", 1) == 0
    if layer < fields.optional("first_k_dense_replace", 0, lowest=0) or not is_sparse:
        return gated_mlp(fields)
    return experts(fields, partial(sigmoid_router, fields), V3_ROUTER)


def experts(fields: Fields, router: Any, names: MoENames) -> FeedForward:
    """router: of the numbers of experts and of those per token."""
    count = dim(fields, "n_routed_experts")
    shared = partial(shared_experts, fields, "n_shared_experts")
    return fields.once("moe", lambda: moe(fields, count, router, shared(), names=names))


_mtp = partial(numbered_mtp, mixer=latent_attention, feed_forward=_feed_forward)


# ---------------------------------------------------------------- V2


def _v2_feed_forward(fields: Fields, layer: int) -> FeedForward:
    if layer < fields.optional("first_k_dense_replace", 0, lowest=0):
        return gated_mlp(fields)
    return experts(fields, partial(_v2_router, fields), MoENames())


def _v2_router(fields: Fields, num_experts: int, top_k: int) -> Router:
    """The best of all experts, or of the groups whose best expert is best."""
    method = fields.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"{fields.source}: topk_method = {method!r}: deepseek_v2 takes greedy or "
            f"group_limited_greedy"
        )
    if fields.flag("norm_topk_prob"):
        raise CheckpointError(
            f"{fields.source}: norm_topk_prob = true: implementations of deepseek_v2 differ in "
            f"what it means; it takes false"
        )
    has_groups = method == "group_limited_greedy"
    return Router(
        num_experts,
        top_k,
        renormalise=False,
        num_groups=fields.optional("n_group", 1) if has_groups else 1,
        topk_groups=fields.optional("topk_group", 1) if has_groups else 1,
        routed_scale=fields.number("routed_scaling_factor", 1.0),
    )


# ---------------------------------------------------------------- GLM-4.7-Flash


def _glm_feed_forward(fields: Fields, layer: int) -> FeedForward:
    """The first layer is dense where mlp_layer_types does not say."""
    num_layers = fields.size("num_hidden_layers")
    kinds = fields.entries("mlp_layer_types", str) or ["dense"] + ["sparse"] * (num_layers - 1)
    if len(kinds) != num_layers or not {"dense", "sparse"}.issuperset(kinds):
        raise CheckpointError(
            f"{fields.source}: mlp_layer_types = {kinds!r}: it takes dense or sparse for each of "
            f"{num_layers} layers"
        )
    return gated_mlp(fields) if kinds[layer] == "dense" else _glm_experts(fields, layer)


def _glm_experts(fields: Fields, layer: int) -> FeedForward:
    return experts(fields, partial(sigmoid_router, fields), V3_ROUTER)


COMMON: dict[str, Any] = CAUSAL_LM | {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
}
_V3: dict[str, Any] = COMMON | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_interleave": True,
}
_V2: dict[str, Any] = COMMON | {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "q_lora_rank": 1536,
    "n_group": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "topk_group": None,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
}
_GLM: dict[str, Any] = COMMON | {
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 768,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_interleave": True,
    "mlp_layer_types": None,
}
NULLABLE = frozenset({"q_lora_rank", "num_key_value_heads", "n_group", "topk_group"})
# The names that transformers 5 gives it.
_RENAMED = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}
_Mla = partial(Architecture, nullable=NULLABLE, renamed_fields=_RENAMED)

ARCHITECTURES = (
    # Checkpoints of Kimi K2 name the class of V3, which then is the last of that name.
    _Mla(
        "kimi_k2",
        ("DeepseekV3ForCausalLM",),
        _describe,
        _V3,
        has_mtp_layers=True,
        describe_mtp=_mtp,
        is_in_transformers=False,
        family="Kimi K2",
    ),
    _Mla(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM",),
        _describe,
        _V3,
        has_mtp_layers=True,
        describe_mtp=_mtp,
        family="DeepSeek V3, R1 and V3.1",
    ),
    _Mla(
        "deepseek_v2",
        ("DeepseekV2ForCausalLM",),
        partial(mla_decoder, feed_forward=_v2_feed_forward),
        _V2,
        nullable=NULLABLE | {"num_experts_per_tok"},
        family="DeepSeek V2 and V2-Lite",
    ),
    _Mla(
        "glm4_moe_lite",
        ("Glm4MoeLiteForCausalLM",),
        partial(mla_decoder, feed_forward=_glm_feed_forward),
        _GLM,
        nullable=NULLABLE | {"mlp_layer_types"},
        has_mtp_layers=True,
        describe_mtp=partial(numbered_mtp, mixer=latent_attention, feed_forward=_glm_experts),
        family="GLM-4.7-Flash",
    ),
    Composite(
        "kimi_k25",
        # As its own code and as transformers call it.
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        ("deepseek_v3", "kimi_k2"),
        ties_embeddings=True,
        skipped_tensors=("vision_tower.", "mm_projector."),
        renamed_tensors=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        has_mtp_layers=True,
        is_in_transformers=False,
        family="Kimi K2.5 and K2.6",
        notice="Kimi K2.5: serving the text model; images and videos are not supported",
    ),
)
