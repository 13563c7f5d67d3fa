"""GLM-4 of 9B and 32B: adjacent columns of half of each head are rotated as pairs, and gate and up
are one weight. `glm4` has norms behind its blocks besides those before them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.decoder import Attention, Decoder, LayerNorms
from vllm.architectures.fields import Fields
from vllm.utils.dataclasses import replace

_NORMS_OF_GLM4 = LayerNorms(
    after_mixer="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"
)


def _describe(fields: Fields, norms: LayerNorms) -> Decoder:
    made = decoder(fields, _attention, partial(gated_mlp, is_merged=True))
    return replace(made, is_neox=False, layer_norms=norms)


def _attention(fields: Fields, layer: int) -> Attention:
    return attention(fields, AttentionKind(qkv_bias=fields.flag("attention_bias", True)))


def _derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    ends = fields["eos_token_id"]
    return {"eos_token_id": [151329, 151336, 151338]} if ends is None else {}


_DEFAULTS = CAUSAL_LM | {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "pad_token_id": 151329,
    "attention_bias": True,
}
ARCHITECTURES = tuple(
    Architecture(
        model_type,
        (f"{name}ForCausalLM",),
        partial(_describe, norms=norms),
        _DEFAULTS,
        derived_fields=_derived,
        family="GLM-4 9B and 32B",
        partial_rotary_factor=0.5,
    )
    for model_type, name, norms in (("glm", "Glm", LayerNorms()), ("glm4", "Glm4", _NORMS_OF_GLM4))
)
