"""compressed-tensors checkpoints (llm-compressor): NVFP4, FP8 and int4, layer by layer.

No torch here: the configuration, and with it every kernel choice, resolves without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.errors import CheckpointError
from vllm.formats.weight_format import ActScheme, WeightFormat
from vllm.model_executor.layers.quantization import (
    LayerFormat,
    LayerNames,
    QuantizationConfig,
    has_fp8_cache_scales,
    layers_listed,
)
from vllm.model_executor.layers.quantization.awq import GROUP_SIZES

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearMethod

_FORMATS = ("nvfp4-pack-quantized", "float-quantized", "pack-quantized")
_NVFP4_GROUP = 16
_DYNAMIC_GROUP = 128


@dataclass(frozen=True, slots=True)
class Scheme:
    """How each weight of one group of layers is stored, before any are merged.

    has_zero_points: of int4 weights. act: as in LinearProblem.
    """

    weight: WeightFormat
    act: tuple[ActScheme, ...]
    has_zero_points: bool = False

    @property
    def is_static(self) -> bool:
        return ActScheme.STATIC_TENSOR in self.act


class CompressedTensorsConfig(QuantizationConfig):
    """groups: (name, layers by name or None for every linear layer, scheme). ignore: layers that
    are not quantised. A group that names a layer wins over one for all linear layers."""

    name = "compressed-tensors"
    is_checkpoint_quantized = True

    def __init__(
        self, groups: Sequence[tuple[str, LayerNames | None, Scheme]], ignore: Sequence[str] = ()
    ):
        self.groups = tuple(groups)
        self._ignored = LayerNames(ignore)
        self.can_use_deep_gemm = any(s.weight.kind == "fp8-block" for _, _, s in self.groups)

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
            (name, *_parse_group(name, group, config.get("format")))
            for name, group in groups.items()
        ]
        made = cls(found, layers_listed(config, "ignore"))
        made.has_cache_scales = has_fp8_cache_scales(cache_scheme)
        return made

    def scheme(self, names: Sequence[str]) -> Scheme | None:
        """Of one layer made of the checkpoint weights `names`; None for one not quantised."""
        if self._ignored.covers(names):
            return None
        schemes = {self._scheme_of(name) for name in names}
        if len(schemes) > 1:
            raise CheckpointError(
                f"{', '.join(names)} are computed as one layer, but config_groups quantises them "
                f"differently: give them one group"
            )
        return schemes.pop()

    def _scheme_of(self, name: str) -> Scheme | None:
        by_name = [group for group in self.groups if group[1] is not None and name in group[1]]
        matches = by_name or [group for group in self.groups if group[1] is None]
        if len(matches) > 1:
            raise CheckpointError(
                f"{name} is quantised twice, by config_groups "
                f"{' and '.join(group for group, _, _ in matches)}: a layer belongs to one"
            )
        return matches[0][2] if matches else None

    def layer_format(self, names: Sequence[str]) -> LayerFormat | None:
        scheme = self.scheme(names)
        if scheme is None:
            return None
        # Shards keep their own scales when merged: re-scaling to a common one would lose bits.
        if scheme.weight.kind == "fp8-tensor" and len(names) > 1:
            return WeightFormat("fp8", "channel"), scheme.act
        return scheme.weight, scheme.act

    def linear_method(self, names: Sequence[str]) -> "LinearMethod | None":
        from vllm.model_executor.layers.quantization.fp8_channel import fp8_linear_method
        from vllm.model_executor.layers.quantization.int4 import Int4LinearMethod
        from vllm.model_executor.layers.quantization.nvfp4 import (
            COMPRESSED_TENSORS,
            Nvfp4LinearMethod,
        )

        scheme, found = self.scheme(names), self.layer_format(names)
        if scheme is None or found is None:
            return None
        if scheme.weight.element == "nvfp4":
            return Nvfp4LinearMethod(COMPRESSED_TENSORS, scheme.act)
        if scheme.weight.element == "int4":
            return Int4LinearMethod(scheme.weight.block[1], scheme.has_zero_points, scheme.act)
        return fp8_linear_method(scheme.weight, scheme.is_static, found)

    def slot_name(self, name: str) -> str | None:
        # The shape of a packed weight is what config.json implies.
        return None if name.endswith(".weight_shape") else super().slot_name(name)


# ---------------------------------------------------------------- config_groups


def _parse_group(name: str, group: Any, default_format: Any) -> tuple[LayerNames | None, Scheme]:
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
    layers = None if "Linear" in targets else LayerNames(targets)
    parse = {"pack-quantized": _int4, "float-quantized": _fp8}.get(stored, _nvfp4)
    inputs = group.get("input_activations")
    is_known = inputs is None or isinstance(inputs, dict)
    scheme = parse(group["weights"], inputs) if is_known else None
    if scheme is None or group.get("output_activations"):
        raise CheckpointError(
            f"compressed-tensors scheme of config_groups.{name} is not supported: {stored} with "
            f"weights {_short(group['weights'])}, input_activations "
            f"{_short(group.get('input_activations'))}, output_activations "
            f"{_short(group.get('output_activations'))}; it takes NVFP4, FP8 with static weight "
            f"scales per tensor, channel or block, and int4 in groups of "
            f"{', '.join(map(str, GROUP_SIZES))} columns with activations in FP8 per token or not "
            f"quantised"
        )
    return layers, scheme


_Args = Mapping[str, Any]


def _is(args: _Args, num_bits: int, kind: str) -> bool:
    return args.get("num_bits") == num_bits and args.get("type") == kind


def _nvfp4(weights: _Args, inputs: _Args | None) -> Scheme | None:
    def is_fp4(args: _Args) -> bool:
        is_group = args.get("strategy") in ("tensor_group", "group")
        return _is(args, 4, "float") and is_group and args.get("group_size") == _NVFP4_GROUP

    if not is_fp4(weights) or weights.get("dynamic"):
        return None
    if inputs is None:
        return Scheme(WeightFormat("nvfp4"), (ActScheme.NONE,))
    # "local": scales of groups are computed, the global one is in the checkpoint.
    if not is_fp4(inputs) or inputs.get("dynamic") != "local":
        return None
    return Scheme(WeightFormat("nvfp4"), (ActScheme.NVFP4_GROUP16, ActScheme.NONE))


def _fp8(weights: _Args, inputs: _Args | None) -> Scheme | None:
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    is_plain = weights.get("symmetric", True) and not weights.get("dynamic")
    if not _is(weights, 8, "float") or not is_plain:
        return None
    if strategy == "block":
        is_block = isinstance(block, list) and len(block) == 2
        if not is_block or not all(isinstance(b, int) and 0 < b <= 1 << 16 for b in block):
            return None
        weight = WeightFormat("fp8", "block", (block[0], block[1]))
    elif strategy in ("tensor", "channel"):
        weight = WeightFormat("fp8", strategy)
    else:
        return None
    if inputs is None:
        return Scheme(weight, (ActScheme.NONE,))
    if not _is(inputs, 8, "float") or not inputs.get("symmetric", True):
        return None
    quantised = _fp8_inputs(weight, inputs)
    return Scheme(weight, (*quantised, ActScheme.NONE)) if quantised else None


def _fp8_inputs(weight: WeightFormat, inputs: _Args) -> tuple[ActScheme, ...]:
    strategy, group = inputs.get("strategy"), inputs.get("group_size")
    if weight.scale == "block":
        is_group = strategy == "group" and group == _DYNAMIC_GROUP and inputs.get("dynamic")
        return (ActScheme.DYNAMIC_GROUP128,) if is_group else ()
    if not inputs.get("dynamic"):
        return (ActScheme.STATIC_TENSOR,) if strategy == "tensor" else ()
    return {
        "token": (ActScheme.DYNAMIC_TOKEN,),
        "tensor": (ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR),
    }.get(str(strategy), ())


def _int4(weights: _Args, inputs: _Args | None) -> Scheme | None:
    group, order = weights.get("group_size"), weights.get("actorder")
    is_grouped = weights.get("strategy") == "group" and group in GROUP_SIZES
    # Activation order within groups only: others shuffle the columns.
    is_ordered = order in (None, False, "weight", "static")
    is_static = not weights.get("dynamic")
    if not (_is(weights, 4, "int") and is_grouped and is_ordered and is_static):
        return None
    if inputs is not None and not _is_fp8_token(inputs):
        return None
    act = (ActScheme.NONE,) if inputs is None else (ActScheme.DYNAMIC_TOKEN, ActScheme.NONE)
    weight = WeightFormat("int4", "group", (1, int(group)))
    return Scheme(weight, act, not weights.get("symmetric", True))


def _is_fp8_token(inputs: _Args) -> bool:
    is_token = inputs.get("strategy") == "token" and bool(inputs.get("dynamic"))
    return _is(inputs, 8, "float") and is_token and bool(inputs.get("symmetric", True))


def _short(args: object) -> str:
    if not isinstance(args, dict):
        return str(args)
    kept = {key: value for key, value in args.items() if value not in (None, {})}
    return str(kept)[:200]
