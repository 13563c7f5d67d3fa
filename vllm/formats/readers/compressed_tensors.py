"""compressed-tensors checkpoints (llm-compressor): NVFP4, MXFP4, FP8, MXFP8, int8, int4, by
layer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.errors import CheckpointError
from vllm.formats import fp8_block, fp8_channel, fp8_tensor, int4, int8, mxfp4, mxfp8, nvfp4
from vllm.formats.act_scheme import ActScheme
from vllm.formats.description import INTEGER_GROUPS
from vllm.formats.readers.base import QuantizationConfig, StoredLayer, TensorNames, merged
from vllm.formats.readers.cache_scales import has_fp8_cache_scales
from vllm.formats.readers.layer_names import (
    EVERY_LINEAR,
    LayerNames,
    layers_listed,
    tell_experts_apart,
)
from vllm.formats.weight_format import WeightFormat

_FORMATS = (
    "nvfp4-pack-quantized",
    "float-quantized",
    "mxfp8-quantized",
    "int-quantized",
    "pack-quantized",
    "mxfp4-pack-quantized",
)
_DYNAMIC_GROUP = 128
_FP8 = {"tensor": fp8_tensor.FORMAT, "channel": fp8_channel.FORMAT}
# By the strategy of scales, and whether they are computed when inputs are there.
_FP8_INPUTS = {
    ("tensor", False): (ActScheme.STATIC_TENSOR,),
    ("token", True): (ActScheme.DYNAMIC_TOKEN,),
    ("tensor", True): (ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR),
}
_INT8_INPUTS = {
    ("token", True): ActScheme.DYNAMIC_TOKEN_INT8,
    ("tensor", False): ActScheme.STATIC_TENSOR_INT8,
}
_NVFP4_NAMES = TensorNames(
    "weight_packed",
    input_scale="input_global_scale",
    global_scale="weight_global_scale",
    is_divisor=True,
)
_MXFP4_NAMES = TensorNames("weight_packed")
_INT4_NAMES = TensorNames("weight_packed", zero_point="weight_zero_point", packing="int32")


class Target(NamedTuple):
    """What an entry of a group's `targets` says. text: as given. group: its name."""

    text: str
    group: str
    scheme: StoredLayer

    @property
    def order(self) -> tuple[int, str]:
        """Names come before regular expressions, and these before classes; of two alike the one
        that sorts first. So does the library of the format (0.20)."""
        is_regex, is_class = self.text.startswith("re:"), self.text == EVERY_LINEAR
        return 2 * is_class + is_regex, self.text


class CompressedTensorsConfig(QuantizationConfig):
    """targets: of all groups; the first that matches a layer in `Target.order` says how it is
    stored. ignore: layers that are not quantised."""

    name = "compressed-tensors"
    is_checkpoint_quantized = True

    def __init__(
        self,
        targets: Sequence[Target],
        ignore: Sequence[str] = (),
    ):
        self.targets = tuple(sorted(targets, key=lambda target: target.order))
        self._layers = [
            None if target.text == EVERY_LINEAR else LayerNames([target.text])
            for target in self.targets
        ]
        self._ignored = LayerNames(ignore)
        texts = [target.text for target in self.targets]
        self.quantized_layers = tuple(text for text in texts if text != EVERY_LINEAR)
        self.tells_experts_apart = tell_experts_apart(texts, ignore)
        self.can_use_deep_gemm = any(
            target.scheme.weight.kind == fp8_block.FORMAT.kind for target in self.targets
        )

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "CompressedTensorsConfig":
        status = config.get("quantization_status", "compressed")
        if status != "compressed":
            raise CheckpointError(
                f"compressed-tensors quantization_status {status!r} is not supported: it takes "
                f"compressed; save the model compressed"
            )
        sparsity = config.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise CheckpointError(
                f"compressed-tensors sparsity_config {sparsity!r} is not supported: it takes "
                f"dense weights"
            )
        cache_scheme = config.get("kv_cache_scheme")
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not (groups or cache_scheme):
            raise CheckpointError("compressed-tensors config_groups is missing or empty")
        found = [
            target
            for name, group in groups.items()
            for target in _parse_group(name, group, config.get("format"))
        ]
        _check_once(found)
        made = cls(found, layers_listed(config, "ignore"))
        made.has_cache_scales = has_fp8_cache_scales(cache_scheme)
        return made

    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        return merged(names, [self._stored(name) for name in names])

    def _stored(self, name: str) -> StoredLayer | None:
        if name in self._ignored:
            return None
        matches = (
            target.scheme
            for target, layers in zip(self.targets, self._layers)
            if layers is None or name in layers
        )
        return next(matches, None)

    def slot_name(self, name: str) -> str | None:
        # The shape of a packed weight is what config.json implies.
        return None if name.endswith(".weight_shape") else super().slot_name(name)


# ---------------------------------------------------------------- config_groups


def _check_once(targets: Sequence[Target]) -> None:
    """CheckpointError for an entry that groups with different schemes have."""
    seen: dict[str, Target] = {}
    for target in targets:
        first = seen.setdefault(target.text, target)
        if first.scheme != target.scheme:
            raise CheckpointError(
                f"{target.text} is quantised twice, by config_groups {first.group} and "
                f"{target.group}: a layer belongs to one"
            )


def _parse_group(name: str, group: Any, default_format: Any) -> list[Target]:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise CheckpointError(
            f"compressed-tensors config_groups.{name} has no weights: an object is needed"
        )
    stored = group.get("format") or default_format
    if stored not in _FORMATS:
        raise CheckpointError(
            f"compressed-tensors format {stored!r} of config_groups.{name} is not supported: it "
            f"takes {', '.join(_FORMATS)}"
        )
    targets = layers_listed(group, "targets")
    if not targets:
        raise CheckpointError(
            f"compressed-tensors config_groups.{name} has no targets: it takes names of layers, "
            f"re: expressions or {EVERY_LINEAR}"
        )
    LayerNames(targets)  # refuses what is no name
    parse = _PARSERS[stored]
    inputs = group.get("input_activations")
    is_known = inputs is None or isinstance(inputs, dict)
    is_static = not group["weights"].get("dynamic")
    scheme = parse(group["weights"], inputs) if is_known and is_static else None
    if scheme is None or group.get("output_activations"):
        raise CheckpointError(
            f"compressed-tensors scheme of config_groups.{name} is not supported: {stored} with "
            f"weights {_short(group['weights'])}, input_activations "
            f"{_short(group.get('input_activations'))}, output_activations "
            f"{_short(group.get('output_activations'))}; it takes NVFP4, FP8 with static weight "
            f"scales per tensor, channel or block, MXFP8, MXFP4, symmetric int8 per channel with "
            f"symmetric activations in int8 (dynamic per token, static per tensor) or not "
            f"quantised, symmetric int8 in groups with activations not quantised, and int4 in "
            f"groups with activations in FP8 per token or not quantised; groups are of "
            f"{', '.join(map(str, INTEGER_GROUPS))} columns"
        )
    return [Target(text, name, scheme) for text in targets]


_Args = Mapping[str, Any]


def _is(args: _Args, num_bits: int, kind: str, *strategies: str) -> bool:
    is_type = args.get("num_bits") == num_bits and args.get("type") == kind
    return is_type and args.get("strategy") in strategies


def _is_symmetric(args: _Args, num_bits: int, kind: str, *strategies: str) -> bool:
    return _is(args, num_bits, kind, *strategies) and bool(args.get("symmetric", True))


def _nvfp4(weights: _Args, inputs: _Args | None) -> StoredLayer | None:
    def is_fp4(args: _Args) -> bool:
        is_group = _is(args, 4, "float", "tensor_group", "group")
        return is_group and args.get("group_size") == nvfp4.GROUP

    if not is_fp4(weights):
        return None
    weight = WeightFormat.of(nvfp4.FORMAT.kind)
    if inputs is None:
        return StoredLayer(weight, (ActScheme.NONE,), _NVFP4_NAMES)
    # "local": scales of groups are computed, the global one is in the checkpoint.
    is_local = is_fp4(inputs) and inputs.get("dynamic") == "local"
    return StoredLayer(weight, nvfp4.FORMAT.act, _NVFP4_NAMES) if is_local else None


def _fp8(weights: _Args, inputs: _Args | None) -> StoredLayer | None:
    if not _is_symmetric(weights, 8, "float", "block", *_FP8):
        return None
    if weights["strategy"] == "block":
        block = fp8_block.as_block(weights.get("block_structure"))
        if block is None:
            return None
        weight = WeightFormat.of(fp8_block.FORMAT.kind, block)
    else:
        weight = WeightFormat.of(_FP8[weights["strategy"]].kind)
    quantised = () if inputs is None else _fp8_inputs(weight, inputs)
    is_known = inputs is None or bool(quantised)
    return StoredLayer(weight, (*quantised, ActScheme.NONE)) if is_known else None


def _fp8_inputs(weight: WeightFormat, inputs: _Args) -> tuple[ActScheme, ...]:
    """() for those that are not supported."""
    strategy, is_dynamic = str(inputs.get("strategy")), bool(inputs.get("dynamic"))
    if not _is_symmetric(inputs, 8, "float", strategy):
        return ()
    if weight.scale == "block":
        is_group = strategy == "group" and inputs.get("group_size") == _DYNAMIC_GROUP
        return (ActScheme.DYNAMIC_GROUP128,) if is_group and is_dynamic else ()
    return _FP8_INPUTS.get((strategy, is_dynamic), ())


def _int8(weights: _Args, inputs: _Args | None) -> StoredLayer | None:
    group: Any = weights.get("group_size")
    if _is_symmetric(weights, 8, "int", "group") and group in INTEGER_GROUPS and inputs is None:
        return StoredLayer(WeightFormat.of(int8.GROUP.kind, (1, int(group))), (ActScheme.NONE,))
    if not _is_symmetric(weights, 8, "int", "channel"):
        return None
    weight = WeightFormat.of(int8.CHANNEL.kind)
    if inputs is None:
        return StoredLayer(weight, (ActScheme.NONE,))
    strategy = str(inputs.get("strategy"))
    scheme = _INT8_INPUTS.get((strategy, bool(inputs.get("dynamic"))))
    if scheme is None or not _is_symmetric(inputs, 8, "int", strategy):
        return None
    return StoredLayer(weight, (scheme, ActScheme.NONE))


def _mxfp8(weights: _Args, inputs: _Args | None) -> StoredLayer | None:
    def is_mx(args: _Args) -> bool:
        return _is_symmetric(args, 8, "float", "group") and args.get("group_size") == mxfp8.GROUP

    if not is_mx(weights):
        return None
    weight = WeightFormat.of(mxfp8.FORMAT.kind)
    if inputs is None:
        return StoredLayer(weight, (ActScheme.NONE,))
    is_known = is_mx(inputs) and inputs.get("dynamic") is True
    return StoredLayer(weight, mxfp8.FORMAT.act) if is_known else None


def _mxfp4(weights: _Args, inputs: _Args | None) -> StoredLayer | None:
    """Activations that the checkpoint lets be quantised, to MXFP4 or FP8, are left as they are."""

    def is_mx(args: _Args) -> bool:
        return _is_symmetric(args, 4, "float", "group") and args.get("group_size") == mxfp4.GROUP

    def is_dynamic_float(args: _Args) -> bool:
        is_fp8 = _is_symmetric(args, 8, "float", "group", "token")
        return (is_mx(args) or is_fp8) and args.get("dynamic") is True

    if not is_mx(weights) or not (inputs is None or is_dynamic_float(inputs)):
        return None
    return StoredLayer(WeightFormat.of(mxfp4.FORMAT.kind), mxfp4.FORMAT.act, _MXFP4_NAMES)


def _int4(weights: _Args, inputs: _Args | None) -> StoredLayer | None:
    group: Any = weights.get("group_size")
    # Activation order within groups only: others shuffle the columns.
    is_ordered = weights.get("actorder") in (None, False, "weight", "static")
    is_grouped = _is(weights, 4, "int", "group") and group in INTEGER_GROUPS
    if not is_grouped or not is_ordered:
        return None
    weight = WeightFormat.of(int4.FORMAT.kind, (1, int(group)))
    quantised = () if inputs is None else _fp8_inputs(weight, inputs)
    if inputs is not None and quantised != (ActScheme.DYNAMIC_TOKEN,):
        return None
    act = (*quantised, ActScheme.NONE)
    has_zero_points = not weights.get("symmetric", True)
    return StoredLayer(weight, act, _INT4_NAMES, has_zero_points=has_zero_points)


_PARSERS = dict(zip(_FORMATS, (_nvfp4, _fp8, _mxfp8, _int8, _int4, _mxfp4)))


def _short(args: object) -> str:
    if not isinstance(args, dict):
        return str(args)
    kept = {key: value for key, value in args.items() if value not in (None, {})}
    return str(kept)[:200]
