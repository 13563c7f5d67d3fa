"""What a model is built with; handed to every layer, so that none asks a global."""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm.architectures.decoder import Decoder
from vllm.distributed.parallel import Parallel
from vllm.kernels.selection import Selection
from vllm.ops.paged_attention import AttentionBatch


@dataclass(frozen=True)
class ModelContext:
    """decoder: what the model is made of. dtype: of activations. weight_dtype: in which weights
    that are not quantised are kept. quant_methods: a QuantizationMethods, which layers ask how
    their weights are stored. ops: the small kernels (norms, rotary, activations) of the device.
    kv_cache_format: short name of the cache's type. max_model_len: positions to serve.
    ties_embeddings: the output projection uses the embedding's weight. parallel: the ranks that
    share the model with this one.
    """

    decoder: Decoder
    dtype: torch.dtype
    weight_dtype: torch.dtype
    quant_methods: Any
    selection: Selection
    ops: ModuleType
    kv_cache_format: str
    max_model_len: int
    ties_embeddings: bool
    parallel: Parallel = field(default_factory=Parallel)


@dataclass(slots=True)
class ForwardBatch:
    """The tokens of one step. input_ids and positions: int64 [T]. groups: for each cache group,
    which differ in block_tables and slot_mapping alone. read_rows: int64 [S], the tokens whose last
    hidden state somebody reads, which are all that the model returns; None for all."""

    input_ids: Tensor
    positions: Tensor
    groups: tuple[AttentionBatch, ...]
    read_rows: Tensor | None = None

    @property
    def attention(self) -> AttentionBatch:
        """Of layers that keep no tokens."""
        return self.groups[0]
