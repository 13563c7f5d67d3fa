"""What a decoder is made of, as values, from which all that runs or lists a model is built.

Sizes are those of the whole model; `LinearSpec.shards` and `Dim` say what one rank has of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from vllm.architectures.kv_cache import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from vllm.architectures.router import Router
from vllm.architectures.sharding import Dim, LinearSpec
from vllm.utils.dataclasses import dataclass, replace

NormKind = Literal["rms", "rms_zero_centred", "rms_unweighted"]
"""rms_zero_centred: the checkpoint holds the difference of the weight to 1; rms_unweighted: it has
none."""
QKNormSpan = Literal["head", "projection"]
QK_NORM_NAMES = ("q_norm", "k_norm")

SINKS = "sinks"
"""The variant of attention in which every query sees one key more, without a value: its logit is a
weight of the head."""
CHUNKED = "chunks"
"""The variant of attention in which every query sees the keys of its own chunk of positions, whose
size is the window of the cache: no query sees more keys."""
SOFTCAP = "logit softcapping"
"""The variant of attention whose scores have a bound."""


@dataclass(frozen=True)
class CachedAttention:
    """Attention over the paged cache, and the writing of that cache.

    variant: what is computed besides or instead of plain attention, "" for that. scale: of scores
    before the softmax, None for head_dim ** -0.5. softcap: of the variant SOFTCAP, whose scores
    become softcap * tanh(score / softcap). sinks: name of those of the variant SINKS.
    """

    name: str
    heads: Dim
    cache: FullAttentionSpec | SlidingWindowSpec | MLAAttentionSpec
    variant: str = ""
    scale: float | None = None
    softcap: float = 0.0
    sinks: str = "sinks"


SWIGLUOAI = "swigluoai"
"""What an expert of gpt-oss computes between its products: min(g, L) * sigmoid(1.702 min(g, L)) *
(u clamped to -L..L, plus 1) of gate g and up u, with the limit L."""

GELU_TANH = "gelu_tanh"
"""The activation of the gate of an expert, or an MLP: GELU in its approximation by tanh."""

RELU2 = "relu2 without a gate"
"""The activation of an MLP, or of an expert, of two products: max(u, 0) ** 2 of up u."""

GATED = ("gate_proj", "up_proj", "down_proj")
"""Weights of a gated MLP, which an expert is too."""
UNGATED = GATED[1:]
"""Those of one without a gate."""


@dataclass(frozen=True)
class ExpertsSpec:
    """Routed experts, each an MLP: `<name>.<expert>.<part>` in checkpoints, for its gate, its up
    and its down projection, or without a gate. Ranks hold whole experts, or a share of
    `intermediate` of every expert.

    activation: of the gate, or with two `parts` RELU2; other than `silu`, GELU_TANH, `swigluoai`
    and that are not served. swiglu_limit: of `swigluoai`. has_bias: each of the weights has one.
    """

    name: str
    count: Dim
    router: Router
    hidden: int
    intermediate: Dim
    activation: str = "silu"
    parts: tuple[str, ...] = GATED
    swiglu_limit: float = 0.0
    has_bias: bool = False

    def per_rank(self, tp: int, ep: int) -> tuple[int, int]:
        """Experts on one rank, and the intermediate size that it has of each."""
        return self.count.per_rank(ep, "ep"), self.intermediate.per_rank(1 if ep > 1 else tp)


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule of a delta-net."""

    name: str
    key_heads: Dim
    states: RecurrentStateSpec

    def per_rank(self, tp: int) -> tuple[int, int]:
        """Key heads and value heads."""
        return self.key_heads.per_rank(tp), self.states.heads.per_rank(tp)


@dataclass(frozen=True)
class Mamba2Scan:
    """The recurrence of a Mamba2 layer. groups: of heads that share B and C. dt_limits: what steps
    are clamped to after the softplus."""

    name: str
    groups: Dim
    states: RecurrentStateSpec
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    def per_rank(self, tp: int) -> tuple[int, int]:
        """Groups and heads."""
        return self.groups.per_rank(tp), self.states.heads.per_rank(tp)


Item = LinearSpec | ExpertsSpec | CachedAttention | DeltaRule | Mamba2Scan
"""What asks for a kernel."""


@dataclass(frozen=True)
class QueryScaling:
    """Queries far out in the context are scaled up: q *= 1 + beta * ln(1 + floor(pos / L)).

    L: the context length of pre-training. first: what positions are counted from. The formula is
    that of Llama 4.
    """

    beta: float
    original_length: int
    first: int = 0


@dataclass(frozen=True)
class Attention:
    """is_gated: each query head is followed by a gate in q_proj; its sigmoid multiplies the head's
    output. qk_norm: over each head of q and k, or over all heads of the projection together
    (qk_norm_span), before the rotation; norms_rotated: of heads, after it. qk_norm_names: of those
    of heads. rope: which of `Decoder.ropes` rotates q and k; None for no rotation. gate_proj: of
    the input, to as many numbers for each head as it has, or one, whose sigmoid multiplies its
    output; None for no such gate. v_norm: over each head of v. k_is_v: qkv_proj has no values,
    which are the keys before their norm and rotation. value_dim: columns of a head of v where they
    are fewer than those of k, 0 where they are not; the cache has zeros in the others' place.
    v_scale: what v is multiplied by.
    """

    name: str
    qkv_proj: LinearSpec
    o_proj: LinearSpec
    attn: CachedAttention
    is_gated: bool = False
    qk_norm: NormKind | None = None
    query_scaling: QueryScaling | None = None
    qk_norm_span: QKNormSpan = "head"
    rope: str | None = ""
    norms_rotated: bool = False
    qk_norm_names: tuple[str, str] = QK_NORM_NAMES
    gate_proj: LinearSpec | None = None
    v_norm: NormKind | None = None
    k_is_v: bool = False
    value_dim: int = 0
    v_scale: float = 1.0

    @property
    def cache(self) -> KVCacheSpec:
        return self.attn.cache

    @property
    def items(self) -> tuple[Item, ...]:
        gate = () if self.gate_proj is None else (self.gate_proj,)
        return self.qkv_proj, *gate, self.o_proj, self.attn


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA), with the up-projection of the latents absorbed.

    kv_a_proj: of the input to latents, after them the keys' rotated part, and before both the
    latents of queries where q_lora_rank is not 0. q_proj: of the latents of queries, else of the
    input, to heads of nope_dim and rope_dim. kv_b_proj: of latents to nope_dim of keys and
    value_dim of values, for each head; absorbed. is_interleaved: rotated are pairs of neighbours,
    not of halves. query_scaling: of whole queries.
    """

    name: str
    kv_a_proj: LinearSpec
    q_proj: LinearSpec
    kv_b_proj: LinearSpec
    o_proj: LinearSpec
    attn: CachedAttention
    q_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool
    query_scaling: QueryScaling | None = None

    @property
    def cache(self) -> KVCacheSpec:
        return self.attn.cache

    @property
    def items(self) -> tuple[Item, ...]:
        return self.kv_a_proj, self.q_proj, self.kv_b_proj, self.o_proj, self.attn


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta-net: linear attention with a recurrent state."""

    name: str
    in_proj_qkvz: LinearSpec
    in_proj_ba: LinearSpec
    out_proj: LinearSpec
    rule: DeltaRule

    @property
    def cache(self) -> RecurrentStateSpec:
        return self.rule.states

    @property
    def items(self) -> tuple[Item, ...]:
        return self.in_proj_qkvz, self.in_proj_ba, self.out_proj, self.rule


@dataclass(frozen=True)
class Mamba2:
    """A Mamba2 layer: a state space model with one decay for each head.

    in_proj: of the input to a gate and x of every head, B and C of every group, and a step of every
    head. The gated norm before out_proj is over the heads of a group.
    """

    name: str
    in_proj: LinearSpec
    out_proj: LinearSpec
    scan: Mamba2Scan
    has_conv_bias: bool = True

    @property
    def cache(self) -> RecurrentStateSpec:
        return self.scan.states

    @property
    def items(self) -> tuple[Item, ...]:
        return self.in_proj, self.out_proj, self.scan


@dataclass(frozen=True)
class GatedMLP:
    """activation: of the gate, a value of `activation.ACTIVATIONS`."""

    name: str
    gate_up_proj: LinearSpec
    down_proj: LinearSpec
    activation: str = "silu"

    @property
    def items(self) -> tuple[Item, ...]:
        return self.gate_up_proj, self.down_proj


@dataclass(frozen=True)
class UngatedMLP:
    """down_proj(RELU2(up_proj(x)))."""

    name: str
    up_proj: LinearSpec
    down_proj: LinearSpec

    @property
    def items(self) -> tuple[Item, ...]:
        return self.up_proj, self.down_proj


@dataclass(frozen=True)
class MoE:
    """shared_expert: for all tokens, beside the routed ones; is_shared_gated: its output is
    multiplied by the sigmoid of a gate of each token, a row of `gate` after the router's.
    correction_bias: name in the layer of the router's correction bias and its shape in checkpoints,
    one number for each expert; None for a router without one. latent_projs: of tokens to what
    routed experts read, and back of what they give; None where they read tokens."""

    name: str
    gate: LinearSpec
    experts: ExpertsSpec
    shared_expert: GatedMLP | UngatedMLP | None = None
    is_shared_gated: bool = False
    correction_bias: tuple[str, tuple[int, ...]] | None = None
    latent_projs: tuple[LinearSpec, LinearSpec] | None = None

    @property
    def items(self) -> tuple[Item, ...]:
        shared = self.shared_expert.items if self.shared_expert else ()
        if self.latent_projs is None:
            return self.gate, self.experts, *shared
        to_latent, from_latent = self.latent_projs
        return self.gate, to_latent, self.experts, from_latent, *shared


@dataclass(frozen=True)
class MLPBesideExperts:
    """after_mlp(mlp(x)) + after_experts(experts(before_experts(residual))), of x the normed
    residual. The router reads the residual under a norm of its own, whose weight is router_norm
    times hidden ** -0.5, and the weights of a token's experts are multiplied by expert_scale of
    each. All but the MLP and the experts are names in the layer."""

    mlp: GatedMLP
    gate: LinearSpec
    experts: ExpertsSpec
    router_norm: str
    expert_scale: str
    after_mlp: str
    before_experts: str
    after_experts: str

    @property
    def items(self) -> tuple[Item, ...]:
        return *self.mlp.items, self.gate, self.experts


Mixer = Attention | LatentAttention | DeltaNet | Mamba2
FeedForward = GatedMLP | UngatedMLP | MoE | MLPBesideExperts


@dataclass(frozen=True)
class DecoderLayer:
    """mixer: what exchanges information between tokens. None: the layer has the other alone."""

    mixer: Mixer | None
    feed_forward: FeedForward | None

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(
            item for part in (self.mixer, self.feed_forward) if part is not None
            for item in part.items
        )  # fmt: skip


@dataclass(frozen=True)
class MTPSpec:
    """Multi-token prediction: what drafts the token at i + 2 of x, what the model's last norm gives
    at i, and of the token at i + 1.

    y = norm(layer(proj([embedding_norm(embedding of the token), hidden_norm(x)]))), which the
    model's output projection reads; y in place of x, and the token that is drafted, give the next.
    https://arxiv.org/abs/2412.19437, section 2.2. prefix: of all names but those in the layer,
    with its dot; layer_prefix: of these.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    proj: LinearSpec
    layer_prefix: str
    layer: DecoderLayer
    norm: str

    def items(self) -> Iterator[tuple[str, Item]]:
        yield self.prefix, self.proj
        for item in self.layer.items:
            yield self.layer_prefix, item


@dataclass(frozen=True)
class LayerNorms:
    """Names of the norms of a decoder layer, "" for none: of what its mixer and its feed-forward
    read, and of what they give before it is added to the residual."""

    before_mixer: str = "input_layernorm"
    after_mixer: str = ""
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str = ""


Rope = Mapping[str, Any]
"""rope_parameters of a config, of one kind of layers."""


@dataclass(frozen=True)
class Decoder:
    """ropes: rotary embeddings by the names that attention layers give, for their heads, or in
    latent attention for rotary_head_dim columns; the most have one, "". is_neox: whether they
    rotate pairs (i, i + rotary_dim / 2), or (2 i, 2 i + 1).

    embedding_multiplier, residual_multiplier: of token embeddings, and of what a mixer or a
    feed-forward adds to the residual. logits_scaling: what logits are divided by.
    final_logit_softcapping: logits become softcap * tanh(logit / softcap); 0 for none.
    layer_scalar: name in every layer of a number that multiplies what it gives; "" for none.
    mtp: what drafts tokens, None where nothing does or it is not used. aux_layers: those whose
    inputs the model gives beside its hidden states, in their order; the number of layers for what
    the last one gives.
    """

    layers: tuple[DecoderLayer, ...]
    hidden_size: int
    lm_head: LinearSpec
    norm: NormKind
    rms_norm_eps: float
    rotary_head_dim: int
    ropes: Mapping[str, Rope]
    max_position_embeddings: int
    is_neox: bool = True
    layer_norms: LayerNorms = LayerNorms()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    final_logit_softcapping: float = 0.0
    layer_scalar: str = ""
    mtp: MTPSpec | None = None
    aux_layers: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return self.lm_head.parts[0].num_rows

    @property
    def has_recurrent_states(self) -> bool:
        return any(isinstance(one.mixer, DeltaNet | Mamba2) for one in self.layers)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(item, ExpertsSpec) for _, item in self.items())

    def with_tied_head(self) -> "Decoder":
        """With an output projection that takes the embedding's weight, which is never quantised
        whatever the config says of output projections."""
        return replace(self, lm_head=replace(self.lm_head, may_quantize=False))

    def check_ranks(self, tp: int, ep: int) -> None:
        """ConfigError names the first size that does not divide by the ranks."""
        for _, item in self.items():
            if isinstance(item, LinearSpec):
                item.shards("", 0, tp)
            elif isinstance(item, ExpertsSpec):
                item.per_rank(tp, ep)
            elif isinstance(item, DeltaRule | Mamba2Scan):
                item.per_rank(tp)
            else:
                item.heads.per_rank(tp)

    def items(self) -> Iterator[tuple[str, Item]]:
        """(prefix of its name, item) of everything that asks for a kernel, in the order of the
        engine."""
        for index, layer in enumerate(self.layers):
            prefix = layer_prefix(index)
            for item in layer.items:
                yield prefix, item
        yield "", self.lm_head
        if self.mtp is not None:
            yield from self.mtp.items()


def layer_prefix(index: int) -> str:
    """Of the names of decoder layer `index` in checkpoints, with its dot."""
    return f"model.layers.{index}."
