"""The fields of a config.json that no description is for, by the names that families give them."""

import re
from collections.abc import Mapping
from typing import Any

from vllm.architectures.decoder import GATED
from vllm.architectures.fields import MTP_FIELDS, Fields
from vllm.errors import CheckpointError

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts",
            "num_routed_experts")  # fmt: skip
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts",
          "moe_topk", "moe_top_k", "moe_k", "top_k")  # fmt: skip
EXPERT_SIZES = ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size",
                 "moe_ffn_hidden_size", "intermediate_size")  # fmt: skip
MLP_SIZES = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size",
              "ffn_hidden_size")  # fmt: skip
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_SIZES = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                 "shared_intermediate_size")  # fmt: skip
ACTIVATIONS = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")
_ALIASES = (EXPERTS, TOP_K, EXPERT_SIZES, MLP_SIZES, SHARED, SHARED_SIZES, ACTIVATIONS,
            MTP_FIELDS)  # fmt: skip
# What other fields say too, where a config has both.
_OTHERWISE = ("head_dim", "num_key_value_heads", "num_attention_heads", "layer_types",
              "interleave_moe_layer_step", "full_attention_interval")  # fmt: skip
# Fields that may stand for layers or sizes, and of those the ones that do not.
_STRUCTURE = re.compile("moe|expert|layer|attention|attn|mamba|ssm|conv|head|mlp|window|latent")
_NO_STRUCTURE = re.compile(
    "norm|loss|^use_|index_|^vocab_size_per|coef|eps|drop|init|_act$|router|scal|tuning|dtype|logits"
    "|overlap|cache|mtp_hybrid|mtp_trans|shared_moe_mode|max_window_layers|conv_kernel|chunk_size"
)


class UnservedFields(Fields):
    """Fields that remembers which were read."""

    def __init__(self, given: Mapping[str, Any]):
        super().__init__(given, {})
        self.has_sinks = False  # which no field says
        self.seen = {*_OTHERWISE, *(name for names in _ALIASES for name in names)}

    def get(self, name: str) -> Any:
        self.seen.add(name)
        return super().get(name)

    def _checked(self, name: str, lowest: int) -> int:
        self.seen.add(name)
        return super()._checked(name, lowest)

    def first(self, names: tuple[str, ...]) -> str:
        """The one that the config has, else the first, which messages then name."""
        return next((name for name in names if self.get(name) is not None), names[0])

    def count(self, *names: str) -> int:
        """0 where it is missing or null."""
        return self.optional(self.first(names), 0, lowest=0)

    def entry(self, name: str, kind: type, layer: int) -> Any:
        """What the list `name` says of a layer; None where there is none."""
        entries = self.entries(name, kind)
        if entries and layer >= len(entries):
            raise CheckpointError(
                f"{self.source}: {name} has {len(entries)} entries, too few for the layers"
            )
        return entries[layer] if entries else None

    def unread(self) -> list[str]:
        return [
            name
            for name, value in self.given.items()
            if value and name not in self.seen
            and _STRUCTURE.search(name) and not _NO_STRUCTURE.search(name)
        ]  # fmt: skip

    @property
    def act(self) -> str:
        name = self.first(ACTIVATIONS)
        found = self.get(name) or "silu"
        if type(found) is not str:
            raise CheckpointError(f"{self.source}: {name} = {found!r}: it takes a name")
        return found

    @property
    def mlp_parts(self) -> tuple[str, ...]:
        """Weights of an MLP or an expert."""
        return GATED[1:] if self.act in ("relu", "relu2") else GATED

    @property
    def expert_activation(self) -> str:
        """`silu`, or in words what experts compute instead."""
        if self.get("swiglu_limit"):
            return "clamped swiglu"
        if self.mlp_parts != GATED:
            return f"{self.act} without a gate"
        return "silu" if self.act in ("silu", "swish") else self.act
