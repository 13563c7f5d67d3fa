"""Parts of decoders from the fields of a config.json; each architecture puts its own together."""

from collections.abc import Callable

from vllm.architectures.activation import activation
from vllm.architectures.architecture import MTP_PREFIX
from vllm.architectures.decoder import (
    GATED,
    QK_NORM_NAMES,
    SOFTCAP,
    Attention,
    CachedAttention,
    Decoder,
    DecoderLayer,
    ExpertsSpec,
    FeedForward,
    GatedMLP,
    Mixer,
    MoE,
    MTPSpec,
    NormKind,
    QKNormSpan,
    QueryScaling,
    Rope,
    UngatedMLP,
    layer_prefix,
)
from vllm.architectures.fields import CORRECT_FILE, ROPE_LISTS, Fields
from vllm.architectures.kv_cache import FullAttentionSpec, SlidingWindowSpec
from vllm.architectures.router import Router, checked
from vllm.architectures.sharding import Dim, LinearSpec, Part, linear
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import dataclass, replace


def dim(fields: Fields, name: str, unit: int = 1) -> Dim:
    return Dim(name, fields.size(name), unit)


def decoder(
    fields: Fields,
    mixer: Callable[[Fields, int], Mixer | None],
    feed_forward: Callable[[Fields, int], FeedForward | None],
    norm: NormKind = "rms",
    rotary_head_dim: int | None = None,
    num_layers: int | None = None,
) -> Decoder:
    """mixer, feed_forward: of layer i. rotary_head_dim: of its attention; None for head_dim.
    num_layers: where num_hidden_layers does not say it."""
    layers = tuple(
        DecoderLayer(mixer(fields, i), feed_forward(fields, i))
        for i in range(num_layers or fields.size("num_hidden_layers"))
    )
    if activation(fields) != "silu" and any(isinstance(one.feed_forward, MoE) for one in layers):
        raise CheckpointError(
            f"{fields.source}: hidden_act {fields.get('hidden_act')!r} is not supported: it takes "
            f"silu in a model with experts"
        )
    eps = fields.number("rms_norm_eps", 1e-6)
    if not 0 <= eps < 1:
        raise CheckpointError(
            f"{fields.source}: rms_norm_eps = {eps!r} is out of range (0 to below 1){CORRECT_FILE}"
        )
    hidden = dim(fields, "hidden_size")
    vocab = Dim("vocab_size", fields.size("vocab_size"), uneven="padded")
    return Decoder(
        layers=layers,
        hidden_size=hidden.size,
        lm_head=linear("lm_head", vocab, hidden, "column"),
        norm=norm,
        rms_norm_eps=eps,
        rotary_head_dim=rotary_head_dim or heads_of(fields)[2],
        ropes=ropes(fields, rotary_head_dim or heads_of(fields)[2]),
        max_position_embeddings=fields.optional("max_position_embeddings", 0, lowest=0),
    )


def numbered_mtp(
    fields: Fields,
    mixer: Callable[[Fields, int], Mixer],
    feed_forward: Callable[[Fields, int], FeedForward],
) -> MTPSpec:
    """Of checkpoints that number it as one more layer of the decoder, whose kind it has. Its
    projection is never quantised, whether their config says so or not."""
    index = fields.size("num_hidden_layers")
    prefix = layer_prefix(index)
    proj = replace(_mtp_proj(fields, "eh_proj"), may_quantize=False)
    layer = DecoderLayer(mixer(fields, index), feed_forward(fields, index))
    return MTPSpec(prefix, "enorm", "hnorm", proj, prefix, layer, "shared_head.norm")


def separate_mtp(fields: Fields, mixer: Mixer, feed_forward: FeedForward) -> MTPSpec:
    """Of checkpoints that name it `mtp`."""
    fields.allow_only({"mtp_use_dedicated_embeddings": False})
    names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", _mtp_proj(fields, "fc")
    layer = DecoderLayer(mixer, feed_forward)
    return MTPSpec(MTP_PREFIX, *names, f"{MTP_PREFIX}layers.0.", layer, "norm")


def _mtp_proj(fields: Fields, name: str) -> LinearSpec:
    hidden = dim(fields, "hidden_size")
    return linear(name, hidden, Dim("2 * hidden_size", 2 * hidden.size), "replicated")


def ropes(fields: Fields, head_dim: int, layer_types: tuple[str, ...] = ("",)) -> dict[str, Rope]:
    """Of each type of layers. CheckpointError for lists of factors of the wrong length, and for a
    share of columns to rotate that a head does not have."""
    found: dict[str, Rope] = {}
    for layer_type in layer_types:
        rope = found[layer_type] = fields.rope(layer_type)
        factor = rope.get("partial_rotary_factor", 1.0)
        num_pairs = int(head_dim * factor) // 2
        if not 1 <= num_pairs <= head_dim // 2:
            raise CheckpointError(
                f"{fields.source}: partial_rotary_factor = {factor!r} in rope_parameters rotates "
                f"{2 * num_pairs} of {head_dim} columns of a head: it takes a share that makes "
                f"from 2 to {head_dim // 2 * 2}"
            )
        for name in ROPE_LISTS if rope.get("rope_type") == "longrope" else ():
            factors = rope.get(name)
            if not isinstance(factors, list) or not all(
                type(one) in (int, float) and 0 < one < float("inf") for one in factors
            ):
                raise CheckpointError(
                    f"{fields.source}: {name} = {str(factors)[:80]} in rope_parameters: it takes a "
                    f"list of numbers above 0"
                )
            if len(factors) != num_pairs:
                raise CheckpointError(
                    f"{fields.source}: {name} in rope_parameters has {len(factors)} factors: "
                    f"it takes {num_pairs}, one for each pair of rotated columns of a head"
                )
    return found


def heads_of(fields: Fields) -> tuple[int, int, int]:
    """(heads, KV heads, head_dim)."""
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.optional("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.source}: num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    head_dim = fields.optional("head_dim", fields.size("hidden_size") // num_heads)
    if not head_dim:
        raise CheckpointError(
            f"{fields.source}: num_attention_heads = {num_heads} is more than hidden_size"
        )
    return num_heads, num_kv_heads, head_dim


@dataclass(frozen=True)
class AttentionKind:
    """window: keys that each query sees, itself included; 0 for all. is_merged: whether checkpoints
    hold the weights of q, k and v as one. name: of the layer. gate: name of the weight of a gate
    beside q, k and v, and its numbers for each head. The rest as Attention and CachedAttention
    have."""

    qkv_bias: bool = False
    output_bias: bool = False
    window: int = 0
    is_gated: bool = False
    qk_norm: NormKind | None = None
    query_scaling: QueryScaling | None = None
    qk_norm_span: QKNormSpan = "head"
    variant: str = ""
    rope: str | None = ""
    scale: float | None = None
    softcap: float = 0.0
    is_merged: bool = False
    name: str = "self_attn"
    norms_rotated: bool = False
    qk_norm_names: tuple[str, str] = QK_NORM_NAMES
    gate: tuple[str, int] | None = None
    v_norm: NormKind | None = None
    k_is_v: bool = False
    value_dim: int = 0
    v_scale: float = 1.0
    sinks: str = "sinks"


def attention(fields: Fields, kind: AttentionKind) -> Attention:
    return fields.once(kind, lambda: _attention(fields, kind))


def _attention(fields: Fields, kind: AttentionKind) -> Attention:
    num_heads, num_kv_heads, head_dim = heads_of(fields)
    hidden = dim(fields, "hidden_size")
    heads = Dim("num_attention_heads", num_heads, head_dim)
    queries = Dim("num_attention_heads", num_heads, head_dim * (1 + kind.is_gated))
    kv_heads = Dim("num_key_value_heads", num_kv_heads, head_dim, "repeated")
    parts: tuple[Part, ...] = (
        Part("q_proj", (queries,)),
        Part("k_proj", (kv_heads,)),
        Part("v_proj", (replace(kv_heads, unit=kind.value_dim or head_dim),)),
    )
    if kind.is_merged:
        parts = (Part("qkv_proj", (queries, kv_heads, kv_heads)),)
    elif kind.k_is_v:
        parts = parts[:2]
    variant = kind.variant or (SOFTCAP if kind.softcap else "")
    cache = FullAttentionSpec(kv_heads, head_dim)
    if kind.window:
        cache = SlidingWindowSpec(kv_heads, head_dim, kind.window)
    name, gate_proj = kind.name, None
    given = replace(heads, unit=kind.value_dim or head_dim)
    if kind.gate is not None:
        last, width = kind.gate
        gate_proj = linear(f"{name}.{last}", replace(heads, unit=width), hidden, "column")
    return Attention(
        name=name,
        qkv_proj=LinearSpec(f"{name}.qkv_proj", parts, hidden, "column", kind.qkv_bias),
        o_proj=linear(f"{name}.o_proj", hidden, given, "row", kind.output_bias),
        attn=CachedAttention(
            f"{name}.attn", heads, cache, variant, kind.scale, kind.softcap, kind.sinks
        ),
        is_gated=kind.is_gated,
        qk_norm=kind.qk_norm,
        query_scaling=kind.query_scaling,
        qk_norm_span=kind.qk_norm_span,
        rope=kind.rope,
        norms_rotated=kind.norms_rotated,
        qk_norm_names=kind.qk_norm_names,
        gate_proj=gate_proj,
        v_norm=kind.v_norm,
        k_is_v=kind.k_is_v,
        value_dim=kind.value_dim,
        v_scale=kind.v_scale,
    )


def gated_mlp(fields: Fields, layer: int = 0, is_merged: bool = False) -> GatedMLP:
    """is_merged: whether checkpoints hold the weights of gate and up as one."""
    inner, bias = dim(fields, "intermediate_size"), fields.flag("mlp_bias")
    act = activation(fields)
    return fields.once("mlp", lambda: gated_mlp_of(fields, "mlp", inner, bias, is_merged, act))


def gated_mlp_of(
    fields: Fields,
    name: str,
    inner: Dim,
    bias: bool = False,
    is_merged: bool = False,
    act: str = "silu",
) -> GatedMLP:
    hidden = dim(fields, "hidden_size")
    parts: tuple[Part, ...] = (Part("gate_proj", (inner,)), Part("up_proj", (inner,)))
    if is_merged:
        parts = (Part("gate_up_proj", (inner, inner)),)
    return GatedMLP(
        name,
        LinearSpec(f"{name}.gate_up_proj", parts, hidden, "column", bias),
        linear(f"{name}.down_proj", hidden, inner, "row", bias),
        act,
    )


def ungated_mlp_of(fields: Fields, name: str, inner: Dim, bias: bool = False) -> UngatedMLP:
    hidden = dim(fields, "hidden_size")
    return UngatedMLP(
        name,
        linear(f"{name}.up_proj", inner, hidden, "column", bias),
        linear(f"{name}.down_proj", hidden, inner, "row", bias),
    )


def shared_experts(fields: Fields, count: str, name: str = "mlp.shared_experts") -> GatedMLP | None:
    """As many as the field `count` says, each of an expert's size, in one MLP; None for none."""
    num_shared = fields.optional(count, 0, lowest=0)
    if not num_shared:
        return None
    size = num_shared * fields.size("moe_intermediate_size")
    return gated_mlp_of(fields, name, Dim(f"{count} * moe_intermediate_size", size))


@dataclass(frozen=True)
class MoENames:
    """What a family calls the parts of a mixture of experts.

    moe: the module in the decoder layer; gate, correction_bias: in that module, "" for no bias.
    parts: gate, up and down projection of an expert. top_k, inner: fields of config.json with the
    experts per token and an expert's intermediate size.
    """

    moe: str = "mlp"
    gate: str = "gate"
    correction_bias: str = ""
    parts: tuple[str, ...] = GATED
    top_k: str = "num_experts_per_tok"
    inner: str = "moe_intermediate_size"


MOE_NAMES = MoENames()


def moe(
    fields: Fields,
    count: Dim,
    router: Callable[[int, int], Router],
    shared_expert: GatedMLP | UngatedMLP | None = None,
    is_shared_gated: bool = False,
    names: MoENames = MOE_NAMES,
) -> MoE:
    """count: of the experts. router: of that number and of the experts per token."""
    top_k = fields.size(names.top_k)
    if top_k > count.count:
        raise CheckpointError(
            f"{fields.source}: {names.top_k} = {top_k} is more than {count.field} = {count.count}"
        )
    hidden = dim(fields, "hidden_size")
    gate = f"{names.moe}.{names.gate}"
    gates: tuple[Part, ...] = (Part(gate.rpartition(".")[2], (count,)),)
    if is_shared_gated:
        gates += (Part("shared_expert_gate", (Dim("shared_expert_gate", 1),)),)
    chosen = checked(fields, lambda: router(count.count, top_k))
    inner = dim(fields, names.inner)
    experts = f"{names.moe}.experts"
    bias = f"{names.moe}.{names.correction_bias}", (count.count,)
    return MoE(
        names.moe,
        LinearSpec(gate, gates, hidden, "replicated", may_quantize=False),
        ExpertsSpec(experts, count, chosen, hidden.size, inner, parts=names.parts),
        shared_expert,
        is_shared_gated,
        bias if chosen.has_correction_bias else None,
    )
