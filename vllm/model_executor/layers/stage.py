"""Layers of other pipeline stages, and what passes from one stage to the next."""

import torch
from torch import Tensor, nn

from vllm.distributed.groups import Addend, total
from vllm.model_executor.context import ForwardBatch, ModelContext


class PPMissingLayer(nn.Module):
    """Stands where another pipeline stage has a layer, whose weights are not read here; does
    nothing."""

    def __init__(self, prefix: str):
        super().__init__()
        self.on_other_ranks = (prefix,)

    def forward(self, x: Tensor) -> Tensor:
        return x


class StageLink:
    """Passes hidden states [T, hidden] through the pipeline stages.

    A stage hands on the sum of what its last layer gave and the residual, so the next one begins
    as the first does: with an input and a residual of zeros. The arithmetic is that of one stage.
    """

    def __init__(self, ctx: ModelContext):
        self._group = ctx.parallel.pipeline
        self._hidden_size = ctx.decoder.hidden_size
        self._dtype = ctx.dtype

    def receive(self, batch: ForwardBatch) -> Tensor:
        ids = batch.input_ids
        hidden = torch.empty(len(ids), self._hidden_size, dtype=self._dtype, device=ids.device)
        return self._group.receive(hidden, self._group.rank - 1)

    def send(self, x: Addend, residual: Tensor) -> Tensor:
        hidden = residual.add_(total(x))
        self._group.send(hidden, self._group.rank + 1)
        return hidden
