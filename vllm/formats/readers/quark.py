"""AMD Quark checkpoints whose weights are MXFP4."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.errors import CheckpointError
from vllm.formats import mxfp4
from vllm.formats.readers.base import QuantizationConfig, StoredLayer
from vllm.formats.readers.layer_names import LayerNames, layers_listed, tell_experts_apart
from vllm.formats.weight_format import WeightFormat

_WEIGHT = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": mxfp4.GROUP,
    "scale_format": "e8m0",
    "is_dynamic": False,
}
_FORMAT = "real_quantized"


class QuarkConfig(QuantizationConfig):
    """exclude: layers that are not quantised. Activations are multiplied as they are, also where
    the checkpoint lets them be quantised to MXFP4."""

    name = "quark"
    is_checkpoint_quantized = True

    def __init__(self, exclude: Sequence[str] = ()):
        self._excluded = LayerNames(exclude)
        self.tells_experts_apart = tell_experts_apart(exclude)

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "QuarkConfig":
        export = config.get("export")
        stored = export.get("weight_format", _FORMAT) if isinstance(export, Mapping) else _FORMAT
        if stored != _FORMAT:
            raise CheckpointError(
                f"Quark weight_format {stored!r} is not supported: it takes {_FORMAT}"
            )
        for field in ("layer_quant_config", "layer_type_quant_config"):
            if config.get(field):
                raise CheckpointError(
                    f"Quark {field} is not supported: it takes one global_quant_config for all "
                    f"layers but those of exclude"
                )
        _check_scheme(config.get("global_quant_config"))
        return cls(layers_listed(config, "exclude"))

    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        if self._excluded.covers(names):
            return None
        return StoredLayer(
            WeightFormat.of(mxfp4.FORMAT.kind), mxfp4.FORMAT.act, num_weights=len(names)
        )


def _check_scheme(scheme: Any) -> None:
    """CheckpointError for one that is not MXFP4 with activations in MXFP4 or not quantised."""
    fields = scheme if isinstance(scheme, Mapping) else {}
    is_known = _is(fields.get("weight"), _WEIGHT)
    inputs = fields.get("input_tensors")
    is_known = is_known and (inputs is None or _is(inputs, _WEIGHT | {"is_dynamic": True}))
    if not is_known or fields.get("output_tensors") or fields.get("bias"):
        raise CheckpointError(
            f"Quark global_quant_config {str(scheme)[:300]} is not supported: it takes a weight of "
            f"{_WEIGHT}, input_tensors alike and dynamic, or none, and no others"
        )


def _is(given: Any, wanted: Mapping[str, Any]) -> bool:
    """Fields that a config leaves out have the values wanted, but for the type of numbers."""
    return (
        isinstance(given, Mapping)
        and given.get("dtype") == wanted["dtype"]
        and all(given.get(field, value) == value for field, value in wanted.items())
    )
