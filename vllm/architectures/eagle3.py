"""EAGLE-3: a head that drafts tokens from hidden states of several of a model's layers.

Its checkpoint is of its own, with names as SafeAILab (`midlayer.*`) or speculators (`layers.0.*`)
write them. https://arxiv.org/abs/2503.01840, https://github.com/SafeAILab/EAGLE,
https://docs.vllm.ai/projects/speculators
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.architectures import llama
from vllm.architectures.build import dim
from vllm.architectures.decoder import Attention, Decoder, Item, LayerNorms
from vllm.architectures.fields import Fields
from vllm.architectures.sharding import Dim, LinearSpec, linear
from vllm.errors import CheckpointError, ConfigError
from vllm.utils.dataclasses import dataclass, field, fields, replace
from vllm.utils.safetensors_files import TensorShape

PREFIX = "layers.0."
"""Of the names in the layer, with its dot."""
ARCHITECTURE = replace(
    llama.ARCHITECTURES[0],
    renamed_tensors=(("model.midlayer.", PREFIX), ("midlayer.", PREFIX), ("model.", "")),
    # What training leaves: which tokens d2t has, and what the model has itself.
    skipped_tensors=("t2d", "verifier_"),
)
_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "eagle_config"
_PLAIN = ("F32", "BF16", "F16", "F8_E4M3")  # types whose numbers are not packed


@dataclass(frozen=True)
class Eagle3Decoder(Decoder):
    """A head, whose `lm_head` has the rows of its draft vocabulary.

    At position i it reads x = fc(h), h the hidden states of the model there side by side, and the
    token at i + 1: attention reads [input_layernorm(embedding), hidden_norm(x)], and what the layer
    gives is added to x, or to hidden_norm(x) where norms_residual says so. y, the sum, is read by
    lm_head(norm(y)), and y in place of x, and the token that is drafted, give the next.
    norms_inputs: fc(input_norm(h)). num_embeddings: tokens of the model. has_embeddings,
    has_lm_head: of its own; else they are the model's.
    """

    fc: LinearSpec = field(kw_only=True)
    num_embeddings: int = field(kw_only=True)
    has_embeddings: bool = field(kw_only=True)
    has_lm_head: bool = field(kw_only=True)
    norms_residual: bool = field(kw_only=True)
    norms_inputs: bool = field(kw_only=True)

    @property
    def is_whole_vocab(self) -> bool:
        """Whether it can draft every token of the model."""
        return self.vocab_size == self.num_embeddings

    def items(self) -> Iterator[tuple[str, Item]]:
        yield "", self.fc
        for item in self.layers[0].items:
            yield PREFIX, item
        if self.has_lm_head:
            yield "", self.lm_head


def head(
    config: Mapping[str, Any], model: Decoder, tensors: Mapping[str, TensorShape], source: str
) -> tuple[Eagle3Decoder, tuple[int, ...]]:
    """The head of a config as of a Llama, and the layers of `model` whose inputs it reads (as many
    as the model has: what the last one gives). tensors: of its checkpoint by their names there,
    empty where they are not at hand. CheckpointError, or ConfigError for a head of another model.
    """
    given = Fields(config, ARCHITECTURE.defaults, source)
    given.allow_only({"num_hidden_layers": 1})
    layer_ids = _layer_ids(given, len(model.layers))
    _check_model(given, model)
    stored = {ours: one for name, one in tensors.items() if (ours := ARCHITECTURE.slot_name(name))}
    hidden = dim(given, "hidden_size")
    num_drafts = given.optional("draft_vocab_size", model.vocab_size)
    inputs = Dim(f"hidden states of {len(layer_ids)} layers", len(layer_ids) * hidden.size)
    fc = linear("fc", hidden, inputs, "replicated")
    if stored:
        _check_tensors(stored, fc, num_drafts, model.vocab_size, source)
    plain = ARCHITECTURE.decoder(config, source)
    vocab = Dim("draft_vocab_size", num_drafts, uneven="padded")
    values = {one.name: getattr(plain, one.name) for one in fields(plain)} | {
        "layers": tuple(replace(one, mixer=_widened(one.mixer, hidden)) for one in plain.layers),
        "lm_head": linear("lm_head", vocab, hidden, "column"),
        "layer_norms": LayerNorms(before_mixer=""),
    }
    made = Eagle3Decoder(
        **values,
        fc=fc,
        num_embeddings=model.vocab_size,
        has_embeddings="embed_tokens.weight" in stored,
        has_lm_head=not stored or _has_weight(stored, "lm_head"),
        norms_residual=given.flag("norm_before_residual"),
        norms_inputs=given.flag("norm_before_fc"),
    )
    return made, layer_ids


def _widened(mixer: Any, hidden: Dim) -> Attention:
    """Attention that reads an embedding and a hidden state side by side."""
    assert isinstance(mixer, Attention)
    both = Dim("2 * hidden_size", 2 * hidden.size)
    return replace(mixer, qkv_proj=replace(mixer.qkv_proj, inputs=both))


def _layer_ids(given: Fields, num_layers: int) -> tuple[int, ...]:
    """In the order of the layers. A list that begins with 1 counts what layers give, as SpecForge
    and ModelOpt write it, and else what they read, as speculators does: the same hidden states are
    (1, n / 2 - 1, n - 4) there and (2, n / 2, n - 3) here.
    https://github.com/sgl-project/sglang/pull/25454"""
    nested = given.get(_NESTED)
    inner = Fields(nested, {}, given.source) if isinstance(nested, Mapping) else given
    inner.allow_only({"use_aux_hidden_state": True})
    ids = given.entries(_IDS, int) or inner.entries(_IDS, int)
    ids = ids or [2, num_layers // 2, num_layers - 3]
    ids = sorted(one + (ids[0] == 1) for one in ids)
    if len({*ids}) < len(ids) or not 0 <= ids[0] <= ids[-1] <= num_layers:
        raise ConfigError(
            f"{given.source}: {_IDS} means the inputs of layers {ids}, which must differ and be "
            f"from 0 to {num_layers}, for the model has {num_layers} layers: take a head of this "
            f"model"
        )
    return tuple(ids)


def _check_model(given: Fields, model: Decoder) -> None:
    """ConfigError where the head is of another model."""
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    for name, wanted in sizes.items():
        if (found := given.size(name)) != wanted:
            raise ConfigError(
                f"{given.source}: {name} = {found}, and the model has {wanted}: take a head that "
                f"was made for this model"
            )
    if (found := given.optional("target_hidden_size", model.hidden_size)) != model.hidden_size:
        raise ConfigError(
            f"{given.source}: target_hidden_size = {found}, and the model's hidden_size is "
            f"{model.hidden_size}: take a head that was made for this model"
        )
    num_drafts = given.optional("draft_vocab_size", model.vocab_size)
    if num_drafts > model.vocab_size:
        raise ConfigError(
            f"{given.source}: draft_vocab_size = {num_drafts} is more than the {model.vocab_size} "
            f"tokens of the model"
        )


def _has_weight(stored: Mapping[str, TensorShape], layer: str) -> bool:
    return any(name.rpartition(".")[0] == layer for name in stored)


def _check_tensors(
    stored: Mapping[str, TensorShape], fc: LinearSpec, num_drafts: int, num_tokens: int, source: str
) -> None:
    """CheckpointError for a checkpoint that lacks what makes it a head, or has it for another
    model. The loader checks all the rest."""
    folder = source.rpartition("/")[0] or source
    if not _has_weight(stored, "fc"):
        raise CheckpointError(f"{folder} has no tensor fc.weight: it is no EAGLE-3 head")
    wanted = fc.parts[0].num_rows, fc.inputs.size
    found = stored.get("fc.weight")
    if found is not None and found.dtype in _PLAIN and found.shape != wanted:
        raise CheckpointError(
            f"{folder}: fc.weight has shape {list(found.shape)}, and {fc.inputs.field} need "
            f"{list(wanted)}: hidden_size or {_IDS} of its config.json does not belong to it"
        )
    if num_drafts == num_tokens:
        return
    for name, use in (("d2t", "which tokens it drafts"), ("lm_head.weight", "what drafts them")):
        if name not in stored and not _has_weight(stored, name.removesuffix(".weight")):
            raise CheckpointError(
                f"{folder} has no tensor {name}, {use}: its vocabulary has {num_drafts} of the "
                f"model's {num_tokens} tokens (draft_vocab_size)"
            )
