"""The layers of a model that no description is for, from the shapes of its checkpoint's tensors.

Linear layers and experts are found by their names; how attention is computed, and how many experts
a token has, no tensor says: that is read from config.json.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from vllm.architectures import unserved
from vllm.architectures.decoder import GATED, CachedAttention, ExpertsSpec, Item
from vllm.architectures.sharding import Dim, LinearSpec, ParallelStyle, Part
from vllm.architectures.unserved_fields import UnservedFields
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import dataclass, replace
from vllm.utils.safetensors_files import TensorShape


class _Weight(NamedTuple):
    """shape: in numbers, once codes are unpacked."""

    shape: tuple[int, ...]
    has_bias: bool


@dataclass(frozen=True)
class Packing:
    """How integers are packed into 32 bits: bits of a code; by_rows: of transposed weights, rows
    share a number (GPTQ), otherwise columns do (AWQ)."""

    bits: int = 4
    by_rows: bool = False


_LAYER = re.compile(
    r"(?:(?P<parent>.+?)\.)?(?P<list>layers|h|blocks)\.(?P<layer>\d{1,4})\.(?P<name>.+)"
)
_OTHER_MODEL = re.compile(r"visual|vision|image|audio|speech|talker|mtp|nextn|encoder|draft")
_NO_LAYER = re.compile(r"norm|embed|conv|rotary|A_log|e_score")
_EXPERT = re.compile(r"(?P<name>(?:.*\.)?experts)\.(?P<expert>\d{1,4})\.(?P<part>\w+)")
_STACK = re.compile(r"(?P<name>(?:.*\.)?experts)\.(?P<part>\w+)")
_ROUTER = re.compile(r"(?:.*\.)?(?:gate|router|router\.\w+|shared_expert_gate)")
_ATTENTION = re.compile(r".*(?:attn|attention|mixer)\.(?:k_proj|kv_b_proj|qkv_proj|Wqkv|wk|wkv_b)")
_HEADS = re.compile(r".*\.(?:q_proj|q_b_proj|kv_b_proj|o_proj|wq|wq_b|wkv_b|wo)")
_KV_HEADS = re.compile(r".*\.(?:k_proj|v_proj|wk|wv)")
# Weights that are computed as one layer.
_MERGED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("qkv_proj", ("q_proj", "k_proj")),  # the values are the keys
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("w13", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
)
_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "w2", "wo", "fc2", "c_proj", "dense_4h_to_h")
_REPLICATED = ("fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa", "wq_a", "wkv_a_with_mqa",
               "fc1_latent_proj", "fc2_latent_proj", "weights_proj")  # fmt: skip
_DOWN = ("down_proj", "w2")
_UP: tuple[tuple[str, ...], ...] = (
    ("gate_up_proj",),
    ("gate_proj", "up_proj"),
    ("w13",),
    ("w1", "w3"),
    ("up_proj",),
)
_MAX_SIZE = 1 << 24


def packing_of(quantization: Any) -> Packing:
    """quantization: the quantization_config, whether or not it is one."""
    if not isinstance(quantization, Mapping):
        return Packing()
    groups = quantization.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [s.get("weights") for s in schemes if isinstance(s, Mapping)]
    given = [w.get("num_bits") for w in weights if isinstance(w, Mapping)]
    given += [quantization.get("bits"), quantization.get("w_bit")]
    bits = next((n for n in given if n in (2, 4, 8)), 4)
    return Packing(bits, by_rows=quantization.get("quant_method") == "gptq")


def layers_of(
    fields: UnservedFields, tensors: Mapping[str, TensorShape], packing: Packing
) -> tuple[list[tuple[str, Item]], list[str]]:
    """(prefix of its name, item) of all that asks for a kernel, and what is left out."""
    by_layer: dict[tuple[str, int], dict[str, _Weight]] = {}
    left_out: Counter[str] = Counter()
    weights = dict(_weights(tensors, packing))
    num_layers = fields.count("num_hidden_layers") or 10_000
    fields.has_sinks = any(name.endswith(".sinks") for name in tensors)
    for module, shape in weights.items():
        if (match := _LAYER.fullmatch(module)) is None:
            continue
        parent, layer = match["parent"] or "", int(match["layer"])
        if layer >= num_layers or _OTHER_MODEL.search(parent):
            place = parent.split(".")[-1] if layer < num_layers else "multi-token prediction"
            left_out[f"weight of {place}"] += 1
            continue
        parts = [part for part in parent.split(".") if part and part != "language_model"]
        prefix = ".".join([*(parts or ["model"]), match["list"], str(layer)]) + "."
        weight = _Weight(shape, f"{module}.bias" in tensors)
        by_layer.setdefault((prefix, layer), {})[match["name"]] = weight
    found: list[tuple[str, Item]] = []
    for (prefix, layer), modules in sorted(by_layer.items(), key=lambda one: one[0][1]):
        found += [(prefix, item) for item in _layer(fields, layer, modules, left_out)]
    if (head := _lm_head(weights)) is not None:
        found.append(("", head))
    texts = [f"{count} x {what}" for what, count in left_out.items()]
    return found, texts + [text for text in unserved.left_out_of(fields) if " x " not in text]


def _weights(
    tensors: Mapping[str, TensorShape], packing: Packing
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(module, sizes in numbers) of matrices and stacks of them."""
    for name, stored in tensors.items():
        found = re.fullmatch(r"(.+?)(\.weight|\.weight_packed|\.qweight|_blocks|)", name)
        if found is None or len(stored.shape) < 2:
            continue
        module, suffix = found.groups()
        is_stack = len(stored.shape) == 3 and _STACK.fullmatch(module.rpartition("layers.")[2])
        if not suffix and (not is_stack or "scale" in name or "bias" in name):
            continue
        shape = _unpacked(stored, suffix, packing)
        if not all(1 <= size <= _MAX_SIZE for size in shape):
            raise CheckpointError(
                f"{name} has the shape {list(stored.shape)}, which no weight has; fetch the "
                f"checkpoint again"
            )
        yield module, shape


def _unpacked(stored: TensorShape, suffix: str, packing: Packing) -> tuple[int, ...]:
    """Two codes a byte, or `packing` in numbers of 32 bits; mxfp4 stacks are [experts, rows,
    groups, bytes]."""
    shape = stored.shape
    if suffix == "_blocks":
        shape = (*shape[:2], shape[2] * shape[3]) if len(shape) == 4 else shape
    codes = {"U8": 2, "I32": 32 // packing.bits}.get(stored.dtype, 1)
    if suffix == ".qweight":
        k, n = shape[-2:]
        return (n, k * codes) if packing.by_rows else (n * codes, k)
    return (*shape[:-1], shape[-1] * codes)


def _lm_head(weights: Mapping[str, tuple[int, ...]]) -> LinearSpec | None:
    """A tied one has the shape of the embedding."""
    for last in ("lm_head", "embed_tokens", "embeddings", "wte"):
        for module, shape in weights.items():
            if module.rpartition(".")[2] == last and len(shape) == 2:
                return unserved.lm_head(*shape)
    return None


# ---------------------------------------------------------------- one layer


def _layer(
    fields: UnservedFields,
    layer: int,
    modules: dict[str, _Weight],
    left_out: Counter[str],
) -> Iterator[Item]:
    """modules: its weights by name; layers that are alike get the same items."""
    is_expert = {name: _EXPERT.fullmatch(name) for name in modules}
    dense = {
        name: weight
        for name, weight in modules.items()
        if len(weight.shape) == 2 and not is_expert[name] and not _NO_LAYER.search(name)
    }
    yield from fields.once(("dense", *dense.items()), partial(_dense, fields, dense))
    if any(_ATTENTION.fullmatch(name) for name in dense):
        yield from _attention(fields, layer, left_out)
    stacks: dict[str, dict[str, tuple[int, ...]]] = {}
    counts: dict[str, set[str]] = {}
    for name, (shape, _) in modules.items():
        if match := is_expert[name]:
            counts.setdefault(match["name"], set()).add(match["expert"])
        elif len(shape) != 3 or (match := _STACK.fullmatch(name)) is None:
            continue
        stacks.setdefault(match["name"], {})[match["part"]] = shape
    for name, parts in stacks.items():
        count = len(counts.get(name, ())) or next(iter(parts.values()))[0]
        key = ("experts", name, count, *parts.items())
        spec = fields.once(key, partial(_experts, fields, name, count, parts))
        if spec is None:
            left_out[f"{name} of {', '.join(parts)}"] += 1
        else:
            yield spec


def _attention(
    fields: UnservedFields, layer: int, left_out: Counter[str]
) -> Iterator[CachedAttention]:
    try:
        kind = unserved.kind_of(fields, layer)
        items = unserved.mixer(fields, layer, kind)
    except CheckpointError as error:
        left_out[f"attention, of which config.json says too little ({error})"] += 1
        return
    if not items:
        left_out[f"attention of a {kind} layer"] += 1
    yield from (item for item in items if isinstance(item, CachedAttention))


def _experts(
    fields: UnservedFields, name: str, count: int, parts: Mapping[str, tuple[int, ...]]
) -> ExpertsSpec | None:
    down = next((last for last in _DOWN if last in parts), None)
    up = next((names for names in _UP if all(last in parts for last in names)), None)
    if down is None or up is None:
        return None
    hidden, inner = parts[down][-2:]
    if len(parts[down]) == 3:  # [experts, outputs, inputs], or the two exchanged
        widths = (inner, 2 * inner)
        if parts[up[0]][-1] != hidden or parts[up[0]][-2] not in widths:
            hidden, inner = inner, hidden
    dims = Dim("experts", count), Dim("intermediate size of an expert", inner)
    spec = unserved.experts(fields, name, dims[0], hidden, dims[1])
    numbered = (*up, down) if len(parts[down]) == 2 else GATED
    is_gated = up != ("up_proj",)
    if is_gated == (spec.parts == GATED):
        return replace(spec, parts=numbered if is_gated else GATED[1:])
    # The weights say it, whatever is usual with this activation function.
    activation = f"{fields.act} {'with' if is_gated else 'without'} a gate"
    return replace(spec, parts=numbered if is_gated else GATED[1:], activation=activation)


def _dense(fields: UnservedFields, dense: dict[str, _Weight]) -> tuple[LinearSpec, ...]:
    """Linear layers in the order of their first weight."""
    found: list[LinearSpec] = []
    done: set[str] = set()
    for name in dense:
        if name in done:
            continue
        parent, dot, last = name.rpartition(".")
        merged = last
        names: tuple[str, ...] = (name,)
        for own, lasts in _MERGED:
            members = tuple(f"{parent}{dot}{one}" for one in lasts)
            columns = {dense[one].shape[1] for one in members if one in dense}
            is_whole = all(one in dense and one not in done for one in members)
            if last in lasts and is_whole and len(columns) == 1:
                merged, names = own, members
                break
        done.update(names)
        found.append(_linear(fields, f"{parent}{dot}{merged}", names, dense))
    return tuple(found)


def _linear(
    fields: UnservedFields,
    name: str,
    names: tuple[str, ...],
    dense: Mapping[str, _Weight],
) -> LinearSpec:
    last = name.rpartition(".")[2]
    is_router = _ROUTER.fullmatch(name) is not None
    style: ParallelStyle = "column"
    if is_router or last in _REPLICATED or "indexer" in name:
        style = "replicated"
    elif last in _ROW_PARALLEL:
        style = "row"
    parts = tuple(
        Part(one.rpartition(".")[2], _rows(fields, one, dense[one].shape[0])) for one in names
    )
    columns = dense[names[0]].shape[1]
    bias = any(dense[one].has_bias for one in names)
    inputs = _heads(fields, name, columns) if style == "row" else Dim(f"columns of {name}", columns)
    return LinearSpec(name, parts, inputs, style, bias, may_quantize=not is_router)


def _rows(fields: UnservedFields, name: str, rows: int) -> tuple[Dim, ...]:
    """What tensor parallelism cuts by itself."""
    last = name.rpartition(".")[2]
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    if last in ("qkv_proj", "Wqkv") and heads and kv_heads and rows % (heads + 2 * kv_heads) == 0:
        unit = rows // (heads + 2 * kv_heads)
        own = Dim("num_key_value_heads", kv_heads, unit, "repeated")
        return Dim("num_attention_heads", heads, unit), own, own
    if last == "gate_up_proj" and rows % 2 == 0:
        return (Dim("intermediate_size", rows // 2),) * 2
    return (_heads(fields, name, rows),)


def _heads(fields: UnservedFields, name: str, size: int) -> Dim:
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    if _HEADS.fullmatch(name) and heads and size % heads == 0:
        return Dim("num_attention_heads", heads, size // heads)
    if _KV_HEADS.fullmatch(name) and kv_heads and size % kv_heads == 0:
        return Dim("num_key_value_heads", kv_heads, size // kv_heads, "repeated")
    return Dim(f"size of {name}", size)
