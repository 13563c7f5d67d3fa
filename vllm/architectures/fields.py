"""The fields of a config.json, read with checks."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from vllm.errors import CheckpointError

T = TypeVar("T")
MAX_LAYERS = 1024
CORRECT_FILE = "; correct it or fetch the checkpoint again"
# Upper bounds far above any real model: a config beyond them is corrupt or hostile, and would
# otherwise end in an endless construction or a huge allocation.
_MAX_SIZE = 1 << 22
_LIMITS = {
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": MAX_LAYERS,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 28,
    "num_experts": 4096,
    "num_experts_per_tok": 4096,
    "moe_intermediate_size": 1 << 20,
    "decoder_sparse_step": 1024,
    "shared_expert_intermediate_size": 1 << 20,
    "linear_num_key_heads": 4096,
    "linear_num_value_heads": 4096,
    "linear_key_head_dim": 256,
    "linear_value_head_dim": 256,
    "linear_conv_kernel_dim": 8,
    "mamba_num_heads": 4096,
    "mamba_head_dim": 256,
    "ssm_state_size": 256,
    "n_groups": 4096,
    "conv_kernel": 8,
    "n_routed_experts": 4096,
}
# How many layers of multi-token prediction a checkpoint has, by the names that families give it.
MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers",
              "num_mtp_layers", "mtp_num_layers")  # fmt: skip
ROPE_LISTS = ("short_factor", "long_factor")
ROPE_NUMBERS = ("rope_theta", "factor", "original_max_position_embeddings",
                "partial_rotary_factor", "low_freq_factor", "high_freq_factor")  # fmt: skip
_ROPE_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
                  "llama_4_scaling_beta")  # fmt: skip
# By rope_type the number whose logarithm its formula divides by.
_ROPE_ABOVE_ONE = {"yarn": "rope_theta", "longrope": "original_max_position_embeddings"}


class Fields:
    """given: the text config. defaults: what is assumed of fields that it does not have; sizes that
    kernels' shapes depend on are never assumed. source: of the config, for messages."""

    def __init__(
        self,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        source: str = "config.json",
    ):
        self.given = given
        self._values = {**defaults, **given}
        self.source = source
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives: layers that are alike are one object."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def get(self, name: str) -> Any:
        """The value as it is; None where it is missing or null."""
        return self._values.get(name)

    def size(self, name: str) -> int:
        """A positive whole number, which the config must have."""
        if name not in self.given:
            raise CheckpointError(
                f"{self.source} has no {name}, which the kernels' shapes depend on"
            )
        return self._checked(name, 1)

    def optional(self, name: str, default: int, lowest: int = 1) -> int:
        """The same; what is assumed where the config lacks it, and `default` where that is null."""
        return default if self.get(name) is None else self._checked(name, lowest)

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise CheckpointError(f"{self.source}: {name} = {value!r}: it takes a finite number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value not in (None, True, False):
            raise CheckpointError(f"{self.source}: {name} = {value!r}: it takes true or false")
        return default if value is None else bool(value)

    def allow_only(self, values: Mapping[str, Any]) -> None:
        """CheckpointError for a field that has another value than here; it may be missing or
        null."""
        for name, value in values.items():
            given = self.get(name)
            if given not in (None, value):
                raise CheckpointError(
                    f"{self.source}: {name} = {given!r} is not supported: it takes {value!r}"
                )

    def entries(self, name: str, kind: type) -> list[Any]:
        """A list of `kind`, at most one a layer; empty where it is missing or null."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > MAX_LAYERS:
            raise CheckpointError(f"{self.source}: {name} is not a list of up to {MAX_LAYERS}")
        if wrong := [entry for entry in value if type(entry) is not kind]:
            raise CheckpointError(
                f"{self.source}: {name} holds {wrong[0]!r}: it takes {kind.__name__} entries"
            )
        return value

    def layer_kind(self, layer: int) -> str | None:
        """What layer_types says of this layer; None where there is no such list."""
        kinds, num_layers = self.entries("layer_types", str), self.size("num_hidden_layers")
        if kinds and len(kinds) != num_layers:
            raise CheckpointError(
                f"{self.source}: layer_types has {len(kinds)} entries, but num_hidden_layers = "
                f"{num_layers}"
            )
        return kinds[layer] if kinds else None

    def positive(self, name: str, default: float) -> float:
        """A number above 0; `default` where it is missing or null."""
        value = self.number(name, default)
        if value <= 0 and self.get(name) is not None:
            raise CheckpointError(
                f"{self.source}: {name} = {value!r}: it takes a number above 0, or null"
            )
        return value

    def rope(self, layer_type: str = "") -> dict[str, Any]:
        """rope_parameters, or those of a type of layers; {} where there are none, or of a form
        that is not read here."""
        rope = self.get("rope_parameters")
        if layer_type and isinstance(rope, dict):
            rope = rope.get(layer_type)
        if not isinstance(rope, dict):
            return {}
        for name in ROPE_NUMBERS:
            value = rope.get(name, 1)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise CheckpointError(
                    f"{self.source}: {name} = {value!r} in rope_parameters: it takes a number "
                    f"above 0"
                )
        for name in _ROPE_OPTIONAL:
            value = rope.get(name)
            if value is not None and not (
                type(value) in (int, float) and 0 <= value < float("inf")
            ):
                raise CheckpointError(
                    f"{self.source}: {name} = {value!r} in rope_parameters: it takes a number "
                    f"from 0 on, or null"
                )
        name = _ROPE_ABOVE_ONE.get(str(rope.get("rope_type")), "")
        if rope.get(name, 2) <= 1:
            raise CheckpointError(
                f"{self.source}: {name} = {rope[name]!r} in rope_parameters: under rope_type "
                f"{rope['rope_type']} it takes a number above 1"
            )
        return rope

    def _checked(self, name: str, lowest: int) -> int:
        value, limit = self._values[name], _LIMITS.get(name, _MAX_SIZE)
        if type(value) is not int or not lowest <= value <= limit:
            raise CheckpointError(
                f"{self.source}: {name} = {value!r} is out of range ({lowest} to {limit})"
                f"{CORRECT_FILE}"
            )
        return value
