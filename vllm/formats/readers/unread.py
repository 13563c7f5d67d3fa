"""`quantization_config`s that the engine refuses, as far as `vllm kernels explain` can tell."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.formats.readers.layer_names import LayerNames

_LISTS = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "exclude",
          "llm_int8_skip_modules")  # fmt: skip


class UnreadConfig:
    """What is quantised, though not how.

    format: what the config calls it. why: what the reader said, or that there is none.
    """

    def __init__(self, stored: Mapping[str, Any], why: str):
        fields = stored.get("quantization")
        fields = fields if isinstance(fields, Mapping) else stored
        names = (fields.get(name) for name in ("quant_algo", "format", "quant_method"))
        self.format = next((str(name) for name in names if name), "an unnamed format")
        self.why = why
        listed = (fields.get(name) for name in _LISTS)
        lists = (entries for entries in listed if isinstance(entries, list | tuple))
        self._ignored = LayerNames(["lm_head", *(entry for entries in lists for entry in entries)])

    def is_quantised(self, names: Sequence[str]) -> bool:
        """Whether any of a layer's weights is."""
        return any(name not in self._ignored for name in names)
