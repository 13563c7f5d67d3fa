"""What the decoder layers of each architecture are made of, from the fields of its config.json.

A table: model_type -> attention and feed-forward part of layer i, as linear layers, experts and
attention, in the order the engine builds them, with sizes per rank.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm.errors import CheckpointError, ConfigError, did_you_mean

Cut = Literal["rows", "columns", "replicated"]

# Far above any real model: a config beyond them is corrupt or hostile.
_MAX_SIZE = 1 << 22
MAX_LAYERS = 1024


# ---------------------------------------------------------------- what a decoder layer is made of


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer, per rank. parts: (checkpoint name beside the merged one, rows) in order.

    cut: what tensor parallelism divided. A part that was cut in several places (q, k and v of one
    checkpoint weight) appears once for each piece, under one name. may_quantize: False for the
    routers, which checkpoints keep in a floating point type whether their config says so or not.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    columns: int
    cut: Cut
    bias: bool = False
    may_quantize: bool = True


@dataclass(frozen=True, slots=True)
class Experts:
    """A fused mixture of experts; `intermediate` per rank, the rest of the whole model."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """Attention over the paged cache and the writing of that cache, per rank."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0


Item = Dense | Experts | CachedAttention


class Fields:
    """The text config, read with checks. `tp`, `ep`: ranks of tensor and expert parallelism."""

    def __init__(self, values: Mapping[str, Any], tp: int, ep: int):
        self._values = values
        self.tp = tp
        self.ep = ep

    def given(self, name: str) -> Any:
        """The value as it is; None where it is missing or null."""
        return self._values.get(name)

    def size(self, name: str, limit: int = _MAX_SIZE) -> int:
        """A positive whole number."""
        if name not in self._values:
            raise CheckpointError(f"config.json has no {name}, which the kernels' shapes depend on")
        return self._checked(name, 1, limit)

    def optional(self, name: str, default: int, lowest: int = 1) -> int:
        """The same; `default` where it is missing or null."""
        return default if self.given(name) is None else self._checked(name, lowest, _MAX_SIZE)

    def flag(self, name: str) -> bool:
        value = self.given(name)
        if value not in (None, True, False):
            raise CheckpointError(f"config.json: {name} = {value!r}: it takes true or false")
        return bool(value)

    def entries(self, name: str, kind: type) -> list[Any]:
        """A list of `kind`, at most one a layer; empty where it is missing or null."""
        value = self.given(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > MAX_LAYERS:
            raise CheckpointError(f"config.json: {name} is not a list of up to {MAX_LAYERS}")
        if wrong := [entry for entry in value if type(entry) is not kind]:
            raise CheckpointError(
                f"config.json: {name} holds {wrong[0]!r}: it takes {kind.__name__} entries"
            )
        return value

    def layer_kind(self, layer: int) -> str | None:
        """What layer_types says of this layer; None where there is no such list."""
        kinds = self.entries("layer_types", str)
        if kinds and layer >= len(kinds):
            raise CheckpointError(
                f"config.json: layer_types has {len(kinds)} entries, fewer than num_hidden_layers"
            )
        return kinds[layer] if kinds else None

    def shard(self, name: str) -> int:
        """Per rank, of something that tensor parallelism divides evenly."""
        return self.divided(name, self.size(name), "tp", self.tp)

    def divided(self, name: str, size: int, axis: str, ranks: int) -> int:
        if size % ranks:
            raise ConfigError(
                f"{name} = {size} is not a multiple of {axis} = {ranks}: take a divisor of {size}"
            )
        return size // ranks

    def _checked(self, name: str, lowest: int, limit: int) -> int:
        value = self._values[name]
        if type(value) is not int or not lowest <= value <= limit:
            raise CheckpointError(
                f"config.json: {name} = {value!r} is not a whole number from {lowest} to {limit}"
            )
        return value


# ---------------------------------------------------------------- attention


def _heads(fields: Fields) -> tuple[int, int, int]:
    """(heads, KV heads, head_dim) per rank; KV heads fewer than the ranks are replicated."""
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.optional("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    head_dim = fields.optional("head_dim", fields.size("hidden_size") // num_heads)
    if not head_dim:
        raise CheckpointError(
            f"config.json: num_attention_heads = {num_heads} is more than hidden_size"
        )
    heads = fields.shard("num_attention_heads")
    if num_kv_heads < fields.tp and fields.tp % num_kv_heads == 0:
        return heads, 1, head_dim
    return heads, fields.divided("num_key_value_heads", num_kv_heads, "tp", fields.tp), head_dim


def _attention(
    fields: Fields, qkv_bias: bool, output_bias: bool, window: int = 0, is_gated: bool = False
) -> Iterator[Item]:
    """is_gated: q_proj holds, for each head, its query and a gate of the same size."""
    heads, kv_heads, head_dim = _heads(fields)
    hidden = fields.size("hidden_size")
    q_rows = heads * head_dim * (1 + is_gated)
    parts = (("q_proj", q_rows), ("k_proj", kv_heads * head_dim), ("v_proj", kv_heads * head_dim))
    yield Dense("self_attn.qkv_proj", parts, hidden, "rows", qkv_bias)
    yield plain("self_attn.o_proj", hidden, heads * head_dim, "columns", output_bias)
    yield CachedAttention("self_attn.attn", heads, kv_heads, head_dim, window)


def _llama_attention(fields: Fields, layer: int) -> Iterator[Item]:
    bias = fields.flag("attention_bias")
    return _attention(fields, bias, bias)


def _mistral_attention(fields: Fields, layer: int) -> Iterator[Item]:
    return _attention(fields, False, False, fields.optional("sliding_window", 0, lowest=0))


def _qwen2_attention(fields: Fields, layer: int) -> Iterator[Item]:
    return _attention(fields, True, False, _qwen_window(fields, layer))


def _qwen3_attention(fields: Fields, layer: int) -> Iterator[Item]:
    bias = fields.flag("attention_bias")
    return _attention(fields, bias, bias, _qwen_window(fields, layer))


def _qwen3_moe_attention(fields: Fields, layer: int) -> Iterator[Item]:
    bias = fields.flag("attention_bias")
    window = fields.optional("sliding_window", 0) if fields.flag("use_sliding_window") else 0
    return _attention(fields, bias, bias, window)


def _qwen_window(fields: Fields, layer: int) -> int:
    """Layers from max_window_layers on slide, unless layer_types says which do."""
    if not fields.flag("use_sliding_window"):
        return 0
    window = fields.optional("sliding_window", 0)
    kind = fields.layer_kind(layer)
    late = layer >= fields.optional("max_window_layers", 0, lowest=0)
    return window if kind == "sliding_attention" or (kind is None and late) else 0


def _hybrid_attention(fields: Fields, layer: int) -> Iterator[Item]:
    """Qwen3.5: gated delta-net layers, every fourth (full_attention_interval) gated attention."""
    is_full = (layer + 1) % fields.size("full_attention_interval") == 0
    kind = fields.layer_kind(layer) or ("full_attention" if is_full else "linear_attention")
    if kind == "linear_attention":
        return _delta_net(fields)
    if kind != "full_attention":
        raise CheckpointError(
            f"config.json: layer_types[{layer}] = {kind!r}: it takes linear_attention, "
            f"full_attention{did_you_mean(kind, ('linear_attention', 'full_attention'))}"
        )
    bias = fields.flag("attention_bias")
    return _attention(fields, bias, bias, is_gated=True)


def _delta_net(fields: Fields) -> Iterator[Item]:
    """The state of a gated delta-net is no paged cache, and its convolution no matrix: neither is
    a problem of the selector."""
    hidden = fields.size("hidden_size")
    key = fields.shard("linear_num_key_heads") * fields.size("linear_key_head_dim")
    value_heads = fields.shard("linear_num_value_heads")
    value = value_heads * fields.size("linear_value_head_dim")
    # Three pieces of one weight on each rank: q, k and v are cut by heads separately.
    qkv = (("in_proj_qkv", key), ("in_proj_qkv", key), ("in_proj_qkv", value))
    yield Dense("linear_attn.in_proj_qkvz", (*qkv, ("in_proj_z", value)), hidden, "rows")
    ba = (("in_proj_b", value_heads), ("in_proj_a", value_heads))
    yield Dense("linear_attn.in_proj_ba", ba, hidden, "rows")
    yield plain("linear_attn.out_proj", hidden, value, "columns")


def _latent_attention(fields: Fields, layer: int) -> Iterator[Item]:
    """DeepSeek's MLA. The projections to latents are small and replicated.

    Attention is listed as it runs over the cache: the up-projections absorbed into the queries,
    so that all heads share one KV head of kv_lora_rank + qk_rope_head_dim (512 + 64), whose first
    kv_lora_rank columns are the values. kv_b_proj is the weight that gets absorbed; prefill
    without absorption multiplies by it.
    """
    hidden, bias = fields.size("hidden_size"), fields.flag("attention_bias")
    heads, rope = fields.shard("num_attention_heads"), fields.size("qk_rope_head_dim")
    nope, value = fields.size("qk_nope_head_dim"), fields.size("v_head_dim")
    latent = fields.size("kv_lora_rank")
    kv_a = ("kv_a_proj_with_mqa", latent + rope)
    if fields.given("q_lora_rank") is None:
        yield plain("self_attn.q_proj", heads * (nope + rope), hidden, "rows")
        yield Dense("self_attn.kv_a_proj_with_mqa", (kv_a,), hidden, "replicated", bias)
    else:
        rank = fields.size("q_lora_rank")
        parts = (("q_a_proj", rank), kv_a)
        yield Dense("self_attn.fused_qkv_a_proj", parts, hidden, "replicated", bias)
        yield plain("self_attn.q_b_proj", heads * (nope + rope), rank, "rows")
    yield plain("self_attn.kv_b_proj", heads * (nope + value), latent, "rows")
    yield plain("self_attn.o_proj", hidden, heads * value, "columns", bias)
    yield CachedAttention("self_attn.attn", heads, 1, latent + rope)


# ---------------------------------------------------------------- feed-forward


def _mlp(fields: Fields, layer: int) -> Iterator[Item]:
    inner = fields.shard("intermediate_size")
    return _gated_mlp(fields, "mlp", inner, fields.flag("mlp_bias"))


def _gated_mlp(fields: Fields, name: str, inner: int, bias: bool = False) -> Iterator[Item]:
    hidden = fields.size("hidden_size")
    parts = (("gate_proj", inner), ("up_proj", inner))
    yield Dense(f"{name}.gate_up_proj", parts, hidden, "rows", bias)
    yield plain(f"{name}.down_proj", hidden, inner, "columns", bias)


def _routed_experts(
    fields: Fields, num_experts_field: str, other_gates: tuple[tuple[str, int], ...] = ()
) -> Iterator[Item]:
    """other_gates: beside the router, whose product they are part of."""
    num_experts, top_k = fields.size(num_experts_field), fields.size("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok = {top_k} is more than {num_experts_field} = "
            f"{num_experts}"
        )
    fields.divided(num_experts_field, num_experts, "ep", fields.ep)
    hidden = fields.size("hidden_size")
    # Ranks hold whole experts, or a share of the columns of every expert.
    share = fields.size if fields.ep > 1 else fields.shard
    inner = share("moe_intermediate_size")
    gates = (("gate", num_experts), *other_gates)
    yield Dense("mlp.gate", gates, hidden, "replicated", may_quantize=False)
    yield Experts("mlp.experts", num_experts, top_k, hidden, inner)


def _qwen3_moe(fields: Fields, layer: int) -> Iterator[Item]:
    is_sparse = (layer + 1) % fields.optional("decoder_sparse_step", 1) == 0
    if layer in fields.entries("mlp_only_layers", int) or not is_sparse:
        return _mlp(fields, layer)
    # transformers writes the second name since version 5; published checkpoints have the first.
    is_new = fields.given("num_local_experts") is not None
    return _routed_experts(fields, "num_local_experts" if is_new else "num_experts")


def _qwen3_5_moe(fields: Fields, layer: int) -> Iterator[Item]:
    yield from _routed_experts(fields, "num_experts", (("shared_expert_gate", 1),))
    inner = fields.shard("shared_expert_intermediate_size")
    yield from _gated_mlp(fields, "mlp.shared_expert", inner)


def _deepseek_moe(fields: Fields, layer: int) -> Iterator[Item]:
    is_sparse = layer % fields.optional("moe_layer_freq", 1) == 0
    if layer < fields.optional("first_k_dense_replace", 0, lowest=0) or not is_sparse:
        yield from _mlp(fields, layer)
        return
    yield from _routed_experts(fields, "n_routed_experts")
    if num_shared := fields.optional("n_shared_experts", 0, lowest=0):
        size = num_shared * fields.size("moe_intermediate_size")
        name = "n_shared_experts * moe_intermediate_size"
        inner = fields.divided(name, size, "tp", fields.tp)
        yield from _gated_mlp(fields, "mlp.shared_experts", inner)


def plain(name: str, rows: int, columns: int, cut: Cut, bias: bool = False) -> Dense:
    """A layer of one checkpoint weight, which has the layer's own name."""
    return Dense(name, ((name.rpartition(".")[2], rows),), columns, cut, bias)


# ---------------------------------------------------------------- architectures


@dataclass(frozen=True, slots=True)
class Architecture:
    """attention, feed_forward: of decoder layer i, in the order the engine builds them.

    defaults: what transformers' config class assumes where config.json says nothing.
    """

    attention: Callable[[Fields, int], Iterator[Item]]
    feed_forward: Callable[[Fields, int], Iterator[Item]]
    defaults: Mapping[str, Any]


_WINDOWS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_DEEPSEEK = {"q_lora_rank": 1536, "first_k_dense_replace": 3, "n_shared_experts": 1}
_HYBRID = {"head_dim": 256, "full_attention_interval": 4}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama_attention, _mlp, {}),
    "mistral": Architecture(
        _mistral_attention, _mlp, {"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "ministral3": Architecture(
        _mistral_attention, _mlp, {"num_key_value_heads": 8, "head_dim": 128}
    ),
    "qwen2": Architecture(_qwen2_attention, _mlp, _WINDOWS),
    "qwen3": Architecture(_qwen3_attention, _mlp, _WINDOWS | {"head_dim": 128}),
    "qwen3_moe": Architecture(
        _qwen3_moe_attention, _qwen3_moe, {"num_key_value_heads": 4, "sliding_window": 4096}
    ),
    "qwen3_5_text": Architecture(_hybrid_attention, _mlp, _HYBRID | {"num_key_value_heads": 4}),
    "qwen3_5_moe_text": Architecture(
        _hybrid_attention, _qwen3_5_moe, _HYBRID | {"num_key_value_heads": 2}
    ),
    "deepseek_v3": Architecture(_latent_attention, _deepseek_moe, _DEEPSEEK),
}
