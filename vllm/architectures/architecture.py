"""Everything that is known of one architecture, as a value; its own file makes it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from vllm.architectures.decoder import Decoder, MTPSpec
from vllm.architectures.fields import MTP_FIELDS, Fields
from vllm.errors import ConfigError
from vllm.utils.dataclasses import dataclass, field, replace

# What transformers' config classes of all our architectures assume.
CAUSAL_LM: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": None,
    "architectures": None,
}

# The text model's place in multimodal checkpoints, as transformers writes them before version 5 and
# after.
TEXT_IN_MULTIMODAL = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)

# How names of tensors of multi-token prediction begin, where they are not numbered as layers.
MTP_PREFIX = "mtp."
# What a numbered layer of multi-token prediction has again of the model.
_SHARED = ("embed_tokens.", "shared_head.head.")
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


@dataclass(frozen=True)
class Checkpointed:
    """What checkpoints of a model_type look like.

    hf_architectures: what config.json calls its classes (`architectures`). is_served: whether the
    engine runs it; `explain` lists the kernels of all. family: the name of its models in
    docs/models.md, where "" stands for the model_type. skipped_tensors: how names of tensors that
    are not served begin, after "model."; renamed_tensors: how other names begin, and how ours do.
    has_mtp_layers: checkpoints have layers of multi-token prediction, numbered after those of the
    decoder, which are skipped where they draft nothing. is_in_transformers: False for a model_type
    that transformers, or older versions of it, know only by code that checkpoints bring along,
    which is not run.
    """

    model_type: str
    hf_architectures: tuple[str, ...]
    is_served: bool = field(default=True, kw_only=True)
    family: str = field(default="", kw_only=True)
    skipped_tensors: tuple[str, ...] = field(default=(), kw_only=True)
    renamed_tensors: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    has_mtp_layers: bool = field(default=False, kw_only=True)
    is_in_transformers: bool = field(default=True, kw_only=True)

    def slot_name(
        self, name: str, num_layers: int | None = None, drafts: bool = False
    ) -> str | None:
        """The slot that a checkpoint tensor belongs to; None for one that is not needed.
        num_layers: of the decoder, where layers of multi-token prediction are to be told apart.
        drafts: whether the first of these is used."""
        bare = name.removeprefix("model.")
        is_skipped = bare.startswith(self.skipped_tensors)
        is_skipped &= not (drafts and bare.startswith(MTP_PREFIX))
        if is_skipped or name.endswith("rotary_emb.inv_freq"):
            return None
        for stored, ours in self.renamed_tensors:
            if name.startswith(stored):
                name = ours + name.removeprefix(stored)
                break
        if self.has_mtp_layers and num_layers is not None:
            found = _LAYER.match(name)
            if found is not None and int(found[1]) >= num_layers:
                is_used = drafts and int(found[1]) == num_layers
                return None if not is_used or name[found.end() :].startswith(_SHARED) else name
        return name


@dataclass(frozen=True)
class Architecture(Checkpointed):
    """A text model.

    describe: its decoder; describe_mtp: what its checkpoints have to draft tokens, None for
    nothing that is served. defaults: what transformers' config class assumes of each field that it
    has; nullable: those in which null means what is assumed, or derived. layer_types: derives that
    field of one that lacks it; derives_layer_types: names of the fields it is derived from;
    derived_fields: others that transformers derives. renamed_fields: newer names of fields, and
    ours. rope_defaults: rope_parameters of a config without any, of its other fields; no_window:
    what transformers makes of the sliding_window of a config that does not use it; rope_theta:
    where a config has none; rope: what transformers makes of the fields and of rope_parameters as
    given; layer_ropes: of the fields, where each type of layers has its own. omits_sizes: published
    configs lack sizes that the config class assumes. has_rotary_dim: its field `rotary_dim` says
    how many columns of a head are rotated. ue8m0_requant_loses_accuracy: re-quantising its weights
    to UE8M0 scales costs accuracy that was measured. is_read_by_transformers: its config.json is
    always read by transformers, which renames and derives more than is known here.
    """

    describe: Callable[[Fields], Decoder]
    defaults: Mapping[str, Any]
    nullable: frozenset[str] = frozenset()
    layer_types: Callable[[Mapping[str, Any]], list[str]] | None = None
    derives_layer_types: tuple[str, ...] = ()
    renamed_fields: Mapping[str, str] = field(default_factory=dict)
    rope_defaults: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {}
    rope: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]] = lambda fields, rope: rope
    layer_ropes: Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]] | None = None
    derived_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {}
    no_window: int | None = None
    rope_theta: float = 10000.0
    partial_rotary_factor: float | None = None
    omits_sizes: bool = False
    has_rotary_dim: bool = False
    ue8m0_requant_loses_accuracy: bool = False
    is_read_by_transformers: bool = False
    describe_mtp: Callable[[Fields], MTPSpec] | None = None

    def our_fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """`config` with our names of fields."""
        fields = dict(config)
        for new, ours in self.renamed_fields.items():
            if fields.get(new) is not None:
                fields[ours] = fields.pop(new)
        return fields

    def decoder(
        self, config: Mapping[str, Any], source: str = "config.json", with_mtp: bool = False
    ) -> Decoder:
        """Of a text config. CheckpointError names the field that is wrong; source: of `config`.
        with_mtp: also with what drafts tokens; ConfigError where it has nothing."""
        given = self.our_fields(config)
        if self.omits_sizes:
            given = {**self.defaults, **given}
        fields = Fields(given, self.defaults, source)
        decoder = self.describe(fields)
        return replace(decoder, mtp=self._mtp(fields)) if with_mtp else decoder

    def _mtp(self, fields: Fields) -> MTPSpec:
        if self.describe_mtp is None:
            raise ConfigError(
                f"model_type {self.model_type!r} has no layer of multi-token prediction that is "
                f"served"
            )
        name = next((name for name in MTP_FIELDS if fields.get(name) is not None), None)
        if name is not None and fields.optional(name, 0, lowest=0) == 0:
            raise ConfigError(
                f"{fields.source}: {name} = 0: there is no layer of multi-token prediction"
            )
        return self.describe_mtp(fields)


@dataclass(frozen=True)
class Composite(Checkpointed):
    """A multimodal model, of which the text model is served.

    text_types: model types that its text_config may have, the first where it names none.
    ties_embeddings: whether its word embeddings are tied where config.json does not say.
    decides_ties: what the text_config says of that means nothing. notice: what users are told when
    it is served.
    """

    text_types: tuple[str, ...]
    ties_embeddings: bool = False
    decides_ties: bool = False
    notice: str = ""
