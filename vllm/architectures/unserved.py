"""The layers of a model that the engine does not serve, from the fields of its config.json alone.

This is a reading, not a description: kinds of layers that are not known here are counted and named.
"""

from collections import Counter
from collections.abc import Iterator

from vllm.architectures.build import AttentionKind, attention, dim, gated_mlp_of
from vllm.architectures.decoder import GATED, SINKS, SOFTCAP, ExpertsSpec, Item, layer_prefix
from vllm.architectures.deepseek_v3 import latent_attention
from vllm.architectures.fields import MTP_FIELDS, Fields
from vllm.architectures.kv_cache import MLA
from vllm.architectures.router import Router, checked
from vllm.architectures.sharding import Dim, LinearSpec, Part, linear
from vllm.architectures.unserved_fields import (
    EXPERT_SIZES,
    EXPERTS,
    MLP_SIZES,
    SHARED,
    SHARED_SIZES,
    TOP_K,
    UnservedFields,
)
from vllm.utils.dataclasses import replace


def layers_of(fields: UnservedFields) -> tuple[list[tuple[str, Item]], list[str]]:
    """(prefix of its name, item) of all that asks for a kernel, and what is left out."""
    found: list[tuple[str, Item]] = []
    unknown: Counter[str] = Counter()
    for layer in range(fields.size("num_hidden_layers")):
        kind = kind_of(fields, layer)
        mixed = mixer(fields, layer, kind)
        unknown[kind] += not mixed
        items = *mixed, *_feed_forward(fields, _is_sparse(fields, layer))
        found += [(layer_prefix(layer), item) for item in items]
    if fields.get("vocab_size") is not None:
        found.append(("", lm_head(fields.size("vocab_size"), fields.size("hidden_size"))))
    left_out = [f"{count} x {kind}" for kind, count in unknown.items() if count]
    return found, left_out + left_out_of(fields)


def left_out_of(fields: UnservedFields) -> list[str]:
    """What a config has besides the layers that are read, in words."""
    num_predicting = fields.count(*MTP_FIELDS)
    texts = [f"{num_predicting} x multi-token prediction"] if num_predicting else []
    if fields.get("mamba_num_heads") or fields.get("mamba_n_heads"):
        texts.append("the convolutions and state updates of mamba layers")
    if fields.get("linear_num_key_heads"):
        texts.append("the convolutions and recurrences of linear attention")
    if fields.get("index_topk"):
        texts.append("the indexers of sparse attention")
    return texts


def lm_head(vocab_size: int, hidden: int) -> LinearSpec:
    vocab = Dim("vocab_size", vocab_size, uneven="padded")
    return linear("lm_head", vocab, Dim("hidden_size", hidden), "column")


# ---------------------------------------------------------------- mixers


def kind_of(fields: UnservedFields, layer: int) -> str:
    """The kind of a layer's mixer; "" where nothing says it."""
    if (number := fields.entry("attn_type_list", int, layer)) is not None:
        return "full_attention" if number == 1 else f"attention of attn_type {number}"
    kind = fields.layer_kind(layer) or fields.entry("layers_block_type", str, layer)
    return kind or ""


def mixer(fields: UnservedFields, layer: int, kind: str) -> tuple[Item, ...]:
    """() for a kind that is not known here. kind: "" where nothing says it."""
    if kind in ("", "attention", "full_attention", "sliding_attention"):
        return fields.once(
            ("attention", *_variant_and_window(fields, layer, kind), kind),
            lambda: tuple(_attention(fields, layer, kind)),
        )
    if kind == "linear_attention" and fields.get("linear_num_key_heads") is not None:
        return fields.once(kind, lambda: _delta_net(fields))
    if kind == "mamba":
        return fields.once(kind, lambda: _mamba(fields))
    return ()


def _variant_and_window(fields: UnservedFields, layer: int, kind: str) -> tuple[str, int]:
    window = fields.count("sliding_window")
    variant = SINKS if fields.has_sinks else ""
    if fields.get("attn_logit_softcapping"):
        variant = SOFTCAP
    if kind:
        is_windowed = kind == "sliding_attention"
    else:
        period = fields.get("sliding_window_pattern")
        is_windowed = not (type(period) is int and period > 0 and (layer + 1) % period == 0)
        is_windowed = is_windowed and layer >= fields.count("max_window_layers")
        is_windowed = is_windowed and fields.flag("use_sliding_window", True)
    return variant, window if is_windowed else 0


def _attention(fields: UnservedFields, layer: int, kind: str) -> Iterator[Item]:
    variant, window = _variant_and_window(fields, layer, kind)
    own: Fields = fields
    if fields.get("kv_lora_rank") is not None:
        found = latent_attention(fields, layer)
        yield from found.items[:-1]
        yield replace(found.attn, variant="sparse MLA" if fields.get("index_topk") else MLA)
        return
    is_shared = bool(kind) and not window and fields.flag("attention_k_eq_v")
    if kind == "full_attention" and fields.get("global_head_dim") is not None:
        heads = {"head_dim": fields.size("global_head_dim")}
        if (num_kv_heads := fields.count("num_global_key_value_heads")) > 0:
            heads["num_key_value_heads"] = num_kv_heads
        own = Fields({**fields.given, **heads}, {})
    bias = any(map(fields.flag, ("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias")))
    gate, out = fields.flag("attn_output_gate"), fields.flag("attention_bias")
    plain = attention(own, AttentionKind(bias, out, window, gate))
    # Values that are the keys have no weight.
    parts = plain.qkv_proj.parts[: 2 if is_shared else 3]
    yield replace(plain.qkv_proj, parts=parts)
    yield plain.o_proj
    yield replace(plain.attn, variant=variant)


def _delta_net(fields: Fields) -> tuple[Item, ...]:
    """A gated delta-net whose inputs are stored as two weights."""
    hidden = dim(fields, "hidden_size")
    keys = dim(fields, "linear_num_key_heads", fields.size("linear_key_head_dim"))
    values = dim(fields, "linear_num_value_heads", fields.size("linear_value_head_dim"))
    one_each = replace(values, unit=1)
    parts = {"in_proj_qkvz": (keys, keys, values, values), "in_proj_ba": (one_each, one_each)}
    projections = (
        LinearSpec(f"linear_attn.{name}", (Part(name, rows),), hidden, "column")
        for name, rows in parts.items()
    )
    return *projections, linear("linear_attn.out_proj", hidden, values, "row")


def _mamba(fields: UnservedFields) -> tuple[Item, ...]:
    """in_proj: the gate and the input of every head, B and C of every group, a step per head."""
    heads_name = fields.first(("mamba_num_heads", "mamba_n_heads"))
    unit = fields.size(fields.first(("mamba_head_dim", "mamba_d_head")))
    state = fields.size(fields.first(("ssm_state_size", "mamba_d_state")))
    group_name = fields.first(("n_groups", "mamba_n_groups"))
    heads = dim(fields, heads_name, unit)
    groups = Dim(group_name, fields.size(group_name), state, "repeated")
    rows = Part("in_proj", (heads, heads, groups, groups, replace(heads, unit=1)))
    hidden = dim(fields, "hidden_size")
    return (
        LinearSpec("mamba.in_proj", (rows,), hidden, "column"),
        linear("mamba.out_proj", hidden, heads, "row"),
    )


# ---------------------------------------------------------------- feed-forward


def _is_sparse(fields: UnservedFields, layer: int) -> bool:
    if not _has_experts(fields) or layer < fields.count("first_k_dense_replace"):
        return False
    if layer < fields.count("num_dense_layers") or layer in fields.entries("mlp_only_layers", int):
        return False
    if (kind := fields.entry("mlp_layer_types", str, layer)) is not None:
        return bool(kind == "sparse")
    if listed := fields.entries("moe_layers", int):
        return layer in listed
    if layer < fields.count("moe_layer_start_index"):
        return False
    if layer > fields.optional("moe_layer_end_index", layer, lowest=0):
        return False
    if isinstance(fields.get("moe_layer_freq"), list):
        return bool(fields.entry("moe_layer_freq", int, layer))
    steps = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    is_due = all((layer + 1) % fields.optional(step, 1) == 0 for step in steps)
    return is_due and layer % fields.optional("moe_layer_freq", 1) == 0


def _has_experts(fields: UnservedFields) -> bool:
    is_off = fields.get("enable_moe_block") is False
    return not is_off and fields.count(*EXPERTS) > 1


def _feed_forward(fields: UnservedFields, is_sparse: bool) -> tuple[Item, ...]:
    return fields.once(("feed_forward", is_sparse), lambda: _make_feed_forward(fields, is_sparse))


def _make_feed_forward(fields: UnservedFields, is_sparse: bool) -> tuple[Item, ...]:
    if is_sparse:
        return tuple(_moe(fields))
    return _mlp(fields, "mlp", dim(fields, fields.first(MLP_SIZES)), fields.flag("mlp_bias"))


def _mlp(fields: UnservedFields, name: str, inner: Dim, bias: bool = False) -> tuple[Item, ...]:
    if fields.mlp_parts == GATED:
        return gated_mlp_of(fields, name, inner, bias).items
    hidden = dim(fields, "hidden_size")
    up = linear(f"{name}.up_proj", inner, hidden, "column", bias)
    return up, linear(f"{name}.down_proj", hidden, inner, "row", bias)


def _moe(fields: UnservedFields) -> Iterator[Item]:
    hidden, count = dim(fields, "hidden_size"), dim(fields, fields.first(EXPERTS))
    gates: tuple[Part, ...] = (Part("gate", (count,)),)
    if fields.count("shared_expert_intermediate_size"):
        gates += (Part("shared_expert_gate", (Dim("shared_expert_gate", 1),)),)
    yield LinearSpec("mlp.gate", gates, hidden, "replicated", may_quantize=False)
    inner = dim(fields, fields.first(EXPERT_SIZES))
    yield experts(fields, "mlp.experts", count, hidden.size, inner)
    num_shared = fields.count(*SHARED)
    if size := fields.count(*SHARED_SIZES) or num_shared * inner.size:
        yield from _mlp(fields, "mlp.shared_experts", Dim("shared experts", size))


def experts(fields: UnservedFields, name: str, count: Dim, hidden: int, inner: Dim) -> ExpertsSpec:
    top_k = fields.size(fields.first(TOP_K))
    router = checked(fields, lambda: Router(count.count, top_k, renormalise=True))
    activation = fields.expert_activation
    return ExpertsSpec(name, count, router, hidden, inner, activation, fields.mlp_parts)
