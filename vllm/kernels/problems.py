"""Every kernel problem of a model, from its config.json alone, with the names the engine gives.

Standard library only: the choices for any model on any chip can be listed without weights, torch
or a GPU. Where the engine runs an architecture, names, order and problems equal its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from vllm.architectures.decoder import CachedAttention, DeltaRule, ExpertsSpec, Item, Mamba2Scan
from vllm.architectures.explained import Layers
from vllm.architectures.kv_cache import MLAAttentionSpec
from vllm.architectures.registry import describe, dtype_field, text_config
from vllm.architectures.sharding import LinearSpec, Region
from vllm.errors import ConfigError, did_you_mean
from vllm.formats.act_scheme import ActScheme
from vllm.formats.readers.base import StoredLayer
from vllm.formats.readers.layer_names import LayerNames
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.select.problem import (
    AttentionProblem,
    DeltaRuleProblem,
    KVQuantProblem,
    LinearProblem,
    Mamba2Problem,
    MoEProblem,
    Problem,
    comes_quantised,
)

_MAX_RANKS = 1 << 12
_ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_CACHE_FORMATS = (*_ITEM_SIZES, "fp8")

LayerFormat = tuple[WeightFormat, tuple[ActScheme, ...]]


class Quantization(Protocol):
    """What a checkpoint's quantisation config says of a layer made of the weights `names`; None
    where it is not quantised. As QuantizationConfig."""

    quantized_layers: tuple[str, ...]
    tells_experts_apart: bool

    def layer_format(self, names: Sequence[str]) -> LayerFormat | None: ...
    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None: ...
    def requant_error(self, weight: WeightFormat) -> float | None: ...


# ---------------------------------------------------------------- one layer


def linear_problem(
    spec: LinearSpec,
    name: str,
    regions: list[Region],
    ranks: int,
    weight: WeightFormat,
    act: tuple[ActScheme, ...],
    dtype: str,
    requant_error: float | None = None,
) -> LinearProblem:
    """What one of `ranks` tensor-parallel ranks asks for, of the regions that it holds."""
    rows = tuple(region.shape[0] for region in regions)
    return LinearProblem(
        n=sum(rows),
        k=regions[0].shape[1],
        weight=weight,
        act=act,
        dtype=dtype,
        bias=spec.bias,
        parts=rows if len(rows) > 1 else (),
        cut_n=ranks if spec.style == "column" else 1,
        cut_k=ranks if spec.style == "row" else 1,
        requant_error=requant_error,
        comes_quantised=comes_quantised(name),
    )


def expert_act(weight: WeightFormat, act: tuple[ActScheme, ...]) -> tuple[ActScheme, ...]:
    """How experts may quantise activations where a layer may as `act` says: where a token may have
    one scale, groups of its columns may have their own, which is no coarser."""
    if weight.element != "fp8" or ActScheme.DYNAMIC_TOKEN not in act:
        return act
    place = act.index(ActScheme.DYNAMIC_TOKEN) + 1
    return (*act[:place], ActScheme.DYNAMIC_GROUP128, *act[place:])


def moe_problem(
    spec: ExpertsSpec,
    tp: int,
    ep: int,
    weight: WeightFormat,
    act: tuple[ActScheme, ...],
    dtype: str,
    requant_error: float | None = None,
) -> MoEProblem:
    _, intermediate = spec.per_rank(tp, ep)
    return MoEProblem(
        num_experts=spec.count.count,
        top_k=spec.router.top_k,
        hidden=spec.hidden,
        intermediate=intermediate,
        weight=weight,
        act=expert_act(weight, act),
        dtype=dtype,
        cut=tp if ep == 1 else 1,
        cut_experts=ep,
        requant_error=requant_error,
        activation=spec.activation,
        swiglu_limit=spec.swiglu_limit,
        bias=spec.has_bias,
    )


def attention_problems(
    spec: CachedAttention, tp: int, kv_format: str, dtype: str
) -> tuple[AttentionProblem, KVQuantProblem]:
    """Attention over the cache, and the writing of that cache."""
    cache = spec.cache
    kv_heads, window = cache.kv_heads.per_rank(tp), getattr(cache, "window", 0)
    heads = spec.heads.per_rank(tp)
    cache_variant, value_dim = "", 0
    if isinstance(cache, MLAAttentionSpec):
        cache_variant, value_dim = spec.variant, cache.value_dim
    sizes = heads, kv_heads, cache.head_dim
    scale, softcap = spec.scale, spec.softcap
    return (
        AttentionProblem(*sizes, kv_format, dtype, window, spec.variant, value_dim, scale, softcap),
        KVQuantProblem(kv_heads, cache.head_dim, kv_format, dtype, cache_variant),
    )


def recurrence_problem(
    spec: DeltaRule | Mamba2Scan, tp: int, dtype: str
) -> DeltaRuleProblem | Mamba2Problem:
    if isinstance(spec, DeltaRule):
        return delta_rule_problem(spec, tp, dtype)
    return mamba2_problem(spec, tp, dtype)


def delta_rule_problem(spec: DeltaRule, tp: int, dtype: str) -> DeltaRuleProblem:
    states = spec.states
    return DeltaRuleProblem(*spec.per_rank(tp), states.key_dim, states.value_dim, dtype)


def mamba2_problem(spec: Mamba2Scan, tp: int, dtype: str) -> Mamba2Problem:
    states, (groups, heads) = spec.states, spec.per_rank(tp)
    sizes = heads, groups, states.value_dim, states.key_dim
    least, most = spec.dt_limits
    return Mamba2Problem(*sizes, dtype, least, None if most == float("inf") else most)


# ---------------------------------------------------------------- all layers


def layer_problems(
    config: Mapping[str, Any],
    quant_config: Quantization | None,
    *,
    dtype: str,
    kv_format: str,
    tp: int = 1,
    ep: int = 1,
    layers: Layers | None = None,
    stored_dtype: str | None = None,
) -> list[tuple[str, Problem]]:
    """(layer name, problem) of everything that one rank asks the selector, in the engine's order.

    config: config.json as read. dtype: of activations (`bf16` or `bfloat16`); weights that are
    not quantised are kept as the config says they are stored, unless that is wider. kv_format:
    element type of the KV cache. tp: tensor-parallel ranks. ep: expert-parallel ranks; with more
    than one, experts are dealt out whole and tp does not cut them. layers: those of the model where
    its description does not say them. stored_dtype: of the weights that are not quantised, where
    the checkpoint itself is known; None for what the config says.

    CheckpointError where the config is wrong, ConfigError where a size does not divide by the
    ranks or an argument is not known; both name the field.
    """
    for name, ranks in (("tp", tp), ("ep", ep)):
        if type(ranks) is not int or not 1 <= ranks <= _MAX_RANKS:
            raise ConfigError(f"{name} = {ranks!r}: it takes a whole number from 1 to {_MAX_RANKS}")
    dtype = _known("dtype", _SHORT_NAMES.get(dtype, dtype), tuple(_ITEM_SIZES))
    kv_format = _known("kv_format", _SHORT_NAMES.get(kv_format, kv_format), _CACHE_FORMATS)
    text = layers.text if layers else text_config(config)
    items = layers.items if layers else describe(config).items()
    stored = stored_dtype or str(dtype_field(text)).removeprefix("torch.")
    plain = WeightFormat(_weight_dtype(stored, dtype)), (ActScheme.NONE,)

    def of_item(name: str, item: Item, layer_format: LayerFormat) -> tuple[Problem, ...]:
        error = quant_config.requant_error(layer_format[0]) if quant_config else None
        if isinstance(item, LinearSpec):
            regions = [region for _, region in item.shards("", 0, tp)]
            if item.is_absorbed:
                return ()
            return (linear_problem(item, name, regions, tp, *layer_format, dtype, error),)
        if isinstance(item, ExpertsSpec):
            return (moe_problem(item, tp, ep, *layer_format, dtype, error),)
        if isinstance(item, CachedAttention):
            return attention_problems(item, tp, kv_format, dtype)
        return (recurrence_problem(item, tp, dtype),)

    made: dict[Any, tuple[Problem, ...]] = {}  # layers that are alike share their specs
    found = []
    for prefix, item in items:
        name = prefix + item.name
        weights = quantisable(prefix, item)
        if weights and isinstance(item, LinearSpec) and any(len(p.dims) > 1 for p in item.parts):
            # As the engine: a weight that is cut into several pieces counts once for each.
            weights = tuple(weight for weight, _ in item.shards(prefix, 0, tp))
        layer_format = quant_config.layer_format(weights) if quant_config and weights else None
        key = id(item), layer_format
        if key not in made:
            made[key] = of_item(name, item, layer_format or plain)
        found += [(name, problem) for problem in made[key]]
    return found


def first_misfit(
    items: Iterable[tuple[str, Item]], quant_config: Quantization, tp: int, ep: int
) -> str:
    """Of the first layer whose weights on one rank cannot be stored as the config says, its name
    and why, as the engine refuses it; "" where all can."""
    fit: set[tuple[int, StoredLayer]] = set()  # layers that are alike share their specs
    for prefix, item in items:
        names = quantisable(prefix, item)
        layer = quant_config.stored_layer(names) if names else None
        if layer is None or (id(item), layer) in fit:
            continue
        if isinstance(item, ExpertsSpec):
            _, inner = item.per_rank(tp, ep)
            is_cut = inner < item.intermediate.size
            first = (inner,) * (len(item.parts) - 1)
            shapes = [(first, item.hidden, False), ((item.hidden,), inner, is_cut)]
        else:
            assert isinstance(item, LinearSpec)
            regions = [region for _, region in item.shards("", 0, tp)]
            columns = regions[0].shape[1]
            is_cut = columns < regions[0].num_columns
            shapes = [(tuple(r.shape[0] for r in regions), columns, is_cut)]
        for shape in shapes:
            if text := layer.misfit(*shape):
                return f"{prefix}{item.name}: {text}"
        fit.add((id(item), layer))
    return ""


def named_wrongly(
    items: Sequence[tuple[str, Item]],
    quant_config: Quantization,
    slot_name: Callable[[str], str | None],
) -> str:
    """Which quantised layer a config lists that the model does not have, or which experts of a
    layer it stores differently; "" for none. slot_name: our name for that of a checkpoint tensor,
    None for one that is not needed."""
    if quant_config.quantized_layers and (text := _not_there(items, quant_config, slot_name)):
        return text
    experts = [one for one in items if isinstance(one[1], ExpertsSpec)]
    for prefix, item in experts if quant_config.tells_experts_apart else ():
        assert isinstance(item, ExpertsSpec)
        found: dict[Any, str] = {}
        for expert in _experts(prefix, item):
            found.setdefault(quant_config.layer_format(expert), expert[0])
        if len(found) > 1:
            texts = (f"{name} as {stored[0] if stored else 'floats'}"
                     for stored, name in found.items())  # fmt: skip
            return (
                f"quantization_config stores {', '.join(texts)}: the experts of a layer must be "
                f"stored alike"
            )
    return ""


def _not_there(
    items: Sequence[tuple[str, Item]],
    quant_config: Quantization,
    slot_name: Callable[[str], str | None],
) -> str:
    """The first half of `named_wrongly`."""
    names = [name for prefix, item in items for name in _weights(prefix, item)]
    known = {name[:end] for name in names for end in _ends(name)}
    for listed in quant_config.quantized_layers:
        # Of a pattern, what it begins with tells whether it is for layers outside the text model.
        bare = listed.removeprefix("re:").replace("\\", "").lstrip("^.*")
        ours = slot_name(f"{bare}.weight")
        if ours is None or ours.removesuffix(".weight") in known:
            continue
        one = LayerNames([listed])
        if not any(name in one for name in names):
            hint = "" if one.is_pattern else did_you_mean(listed, known)
            return (
                f"quantization_config stores {listed} quantised, but this model has no linear "
                f"layer or expert of that name{hint}"
            )
    return ""


def _ends(name: str) -> Iterator[int]:
    """Where the parts of a name end."""
    return (end for end in range(1, len(name) + 1) if name[end : end + 1] in (".", ""))


def _weights(prefix: str, item: Item) -> Iterator[str]:
    """Checkpoint names of all weights of an item."""
    if isinstance(item, ExpertsSpec):
        yield from (name for expert in _experts(prefix, item) for name in expert)
    elif isinstance(item, LinearSpec):
        parent = prefix + item.name[: item.name.rfind(".") + 1]
        yield from (parent + part.name for part in item.parts)


def _experts(prefix: str, item: ExpertsSpec) -> Iterator[tuple[str, ...]]:
    """Checkpoint names of the weights of each expert."""
    for index in range(item.count.count):
        yield tuple(f"{prefix}{item.name}.{index}.{part}" for part in item.parts)


def quantisable(prefix: str, item: Item) -> tuple[str, ...]:
    """Checkpoint names of the weights that the format of the layer is asked for."""
    if isinstance(item, ExpertsSpec):
        # One format serves all experts of a layer, so the first one speaks for them.
        return next(_experts(prefix, item))
    is_linear = isinstance(item, LinearSpec) and item.may_quantize
    return tuple(_weights(prefix, item)) if is_linear else ()


def _weight_dtype(stored: str, dtype: str) -> str:
    """Of weights that are not quantised: as stored, unless activations are narrower."""
    stored = _SHORT_NAMES.get(stored, stored)
    return stored if _ITEM_SIZES.get(stored, 8) <= _ITEM_SIZES[dtype] else dtype


def _known(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(
            f"{name} {value!r} is unknown: it takes {', '.join(known)}{did_you_mean(value, known)}"
        )
    return value
