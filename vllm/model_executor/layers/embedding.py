"""Token embedding and the output projection, which may share their weight."""

from torch import Tensor, nn
from torch.nn import functional

from vllm.architectures.sharding import LinearSpec
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter


class Embedding(nn.Module):
    """Rows of [vocab, hidden], kept as the checkpoint stores them.

    Every tensor-parallel rank has all of them: that costs memory, but no exchange between ranks
    before the first layer, and a projection tied to it takes its rows from here.
    """

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


class LMHead(ColumnParallelLinear):
    """Logits [S, vocab] in the model's type, the same on all tensor-parallel ranks, each of which
    computes some of the columns, scaled and soft-capped as the decoder says. Tied: takes the
    embedding's weight instead of a slot."""

    def __init__(self, ctx: ModelContext, spec: LinearSpec, embedding: nn.Module):
        super().__init__(ctx, "", spec)
        self.vocab_size = spec.parts[0].num_rows
        self.tied, self.ops = ctx.ties_embeddings, ctx.ops
        self.logits_scaling = ctx.decoder.logits_scaling
        self.softcap = ctx.decoder.final_logit_softcapping
        if self.tied:
            self.weight = embedding.weight

    def slots(self) -> dict[str, Slot]:
        return {} if self.tied else super().slots()

    def make_kernel(self) -> None:
        if self.tied and self.group.size > 1:
            self.weight = self._own_rows(self.weight.data)
        super().make_kernel()

    def _own_rows(self, whole: Tensor) -> nn.Parameter:
        """A view, but on a rank whose rows are filled up with zeros."""
        (start, stop), num_missing = self.places[0].rows, self.places[0].rows[1] - len(whole)
        own = whole[min(start, len(whole)) : stop]
        if num_missing > 0:
            own = functional.pad(own, (0, 0, 0, self.shard_rows[0] - len(own)))
        return nn.Parameter(own, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        own = self.multiply(x)
        if self.logits_scaling != 1:
            own /= self.logits_scaling
        if self.softcap:
            self.ops.soft_cap(own, self.softcap)
        logits = self.group.gather_columns(own)
        return logits[:, : self.vocab_size].contiguous()
