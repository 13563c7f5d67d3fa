"""GPTQ checkpoints (AutoGPTQ, GPTQModel): int4 and int8 weights in groups of columns."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.errors import CheckpointError
from vllm.formats import int4, int8
from vllm.formats.act_scheme import ActScheme
from vllm.formats.description import INTEGER_GROUPS
from vllm.formats.readers.base import QuantizationConfig, StoredLayer, TensorNames
from vllm.formats.readers.layer_names import LayerNames, layers_listed, tell_experts_apart
from vllm.formats.weight_format import WeightFormat
from vllm.utils.dataclasses import dataclass

WHOLE_ROW = -1
"""Of group_size: one scale for each row."""
_BITS = {4: (int4.FORMAT, int4.CHANNEL), 8: (int8.GROUP, int8.CHANNEL)}
_GROUP_SIZES = (*INTEGER_GROUPS, WHOLE_ROW)
# Values of checkpoint_format and `TensorNames.packing`: zero points are stored less 1, or whole.
_PACKINGS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class _Scheme:
    """How one layer is quantised: fields of quantization_config, which `dynamic` may override."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any], place: str) -> "_Scheme":
        """place: of the fields, for messages."""
        accepted: dict[str, tuple[Any, ...]] = {
            "bits": tuple(_BITS),
            "group_size": _GROUP_SIZES,
            "sym": (True, False),
            "desc_act": (True, False),
        }
        for field, values in accepted.items():
            given = fields.get(field)
            if given not in values or type(given) is not type(values[0]):
                raise CheckpointError(
                    f"GPTQ {field} {given!r}{place} is not supported: it takes "
                    f"{', '.join(map(str, values))}"
                )
        return cls(*(fields[field] for field in accepted))


_DEFAULTS = {"group_size": 128, "sym": True, "desc_act": False}


class GptqConfig(QuantizationConfig):
    """scheme: of every layer that `dynamic` says nothing else of. dynamic: patterns of layer names
    in their order, the first that matches counts; None for layers that are not quantised.
    packing: how zero points are stored. only: the layers that are quantised, None for all.
    has_static_groups: columns are in their own order, whatever desc_act says."""

    name = "gptq"
    is_checkpoint_quantized = True

    def __init__(
        self,
        scheme: _Scheme,
        dynamic: Sequence[tuple["re.Pattern[str]", _Scheme | None]] = (),
        ignored: Sequence[str] = (),
        only: Sequence[str] | None = None,
        packing: str = "gptq",
        has_static_groups: bool = False,
    ):
        self.scheme, self.dynamic, self.packing = scheme, tuple(dynamic), packing
        self.has_static_groups = has_static_groups
        self._ignored = LayerNames(ignored)
        self._only = None if only is None else LayerNames(only)
        self.tells_experts_apart = bool(dynamic) or tell_experts_apart(ignored, only or ())

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "GptqConfig":
        stored = config.get("checkpoint_format") or config.get("format") or "gptq"
        if str(stored) not in _PACKINGS:
            raise CheckpointError(
                f"GPTQ checkpoint_format {stored!r} is not supported: it takes "
                f"{', '.join(_PACKINGS)}"
            )
        if config.get("pack_dtype", "int32") != "int32":
            raise CheckpointError(
                f"GPTQ pack_dtype {config['pack_dtype']!r} is not supported: it takes int32"
            )
        fields = _DEFAULTS | {key: value for key, value in config.items() if value is not None}
        ignored = layers_listed(config, "modules_to_not_convert")
        if config.get("lm_head") is not True:
            ignored = ["lm_head", *ignored]
        meta = config.get("meta")
        places = (config, meta if isinstance(meta, Mapping) else {})
        return cls(
            _Scheme.of(fields, ""),
            _dynamic(config.get("dynamic"), fields),
            ignored,
            _only(config),
            str(stored),
            any(place.get("static_groups") is True for place in places),
        )

    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        if self._ignored.covers(names):
            return None
        schemes = {self._scheme_of(name) for name in names}
        if len(schemes) > 1:
            raise CheckpointError(
                f"{', '.join(names)} are computed as one layer, but quantization_config quantises "
                f"them differently (dynamic, modules_in_block_to_quantize)"
            )
        scheme = schemes.pop()
        return None if scheme is None else self._stored(scheme, names)

    def _scheme_of(self, name: str) -> _Scheme | None:
        if self._only is not None and name not in self._only:
            return None
        found = (scheme for pattern, scheme in self.dynamic if pattern.match(name))
        return next(found, self.scheme)

    def _stored(self, scheme: _Scheme, names: Sequence[str]) -> StoredLayer:
        in_groups, in_rows = _BITS[scheme.bits]
        has_groups = scheme.group_size != WHOLE_ROW
        weight = WeightFormat.of(in_rows.kind)
        if has_groups:
            weight = WeightFormat.of(in_groups.kind, (1, scheme.group_size))
        # Without groups the order of columns does not matter.
        is_reordered = scheme.desc_act and has_groups and not self.has_static_groups
        if is_reordered and any(".experts." in name for name in names):
            raise CheckpointError(
                f"{names[0]}: experts whose columns are in activation order (desc_act true) are "
                f"not supported; take a checkpoint with desc_act false, or with static_groups"
            )
        stored = TensorNames("qweight", "scales", zero_point="qzeros", packing=self.packing)
        return StoredLayer(
            weight,
            (ActScheme.NONE,),
            stored,
            len(names),
            has_zero_points=not scheme.sym,
            is_reordered=is_reordered,
        )


def _dynamic(
    given: Any, fields: Mapping[str, Any]
) -> list[tuple["re.Pattern[str]", _Scheme | None]]:
    """`-:` and a regular expression leaves layers out; `+:`, or none, overrides fields of them."""
    if not given:
        return []
    if not isinstance(given, Mapping):
        raise CheckpointError(
            f"GPTQ dynamic {given!r}: it takes patterns of layer names, each with fields"
        )
    found: list[tuple[re.Pattern[str], _Scheme | None]] = []
    for key, changes in given.items():
        try:
            pattern = re.compile(key.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise CheckpointError(f"GPTQ dynamic {key!r}: {error}") from error
        if key.startswith("-:"):
            found.append((pattern, None))
            continue
        if not isinstance(changes, Mapping):
            raise CheckpointError(f"GPTQ dynamic {key!r} has {changes!r}: it takes fields")
        found.append((pattern, _Scheme.of({**fields, **changes}, f" of dynamic {key!r}")))
    return found


def _only(config: Mapping[str, Any]) -> list[str] | None:
    """modules_in_block_to_quantize: lists of names, each list what was quantised together."""
    listed: list[str] = []
    for entry in layers_listed(config, "modules_in_block_to_quantize"):
        listed += entry if isinstance(entry, list | tuple) else [entry]
    return listed or None
