"""The checkpoint of an EAGLE-3 head, as a model that drafts."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.architectures import eagle3
from vllm.architectures.architecture import Checkpointed
from vllm.architectures.decoder import Decoder
from vllm.config.hf_config import HFConfig, read_config
from vllm.config.model import ModelConfig
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import dataclass, replace
from vllm.utils.hub import read_json_object, resolve_model
from vllm.utils.safetensors_files import TensorShape, stored_tensors

_LAYER = "transformer_layer_config"  # speculators has what is Llama's in it


@dataclass(frozen=True)
class Eagle3Config(ModelConfig):
    """A head. Its `hf_config` has the fields of a Llama besides those of heads."""

    @property
    def architecture(self) -> Checkpointed:
        return eagle3.ARCHITECTURE

    def ties_embeddings(self, tensors: Iterable[str]) -> bool:
        return False


def with_head(name: str, model: ModelConfig) -> tuple[ModelConfig, Eagle3Config]:
    """The model that gives the hidden states which the head `name` reads, a folder or hub name, and
    the head. CheckpointError or ConfigError for one that cannot draft for it."""
    path = resolve_model(name, weights=not model.is_dummy)
    source = path / "config.json"
    raw = read_json_object(source)
    stored = () if model.is_dummy else stored_tensors(path)
    tensors = {one.name: TensorShape(one.dtype, one.shape) for one in stored}
    assert model.decoder is not None
    config, decoder, layer_ids = head_of(raw, model.decoder, tensors, str(source))
    made = Eagle3Config(
        model=name,
        path=path,
        hf_config=config,
        hf_text_config=config,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        load_format=model.load_format,
        skip_tokenizer_init=True,
        enforce_eager=model.enforce_eager,
        seed=model.seed,
        decoder=decoder,
    )
    return replace(model, decoder=replace(model.decoder, aux_layers=layer_ids)), made


def head_of(
    raw: Mapping[str, Any], model: Decoder, tensors: Mapping[str, TensorShape], source: str
) -> tuple[HFConfig, eagle3.Eagle3Decoder, tuple[int, ...]]:
    """Its config, and as `eagle3.head`. raw: config.json."""
    inner = raw.get(_LAYER, {})
    if not isinstance(inner, dict):
        raise CheckpointError(f"{source}: {_LAYER} = {inner!r} is no JSON object")
    fields = {**raw, **inner}
    for name in (_LAYER, "auto_map", "architectures"):
        fields.pop(name, None)
    llama = eagle3.ARCHITECTURE.model_type
    if fields.get("model_type") != llama:
        raise CheckpointError(
            f"{source}: model_type = {fields.get('model_type')!r}: heads of EAGLE-3 are served "
            f"whose layer is that of {llama!r}"
        )
    config = read_config(fields)
    if config is None:
        raise CheckpointError(
            f"{source} is not that of an EAGLE-3 head: a field of a Llama is missing in it, or of "
            f"another kind than there"
        )
    return config, *eagle3.head(config.to_dict(), model, tensors, source)
