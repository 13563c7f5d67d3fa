"""gpt-oss: every other layer with a sliding window, sinks in all, experts with biases and a clamped
SwiGLU, chosen by a softmax over the best."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, dim
from vllm.architectures.decoder import SINKS, SWIGLUOAI, Attention, ExpertsSpec, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router, checked
from vllm.architectures.sharding import linear
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import replace

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ALPHA = 1.702


def _attention(fields: Fields, layer: int) -> Attention:
    kind = fields.layer_kind(layer) or (_FULL if layer % 2 else _SLIDING)
    if kind not in (_SLIDING, _FULL):
        raise CheckpointError(
            f"{fields.source}: layer_types holds {kind!r}: it takes {_SLIDING} or {_FULL}"
        )
    window = fields.optional("sliding_window", 0) if kind == _SLIDING else 0
    bias = fields.flag("attention_bias", True)
    return attention(fields, AttentionKind(bias, bias, window, variant=SINKS))


def _moe(fields: Fields, layer: int) -> MoE:
    return fields.once("moe", lambda: _make_moe(fields))


def _make_moe(fields: Fields) -> MoE:
    hidden, count = dim(fields, "hidden_size"), dim(fields, "num_local_experts")
    top_k = fields.size("num_experts_per_tok")
    limit, alpha = fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", _ALPHA)
    if alpha != _ALPHA or limit <= 0:
        raise CheckpointError(
            f"{fields.source}: swiglu_alpha = {alpha}, swiglu_limit = {limit} are not supported: "
            f"accepted are {_ALPHA} and a limit above 0"
        )
    experts = ExpertsSpec(
        "mlp.experts",
        count,
        checked(fields, lambda: Router(count.count, top_k, renormalise=True)),
        hidden.size,
        dim(fields, "intermediate_size"),
        SWIGLUOAI,
        swiglu_limit=limit,
        has_bias=True,
    )
    router = linear("mlp.router", count, hidden, "replicated", bias=True)
    return MoE("mlp", replace(router, may_quantize=False), experts)


def _layer_types(fields: Mapping[str, Any]) -> list[str]:
    return [_FULL if i % 2 else _SLIDING for i in range(fields["num_hidden_layers"])]


def _rope_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }


ARCHITECTURES = (
    Architecture(
        "gpt_oss",
        ("GptOssForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=_moe),
        CAUSAL_LM
        | {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": 7.0,
            "layer_types": None,
        },
        nullable=frozenset({"sliding_window", "layer_types"}),
        layer_types=_layer_types,
        # The name that transformers 5 knows it by too.
        renamed_fields={"num_experts": "num_local_experts"},
        rope_defaults=_rope_defaults,
        family="gpt-oss",
    ),
)
