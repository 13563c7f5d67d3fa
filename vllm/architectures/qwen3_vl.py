"""Qwen3-VL, dense and with experts: the text models are Qwen3 inside of multimodal checkpoints. The
three positions of a token of text are one, so that mrope is the plain rotation."""

from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture, Composite
from vllm.architectures.build import decoder, dim, gated_mlp, moe
from vllm.architectures.decoder import Attention, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.qwen import feed_forward, normed_attention
from vllm.architectures.router import Router


def _attention(fields: Fields, layer: int) -> Attention:
    return normed_attention(fields)


def _moe(fields: Fields) -> MoE:
    """Weights of a token's experts always add up to one, whatever norm_topk_prob says."""
    return moe(
        fields,
        dim(fields, "num_experts"),
        lambda count, top_k: Router(count, top_k, renormalise=True),
    )


def _around(text: Architecture, hf_name: str) -> Composite:
    return Composite(
        text.model_type.removesuffix("_text"),
        (hf_name,),
        (text.model_type,),
        decides_ties=True,
        skipped_tensors=("visual.",),
        renamed_tensors=(("model.language_model.", "model."),),
        notice="Qwen3-VL: serving the text model; images and videos are not supported, and weights "
        "for vision are skipped",
        family=text.family,
    )


_DEFAULTS: dict[str, Any] = {
    name: default
    for name, default in CAUSAL_LM.items()
    if name not in ("tie_word_embeddings", "bos_token_id", "eos_token_id")
} | {
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "attention_bias": False,
}
_DENSE = Architecture(
    "qwen3_vl_text",
    (),
    partial(decoder, mixer=_attention, feed_forward=gated_mlp),
    _DEFAULTS
    | {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    nullable=frozenset({"num_key_value_heads"}),
    rope_theta=500000.0,
    family="Qwen3-VL",
)
_EXPERTS = Architecture(
    "qwen3_vl_moe_text",
    (),
    partial(decoder, mixer=_attention, feed_forward=partial(feed_forward, make_moe=_moe)),
    _DEFAULTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": None,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "mlp_only_layers": None,
    },
    nullable=frozenset({"head_dim", "mlp_only_layers"}),
    # Published configs have the name that transformers had before version 5.
    renamed_fields={"num_local_experts": "num_experts"},
    rope_theta=500000.0,
    family="Qwen3-VL mixture of experts",
)
ARCHITECTURES = (
    _DENSE,
    _around(_DENSE, "Qwen3VLForConditionalGeneration"),
    _EXPERTS,
    _around(_EXPERTS, "Qwen3VLMoeForConditionalGeneration"),
)
