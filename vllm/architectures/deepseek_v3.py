"""DeepSeek V3: multi-head latent attention, and experts in groups. `explain` only."""

from functools import partial

from vllm.architectures.architecture import Architecture
from vllm.architectures.build import MoENames, decoder, dim, gated_mlp, moe, shared_experts
from vllm.architectures.decoder import CachedAttention, Decoder, FeedForward, LatentAttention
from vllm.architectures.fields import Fields
from vllm.architectures.kv_cache import MLAAttentionSpec
from vllm.architectures.router import sigmoid_router
from vllm.architectures.sharding import Dim, LinearSpec, Part, linear

MLA = "MLA"


def _describe(fields: Fields) -> Decoder:
    rotary_dim = fields.size("qk_rope_head_dim")
    return decoder(fields, latent_attention, _feed_forward, rotary_head_dim=rotary_dim)


def latent_attention(fields: Fields, layer: int) -> LatentAttention:
    """The projections to latents are small and replicated.

    Attention is listed as it runs over the cache: the up-projections absorbed into the queries,
    so that all heads share one KV head of kv_lora_rank + qk_rope_head_dim (512 + 64), whose first
    kv_lora_rank columns are the values. kv_b_proj is the weight that gets absorbed; prefill
    without absorption multiplies by it.
    """
    hidden, bias = dim(fields, "hidden_size"), fields.flag("attention_bias")
    rope, nope = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    value, latent = fields.size("v_head_dim"), dim(fields, "kv_lora_rank")
    num_heads = fields.size("num_attention_heads")
    queries, absorbed, values = (
        Dim("num_attention_heads", num_heads, size) for size in (nope + rope, nope + value, value)
    )
    kv_a = Part("kv_a_proj_with_mqa", (Dim("kv_lora_rank", latent.size + rope),))
    projections = []
    if fields.get("q_lora_rank") is None:
        name = "self_attn.kv_a_proj_with_mqa"
        projections.append(linear("self_attn.q_proj", queries, hidden, "column"))
        projections.append(LinearSpec(name, (kv_a,), hidden, "replicated", bias))
    else:
        rank = dim(fields, "q_lora_rank")
        parts, name = (Part("q_a_proj", (rank,)), kv_a), "self_attn.fused_qkv_a_proj"
        projections.append(LinearSpec(name, parts, hidden, "replicated", bias))
        projections.append(linear("self_attn.q_b_proj", queries, rank, "column"))
    projections.append(linear("self_attn.kv_b_proj", absorbed, latent, "column"))
    one_head = Dim("kv_lora_rank", 1, latent.size + rope, "repeated")
    cache = MLAAttentionSpec(one_head, latent.size + rope, latent.size)
    return LatentAttention(
        "self_attn",
        tuple(projections),
        linear("self_attn.o_proj", hidden, values, "row", bias),
        CachedAttention("self_attn.attn", queries, cache, MLA),
    )


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    is_sparse = layer % fields.optional("moe_layer_freq", 1) == 0
    if layer < fields.optional("first_k_dense_replace", 0, lowest=0) or not is_sparse:
        return gated_mlp(fields)
    return moe(
        fields,
        dim(fields, "n_routed_experts"),
        partial(sigmoid_router, fields),
        shared_experts(fields, "n_shared_experts"),
        names=MoENames(correction_bias="gate.e_score_correction_bias"),
    )


ARCHITECTURES = (
    Architecture(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM",),
        _describe,
        {
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
        is_served=False,
    ),
)
