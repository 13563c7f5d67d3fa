"""AMD Quark checkpoints: MXFP4 and FP8, by layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.errors import CheckpointError
from vllm.formats import fp8_channel, fp8_tensor, mxfp4
from vllm.formats.act_scheme import ActScheme
from vllm.formats.readers.base import QuantizationConfig, StoredLayer, merged
from vllm.formats.readers.layer_names import LayerNames, layers_listed, tell_experts_apart
from vllm.formats.weight_format import WeightFormat

_MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": mxfp4.GROUP,
    "scale_format": "e8m0",
    "is_dynamic": False,
}
_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
_FP8_ROWS = _FP8 | {"qscheme": "per_channel"}  # of a weight its rows, of inputs the tokens
# By the weight its format, and by the inputs that go with it their activation schemes.
_SCHEMES: tuple[tuple[dict[str, Any], str, tuple[tuple[dict[str, Any], ActScheme], ...]], ...] = (
    (
        _MXFP4,
        mxfp4.FORMAT.kind,
        # Multiplied as they are.
        (
            (_MXFP4 | {"is_dynamic": True}, ActScheme.NONE),
            (_FP8, ActScheme.NONE),
            (_FP8 | {"is_dynamic": True}, ActScheme.NONE),
        ),
    ),
    (
        _FP8,
        fp8_tensor.FORMAT.kind,
        (
            (_FP8, ActScheme.STATIC_TENSOR),
            (_FP8 | {"is_dynamic": True}, ActScheme.DYNAMIC_TENSOR),
        ),
    ),
    (
        _FP8_ROWS,
        fp8_channel.FORMAT.kind,
        ((_FP8_ROWS | {"is_dynamic": True}, ActScheme.DYNAMIC_TOKEN),),
    ),
)
_TAKEN = (
    "it takes weights in MXFP4 (dtype fp4, qscheme per_group, group_size 32, scale_format e8m0) "
    "with inputs in MXFP4 (is_dynamic true), in fp8_e4m3 per_tensor, or not quantised; in fp8_e4m3 "
    "per_tensor with inputs alike; in fp8_e4m3 per_channel with inputs alike (is_dynamic true); "
    "weights of is_dynamic false, and no output_tensors and bias but those of export.kv_cache_group"
)
_FORMAT = "real_quantized"
_CACHE_SCALE = ".output_scale"


class QuarkConfig(QuantizationConfig):
    """layers: patterns of names and how such layers are stored; the first that matches counts, and
    the scheme of all others is last. exclude: layers that are not quantised.

    Activations that meet weights in MXFP4 are multiplied as they are, also where the checkpoint
    lets them be quantised; their scales are not read.
    """

    name = "quark"
    is_checkpoint_quantized = True

    def __init__(
        self, layers: Sequence[tuple[str, StoredLayer]], others: StoredLayer | None,
        exclude: Sequence[str] = (),
    ):  # fmt: skip
        self._layers = [(LayerNames([pattern]), stored) for pattern, stored in layers]
        self._others = others
        self._excluded = LayerNames(exclude)
        self.tells_experts_apart = tell_experts_apart(exclude, [pattern for pattern, _ in layers])

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "QuarkConfig":
        export = config.get("export")
        export = export if isinstance(export, Mapping) else {}
        if (stored := export.get("weight_format", _FORMAT)) != _FORMAT:
            raise CheckpointError(
                f"Quark weight_format {stored!r} is not supported: it takes {_FORMAT}"
            )
        if config.get("layer_type_quant_config"):
            raise CheckpointError(
                "Quark layer_type_quant_config is not supported: it takes global_quant_config, and "
                "layer_quant_config by names of layers"
            )
        named = config.get("layer_quant_config") or {}
        if not isinstance(named, Mapping):
            raise CheckpointError(f"Quark layer_quant_config = {named!r}: it takes a JSON object")
        cached = layers_listed(export, "kv_cache_group")
        layers = [
            (pattern, _scheme(f"layer_quant_config of {pattern}", scheme, pattern in cached))
            for pattern, scheme in named.items()
        ]
        everything = config.get("global_quant_config")
        others = None
        if everything is not None or not layers:
            others = _scheme("global_quant_config", everything)
        return cls(layers, others, layers_listed(config, "exclude"))

    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        if self._excluded.covers(names):
            return None
        return merged(names, [self._stored(name) for name in names])

    def _stored(self, name: str) -> StoredLayer | None:
        matches = (stored for layers, stored in self._layers if name in layers)
        return next(matches, self._others)

    def slot_name(self, name: str) -> str | None:
        """Scales of outputs of k_proj and v_proj are those of the KV cache. Scales of inputs that
        are not quantised are not needed."""
        layer, _, last = name.rpartition(".")
        if name.endswith(_CACHE_SCALE):
            part = layer.rpartition(".")[2]
            if part not in ("k_proj", "v_proj"):
                return None
            return super().slot_name(f"{layer}.{part[0]}_scale")
        if last == "input_scale":
            stored = self._stored(layer)
            if stored is not None and not stored.has_input_scale:
                return None
        return super().slot_name(name)


def _scheme(where: str, scheme: Any, is_cached: bool = False) -> StoredLayer:
    """CheckpointError for one that is not known. is_cached: its outputs go to the KV cache."""
    fields = scheme if isinstance(scheme, Mapping) else {}
    outputs, inputs = fields.get("output_tensors"), fields.get("input_tensors")
    has_others = fields.get("bias") or (outputs and not (is_cached and _is(outputs, _FP8)))
    for weight, kind, pairs in () if has_others else _SCHEMES:
        if not _is(fields.get("weight"), weight):
            continue
        if inputs is None:
            return StoredLayer(WeightFormat.of(kind), (ActScheme.NONE,))
        for wanted, act in pairs:
            if _is(inputs, wanted):
                return StoredLayer(
                    WeightFormat.of(kind), tuple(dict.fromkeys((act, ActScheme.NONE)))
                )
    raise CheckpointError(f"Quark {where} {str(scheme)[:300]} is not supported: {_TAKEN}")


def _is(given: Any, wanted: Mapping[str, Any]) -> bool:
    """Fields that a config leaves out have the values wanted, but for the type of numbers."""
    return (
        isinstance(given, Mapping)
        and given.get("dtype") == wanted["dtype"]
        and all(given.get(field, value) == value for field, value in wanted.items())
    )
