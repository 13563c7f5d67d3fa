"""Every kernel problem of a model, from its config.json alone, with the names the engine gives.

Standard library only: the choices for any model on any chip can be listed without weights, torch
or a GPU. Where the engine runs an architecture, names, order and problems equal its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.architectures.decoder import (
    ARCHITECTURES,
    MAX_LAYERS,
    Dense,
    Experts,
    Fields,
    Item,
    plain,
)
from vllm.errors import CheckpointError, ConfigError, did_you_mean
from vllm.formats.weight_format import ActScheme, WeightFormat
from vllm.kernels.select.problem import (
    AttentionProblem,
    KVQuantProblem,
    LinearProblem,
    MoEProblem,
    Problem,
    comes_quantised,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization import LayerFormat, QuantizationConfig

MOE_LAYOUTS = ("standard", "batched")

_MAX_RANKS = 1 << 12
_ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_CACHE_FORMATS = (*_ITEM_SIZES, "fp8")

# model_type of a multimodal config -> of its text_config where that names none.
_TEXT_TYPES = {"mistral3": "mistral", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

MODEL_TYPES = (*ARCHITECTURES, *_TEXT_TYPES)


def model_type(config: Mapping[str, Any]) -> str:
    """`model_type` of the text model: what model rules are written against."""
    return str(text_config(config)["model_type"])


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model: of a multimodal one its nested `text_config`.

    Always names a `model_type` and, where either level does, the `dtype` of the weights.
    CheckpointError for what is no config, or of a model_type that is not known.
    """
    outer = _checked_type(config, "config.json")
    if outer not in _TEXT_TYPES:
        return dict(config)
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        given = "nothing" if nested is None else type(nested).__name__
        raise CheckpointError(
            f"config.json: model_type {outer!r} needs text_config, a JSON object, not {given}"
        )
    stored = _dtype_field(nested) or _dtype_field(config)
    text = {"model_type": _TEXT_TYPES[outer], **nested} | ({"dtype": stored} if stored else {})
    inner = _checked_type(text, "text_config of config.json")
    if inner not in ARCHITECTURES:
        raise _unknown_type("text_config of config.json", inner, ARCHITECTURES)
    return text


def _checked_type(config: Mapping[str, Any], where: str) -> str:
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{where} holds {type(config).__name__}, not a JSON object")
    name = config.get("model_type")
    if name is None:
        raise CheckpointError(f"{where} has no model_type: not a language model")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise _unknown_type(where, name, MODEL_TYPES)
    return name


def _unknown_type(
    where: str, name: object, known: "Mapping[str, Any] | tuple[str, ...]"
) -> Exception:
    return CheckpointError(
        f"{where}: model_type {name!r} is not supported: it takes {', '.join(known)}"
        f"{did_you_mean(str(name), known)}"
    )


# ---------------------------------------------------------------- problems


def layer_problems(
    config: Mapping[str, Any],
    quant_config: "QuantizationConfig | None",
    *,
    dtype: str,
    kv_format: str,
    tp: int = 1,
    ep: int = 1,
    moe_layout: str = "standard",
) -> list[tuple[str, Problem]]:
    """(layer name, problem) of everything that one rank asks the selector, in the engine's order.

    config: config.json as read. dtype: of activations (`bf16` or `bfloat16`); weights that are
    not quantised are kept as the config says they are stored, unless that is wider. kv_format:
    element type of the KV cache. tp: tensor-parallel ranks. ep: expert-parallel ranks; with more
    than one, experts are dealt out whole and tp does not cut them. moe_layout: see MoEProblem.

    CheckpointError where the config is wrong, ConfigError where a size does not divide by the
    ranks or an argument is not known; both name the field.
    """
    text = text_config(config)
    for name, ranks in (("tp", tp), ("ep", ep)):
        if type(ranks) is not int or not 1 <= ranks <= _MAX_RANKS:
            raise ConfigError(f"{name} = {ranks!r}: it takes a whole number from 1 to {_MAX_RANKS}")
    dtype = _known("dtype", _SHORT_NAMES.get(dtype, dtype), tuple(_ITEM_SIZES))
    kv_format = _known("kv_format", _SHORT_NAMES.get(kv_format, kv_format), _CACHE_FORMATS)
    moe_layout = _known("moe_layout", moe_layout, MOE_LAYOUTS)
    architecture = ARCHITECTURES[text["model_type"]]
    fields = Fields({**architecture.defaults, **text}, tp, ep)
    rank = _Rank(tp, ep, dtype, _weight_dtype(text, dtype), kv_format, moe_layout, quant_config)
    found: list[tuple[str, Problem]] = []
    for layer in range(fields.size("num_hidden_layers", MAX_LAYERS)):
        prefix = f"model.layers.{layer}."
        for part in (architecture.attention, architecture.feed_forward):
            for item in part(fields, layer):
                found += rank.problems(prefix, item)
    # The last rank's rows of the vocabulary may be fewer; every rank computes as many.
    vocabulary = -(-fields.size("vocab_size") // tp)
    head = plain("lm_head", vocabulary, fields.size("hidden_size"), "rows")
    return found + list(rank.problems("", head))


@dataclass(frozen=True, slots=True)
class _Rank:
    """What all layers of one rank share."""

    tp: int
    ep: int
    dtype: str
    weight_dtype: str
    kv_format: str
    moe_layout: str
    quant_config: "QuantizationConfig | None"

    def problems(self, prefix: str, item: Item) -> Iterator[tuple[str, Problem]]:
        name = prefix + item.name
        if isinstance(item, Dense):
            yield name, self._linear(name, item)
        elif isinstance(item, Experts):
            yield name, self._moe(name, item)
        else:
            kv_heads, head_dim = item.num_kv_heads, item.head_dim
            yield (
                name,
                AttentionProblem(
                    item.num_heads,
                    kv_heads,
                    head_dim,
                    self.kv_format,
                    self.dtype,
                    item.sliding_window,
                ),
            )
            yield name, KVQuantProblem(kv_heads, head_dim, self.kv_format, self.dtype)

    def _linear(self, name: str, item: Dense) -> LinearProblem:
        parent = name[: name.rfind(".") + 1]
        names = tuple(dict.fromkeys(parent + part for part, _ in item.parts))
        weight, act = self._format(names if item.may_quantize else ())
        rows = _shard_rows(item, self.tp)
        return LinearProblem(
            n=sum(rows),
            k=item.columns,
            weight=weight,
            act=act,
            dtype=self.dtype,
            bias=item.bias,
            parts=rows if len(rows) > 1 else (),
            cut_n=self.tp if item.cut == "rows" else 1,
            cut_k=self.tp if item.cut == "columns" else 1,
            comes_quantised=comes_quantised(name),
        )

    def _moe(self, name: str, item: Experts) -> MoEProblem:
        # One format serves all experts of a layer, so the first one speaks for them.
        parts = ("gate_proj", "up_proj", "down_proj")
        weight, act = self._format(tuple(f"{name}.0.{part}" for part in parts))
        return MoEProblem(
            num_experts=item.num_experts,
            top_k=item.top_k,
            hidden=item.hidden,
            intermediate=item.intermediate,
            weight=weight,
            act=act,
            dtype=self.dtype,
            layout=self.moe_layout,
            cut=self.tp if self.ep == 1 else 1,
            cut_experts=self.ep,
        )

    def _format(self, names: tuple[str, ...]) -> "LayerFormat":
        """Of a layer made of the checkpoint weights `names`; () for one never quantised."""
        found = self.quant_config.layer_format(names) if self.quant_config and names else None
        return found or (WeightFormat(self.weight_dtype), (ActScheme.NONE,))


def _shard_rows(item: Dense, tp: int) -> tuple[int, ...]:
    """Rows of each piece that has scale blocks of its own: on a single rank, checkpoint weights."""
    if tp > 1 and item.cut == "rows":
        return tuple(rows for _, rows in item.parts)
    by_name: dict[str, int] = {}
    for name, rows in item.parts:
        by_name[name] = by_name.get(name, 0) + rows
    return tuple(by_name.values())


def _weight_dtype(text: Mapping[str, Any], dtype: str) -> str:
    """Of weights that are not quantised: as stored, unless activations are narrower."""
    stored = _SHORT_NAMES.get(str(_dtype_field(text)).removeprefix("torch."))
    return stored if stored and _ITEM_SIZES[stored] <= _ITEM_SIZES[dtype] else dtype


def _dtype_field(config: Mapping[str, Any]) -> Any:
    """`torch_dtype` is how transformers before version 5 wrote it."""
    return config.get("dtype") or config.get("torch_dtype")


def _known(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(
            f"{name} {value!r} is unknown: it takes {', '.join(known)}{did_you_mean(value, known)}"
        )
    return value
