"""The head of EAGLE-3: one layer that reads a model's hidden states and drafts its tokens."""

import torch
from torch import Tensor, nn

from vllm.architectures.eagle3 import PREFIX, Eagle3Decoder
from vllm.distributed.groups import total
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.embedding import Embedding, LMHead
from vllm.model_executor.layers.layernorm import NORMS, RMSNorm
from vllm.model_executor.layers.linear import linear_layer
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.weights import Slot


class Eagle3Head(nn.Module):
    """As Eagle3Decoder says; embed_tokens, lm_head: None where they are the model's."""

    def __init__(self, ctx: ModelContext):
        super().__init__()
        decoder = ctx.decoder
        assert isinstance(decoder, Eagle3Decoder)
        self.decoder, self.dtype, size = decoder, ctx.dtype, decoder.hidden_size
        norm = NORMS[decoder.norm]
        self.input_norm: RMSNorm | None = None
        if decoder.norms_inputs:
            self.input_norm = norm(ctx, "input_norm", decoder.fc.inputs.size)
        self.fc = linear_layer(ctx, "", decoder.fc)
        self.embedding_norm = norm(ctx, f"{PREFIX}input_layernorm", size)
        self.hidden_norm = norm(ctx, f"{PREFIX}hidden_norm", size)
        self.layer = DecoderLayer(ctx, decoder.layers[0], PREFIX, {})
        self.norm = norm(ctx, "norm", size)
        self.embed_tokens: Embedding | None = None
        if decoder.has_embeddings:
            self.embed_tokens = Embedding(ctx, "embed_tokens", decoder.num_embeddings, size)
        self.lm_head: LMHead | None = None
        if decoder.has_lm_head:
            self.lm_head = LMHead(ctx, decoder.lm_head, nn.Identity())
        # What is to be added to a token of its vocabulary to get the model's.
        self.d2t = nn.Parameter(torch.zeros(decoder.vocab_size, dtype=torch.int64), False)

    def slots(self) -> dict[str, Slot]:
        shape, dtypes = tuple(self.d2t.shape), (torch.int64, torch.int32)
        is_optional = self.decoder.is_whole_vocab
        write, zeros = self._write_d2t, torch.zeros
        return {
            "d2t": Slot(
                shape, dtypes, write, is_optional=is_optional,
                example=lambda: zeros(shape, dtype=dtypes[0]),
            )
        }  # fmt: skip

    def _write_d2t(self, offsets: Tensor) -> None:
        """ValueError for tokens that the model does not have."""
        tokens = torch.arange(len(offsets), device=offsets.device) + offsets
        most = self.decoder.num_embeddings - 1
        if int(tokens.min()) < 0 or int(tokens.max()) > most:
            raise ValueError(
                f"it means tokens {int(tokens.min())} to {int(tokens.max())}, and the model has 0 "
                f"to {most}; the checkpoint is corrupt or of another model, fetch it again"
            )
        self.d2t.data.copy_(offsets)

    def reduced(self, hidden: Tensor) -> Tensor:
        """Hidden states of the model's layers, [T, n * hidden size] -> [T, hidden size]."""
        x: Tensor = self.fc(hidden if self.input_norm is None else self.input_norm(hidden))
        return x

    def _read(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and what its output is added to."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.embedding_norm(embeddings), normed], dim=-1)
        return both, normed if self.decoder.norms_residual else hidden

    def forward(self, embeddings: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden size] twice -> [S, hidden size] of `batch.read_rows`, before the norm. Changes
        hidden."""
        both, residual = self._read(embeddings, hidden)
        mixed = self.layer.mixer(both, batch)
        x, residual = self.layer.after_mixer(mixed, residual, batch.read_rows)
        return total(x).add_(residual)

    def fill_cache(self, embeddings: Tensor, hidden: Tensor, batch: ForwardBatch) -> None:
        """For later tokens of the same requests."""
        self.layer.mixer(self._read(embeddings, hidden)[0], batch)

    def dry_run(self, batch: ForwardBatch, num_logits: int) -> None:
        """All that a step computes, for the memory that it takes, beside what the model gave: its
        own hidden states and those for the head, which are copied where drafts were refused."""
        num_tokens, columns = len(batch.input_ids), self.decoder.fc.inputs.size
        dtype, device = self.dtype, batch.input_ids.device
        wide = num_tokens, columns + self.decoder.hidden_size
        given = [torch.zeros(wide, dtype=dtype, device=device) for _ in range(2)]
        x = self.reduced(given[-1][:, :columns].contiguous())
        y = self(torch.zeros_like(x), x, batch)[:num_logits]
        if self.lm_head is not None:
            self.lm_head(self.norm(y))
        del given
