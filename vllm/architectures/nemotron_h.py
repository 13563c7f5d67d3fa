"""Nemotron-H: Mamba2 layers, few of attention without rotation, and layers of an MLP or of experts
alone, all with squared ReLU. The experts of Nemotron 3 Super read latents of tokens."""

from collections.abc import Mapping
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import (
    AttentionKind,
    MoENames,
    attention,
    decoder,
    dim,
    moe,
    ungated_mlp_of,
)
from vllm.architectures.decoder import (
    RELU2,
    UNGATED,
    Attention,
    Decoder,
    FeedForward,
    LayerNorms,
    Mamba2,
    Mamba2Scan,
    MoE,
)
from vllm.architectures.fields import MAX_LAYERS, Fields
from vllm.architectures.kv_cache import RecurrentStateSpec
from vllm.architectures.router import sigmoid_router
from vllm.architectures.sharding import LinearSpec, Part, linear
from vllm.errors import CheckpointError, did_you_mean
from vllm.utils.dataclasses import replace

_MAMBA, _ATTENTION, _MLP, _MOE = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _MOE}
# Names of transformers before 5.
_OLD_NAMES = {"mamba": _MAMBA, "attention": _ATTENTION}


def describe(fields: Fields) -> Decoder:
    for name, taken in (("mamba_hidden_act", "silu"), ("mlp_hidden_act", "relu2")):
        if (given := fields.get(name)) != taken:
            raise CheckpointError(
                f"{fields.source}: {name} = {given!r} is not supported: it takes {taken}"
            )
    kinds = _kinds(fields)

    def mixer(fields: Fields, layer: int) -> Attention | Mamba2 | None:
        if kinds[layer] == _MAMBA:
            return fields.once(_MAMBA, lambda: _mamba(fields))
        if kinds[layer] == _ATTENTION:
            bias = fields.flag("attention_bias")
            return attention(fields, AttentionKind(bias, bias, rope=None, name="mixer"))
        return None

    def feed_forward(fields: Fields, layer: int) -> FeedForward | None:
        if kinds[layer] == _MLP:
            inner, bias = dim(fields, "intermediate_size"), fields.flag("mlp_bias")
            return fields.once(_MLP, lambda: ungated_mlp_of(fields, "mixer", inner, bias))
        return fields.once(_MOE, lambda: _moe(fields)) if kinds[layer] == _MOE else None

    made = decoder(fields, mixer, feed_forward, num_layers=len(kinds))
    return replace(made, layer_norms=LayerNorms("norm", "", "norm", ""))


def _kinds(fields: Fields) -> list[str]:
    """Of each layer, by its name or its letter. A list of names goes before a pattern, as in
    transformers."""
    name = "layers_block_type"
    listed = fields.entries(name, str)
    if not listed:
        name, pattern = "hybrid_override_pattern", fields.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_LAYERS:
            raise CheckpointError(
                f"{fields.source}: {name} = {str(pattern)[:80]!r}: it takes a letter for each of "
                f"up to {MAX_LAYERS} layers, of {' '.join(_LETTERS)}, where there is no "
                f"layers_block_type"
            )
        listed = list(pattern)
    known = _LETTERS | _OLD_NAMES | {kind: kind for kind in _LETTERS.values()}
    if wrong := [kind for kind in listed if kind not in known]:
        accepted = list(_LETTERS if name == "hybrid_override_pattern" else _LETTERS.values())
        raise CheckpointError(
            f"{fields.source}: {name} holds {wrong[0]!r}: it takes {', '.join(accepted)}"
            f"{did_you_mean(wrong[0], accepted)}"
        )
    num_layers = fields.optional("num_hidden_layers", len(listed))
    if num_layers != len(listed):
        raise CheckpointError(
            f"{fields.source}: {name} is of {len(listed)} layers, but num_hidden_layers = "
            f"{num_layers}"
        )
    return [known[kind] for kind in listed]


def _mamba(fields: Fields) -> Mamba2:
    hidden = dim(fields, "hidden_size")
    head_dim, state_size = fields.size("mamba_head_dim"), fields.size("ssm_state_size")
    heads = dim(fields, "mamba_num_heads", head_dim)
    groups = dim(fields, "n_groups", state_size)
    if heads.count % groups.count:
        raise CheckpointError(
            f"{fields.source}: mamba_num_heads = {heads.count} is not a multiple of n_groups = "
            f"{groups.count}"
        )
    channels = heads, groups, groups
    rows = Part("in_proj", (heads, *channels, replace(heads, unit=1)))
    bias = fields.flag("use_bias")
    taps = fields.optional("conv_kernel", 4, lowest=2)
    states = RecurrentStateSpec(channels, taps, heads, state_size, head_dim)
    return Mamba2(
        "mixer",
        LinearSpec("mixer.in_proj", (rows,), hidden, "column", bias),
        linear("mixer.out_proj", hidden, heads, "row", bias),
        Mamba2Scan("mixer.scan", groups, states, _dt_limits(fields)),
        fields.flag("use_conv_bias", True),
    )


def _dt_limits(fields: Fields) -> tuple[float, float]:
    """time_step_limit, as the model is trained; not time_step_min, to which transformers raises the
    steps of prompts but not those of decodes."""
    given = fields.get("time_step_limit")
    limits = list(given) if isinstance(given, list | tuple) else []
    # JSON of transformers 5 has no infinity.
    numbers: list[Any] = [
        one.get("__float__") if isinstance(one, Mapping) else one for one in limits
    ]
    found = [float(one) for one in numbers if type(one) in (int, float) or one == "Infinity"]
    if not len(found) == len(limits) == 2 or not 0 <= found[0] <= found[1]:
        raise CheckpointError(
            f"{fields.source}: time_step_limit = {given!r}: it takes two numbers from 0 on, the "
            f"smaller one first"
        )
    return found[0], found[1]


def _moe(fields: Fields) -> MoE:
    hidden, bias = dim(fields, "hidden_size"), fields.flag("mlp_bias")
    shared = dim(fields, "moe_shared_expert_intermediate_size")
    made = moe(
        fields,
        dim(fields, "n_routed_experts"),
        lambda count, top_k: sigmoid_router(fields, count, top_k),
        ungated_mlp_of(fields, "mixer.shared_experts", shared, bias),
        names=MoENames("mixer", correction_bias="gate.e_score_correction_bias", parts=UNGATED),
    )
    experts, projs = replace(made.experts, activation=RELU2), None
    if fields.get("moe_latent_size") is not None:
        latent = dim(fields, "moe_latent_size")
        experts = replace(experts, hidden=latent.size)
        projs = (
            linear("mixer.fc1_latent_proj", latent, hidden, "replicated", bias),
            linear("mixer.fc2_latent_proj", hidden, latent, "replicated", bias),
        )
    return replace(made, experts=experts, latent_projs=projs)


_RENAMED = ("embeddings.", "embed_tokens."), ("norm_f.", "norm."), ("", "")

ARCHITECTURES = (
    Architecture(
        "nemotron_h",
        ("NemotronHForCausalLM",),
        describe,
        CAUSAL_LM
        | {
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "layers_block_type": None,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_hidden_act": "relu2",
            "mlp_bias": False,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "n_groups": 8,
            "conv_kernel": 4,
            "time_step_limit": [0.0, float("inf")],
            "use_conv_bias": True,
            "use_bias": False,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        renamed_fields={
            "layer_norm_epsilon": "rms_norm_eps",
            "layer_types": "layers_block_type",
            "num_local_experts": "n_routed_experts",
        },
        is_read_by_transformers=True,
        skipped_tensors=("mtp.",),
        renamed_tensors=tuple(
            (f"{parent}.{stored}", f"model.{ours}")
            for parent in ("backbone", "model")
            for stored, ours in _RENAMED
        ),
        family="Nemotron-H, Nemotron 3 Nano and Super, without layers of multi-token prediction",
    ),
)
