"""Token embedding and the output projection, which may share their weight."""

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter


class Embedding(nn.Module):
    """Rows of [vocab, hidden], kept as the checkpoint stores them."""

    def __init__(self, ctx: ModelContext, prefix: str, vocab_size: int, hidden_size: int):
        super().__init__()
        self.prefix = prefix
        self.dtype = ctx.dtype
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=ctx.weight_dtype)

    def slots(self) -> dict[str, Slot]:
        slot = Slot(tuple(self.weight.shape), FLOATS, copy_into(self.weight.data))
        return {f"{self.prefix}.weight": slot}

    def forward(self, input_ids: Tensor) -> Tensor:
        return functional.embedding(input_ids, self.weight).to(self.dtype)


class LMHead(Linear):
    """Logits [S, vocab] in float32. Tied: takes the embedding's weight instead of a slot."""

    def __init__(self, ctx: ModelContext, prefix: str, embedding: Embedding):
        vocab_size, hidden_size = embedding.weight.shape
        if ctx.ties_embeddings:  # whatever the format says of output projections
            ctx = dataclasses.replace(ctx, quant_config=None)
        super().__init__(ctx, prefix, hidden_size, [(prefix, vocab_size)])
        self.tied = ctx.ties_embeddings
        if self.tied:
            self.weight = embedding.weight

    def slots(self) -> dict[str, Slot]:
        return {} if self.tied else super().slots()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.float32)
