"""The model of every architecture: a decoder of layers that its description lists."""

from typing import Any

import torch
from torch import Tensor, nn

from vllm.architectures import decoder as spec
from vllm.distributed.groups import Addend, total
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.delta_net import GatedDeltaNet
from vllm.model_executor.layers.embedding import Embedding, LMHead
from vllm.model_executor.layers.layer_scalar import LayerScalar
from vllm.model_executor.layers.layernorm import NORMS, ResidualNorms, RMSNorm
from vllm.model_executor.layers.linear import linear_layer
from vllm.model_executor.layers.mamba2 import Mamba2Mixer
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.stage import PPMissingLayer, StageLink
from vllm.model_executor.models.attention import SelfAttention
from vllm.model_executor.models.feed_forward import MLP, MLPBesideExperts, SparseMoE, UngatedMLP
from vllm.model_executor.models.latent_attention import LatentAttention

_FEED_FORWARDS: dict[type, Any] = {
    spec.GatedMLP: MLP,
    spec.UngatedMLP: UngatedMLP,
    spec.MoE: SparseMoE,
    spec.MLPBesideExperts: MLPBesideExperts,
}


Rotaries = dict[tuple[str | None, int], RotaryEmbedding]
"""By the name that attention layers give, and the size of their heads."""


def _mixer(ctx: ModelContext, prefix: str, mixer: spec.Mixer, rotaries: Rotaries) -> nn.Module:
    """(x [T, hidden], batch) -> [T, n] for its `writer`: what mixes tokens in a layer."""
    if isinstance(mixer, spec.DeltaNet):
        return GatedDeltaNet(ctx, prefix, mixer)
    if isinstance(mixer, spec.Mamba2):
        return Mamba2Mixer(ctx, prefix, mixer)
    if isinstance(mixer, spec.LatentAttention):
        rotary = _rotary(ctx, "", ctx.decoder.rotary_head_dim, rotaries)
        return LatentAttention(ctx, prefix, mixer, rotary)
    head_dim = mixer.attn.cache.head_dim
    rotary = _rotary(ctx, mixer.rope, head_dim, rotaries)
    unrotated = _rotary(ctx, None, head_dim, rotaries) if mixer.norms_rotated else rotary
    return SelfAttention(ctx, prefix, mixer, rotary, unrotated)


def _rotary(
    ctx: ModelContext, name: str | None, head_dim: int, rotaries: Rotaries
) -> RotaryEmbedding:
    if (name, head_dim) not in rotaries:
        rope = None if name is None else ctx.decoder.ropes[name]
        rotaries[name, head_dim] = RotaryEmbedding(ctx, rope, head_dim)
    return rotaries[name, head_dim]


class DecoderLayer(nn.Module):
    """What mixes tokens and what follows it, or one of the two alone."""

    def __init__(
        self, ctx: ModelContext, layer: spec.DecoderLayer, prefix: str, rotaries: Rotaries
    ):
        """prefix: of its names in checkpoints, with its dot."""
        super().__init__()
        norms, multiplier = ctx.decoder.layer_norms, ctx.decoder.residual_multiplier

        def around(*names: str) -> ResidualNorms:
            return ResidualNorms(*(self._norm(ctx, prefix, name) for name in names), multiplier)

        self.mixer = self.mlp = None
        if layer.mixer is not None:
            self.mixer_norms = around(norms.before_mixer, norms.after_mixer)
            self.mixer = _mixer(ctx, prefix, layer.mixer, rotaries)
        if (own := layer.feed_forward) is not None:
            self.mlp_norms = around(norms.before_feed_forward, norms.after_feed_forward)
            self.mlp = _FEED_FORWARDS[type(own)](ctx, prefix, own)
        for part in (self.mixer, self.mlp):
            if (writer := getattr(part, "writer", None)) is not None:
                writer.reduce_results = False  # the norm that comes next adds up
        self.scalar: LayerScalar | None = None
        if ctx.decoder.layer_scalar:
            self.scalar = LayerScalar(prefix + ctx.decoder.layer_scalar)

    def _norm(self, ctx: ModelContext, prefix: str, name: str) -> RMSNorm | None:
        """Also an attribute of its name in checkpoints. None for no name."""
        if not name:
            return None
        norm = NORMS[ctx.decoder.norm](ctx, prefix + name, ctx.decoder.hidden_size)
        self.add_module(name, norm)
        return norm

    def forward(
        self, x: Addend, residual: Tensor, batch: ForwardBatch, rows: Tensor | None = None
    ) -> tuple[Addend, Tensor]:
        """Adds x to residual (in place) on the way; returns what is to be added to it next, and it.

        rows: those that go on once the tokens are mixed; None for all.
        """
        # A reader with layers besides that take floats has these kept beside what is quantised.
        if self.mixer is not None:
            mixed = self.mixer(self.mixer_norms.read(x, residual, self.mixer.reader), batch)
            return self.after_mixer(mixed, residual, rows)
        if rows is not None:
            x, residual = total(x)[rows], residual[rows]
        return self._after(x, residual)

    def after_mixer(
        self, mixed: Tensor, residual: Tensor, rows: Tensor | None = None
    ) -> tuple[Addend, Tensor]:
        """`forward`, from what the mixer gives."""
        if rows is not None:
            mixed, residual = mixed[rows], residual[rows]
        return self._after(self.mixer_norms.written(self.mixer.writer(mixed)), residual)

    def _after(self, x: Addend, residual: Tensor) -> tuple[Addend, Tensor]:
        if self.mlp is not None:
            read = self.mlp_norms.read(x, residual, self.mlp.reader)
            x = self.mlp(read, residual) if self.mlp.reads_residual else self.mlp(read)
            x = self.mlp_norms.written(x)
        if self.scalar is not None:
            x = self.scalar(total(x), residual)
        return x, residual

    def fill_cache(self, x: Addend, residual: Tensor, batch: ForwardBatch) -> None:
        """What `forward` does to the KV cache, and no more than that needs. Changes residual."""
        self.mixer(self.mixer_norms.read(x, residual, self.mixer.reader), batch)


class DecoderModel(nn.Module):
    """The layers of this rank's pipeline stage."""

    def __init__(self, ctx: ModelContext):
        super().__init__()
        decoder = ctx.decoder
        self.rotaries: Rotaries = {}
        self.pipeline, self.link = ctx.parallel.pipeline, StageLink(ctx)
        is_first, is_last = self.pipeline.is_first, self.pipeline.is_last
        # As the embedding's own type holds it.
        multiplier = torch.tensor(decoder.embedding_multiplier, dtype=ctx.dtype, device="cpu")
        self.embedding_multiplier = multiplier.item()
        name = "model.embed_tokens"
        if is_first or (is_last and ctx.ties_embeddings):
            self.embed_tokens = Embedding(ctx, name, decoder.vocab_size, decoder.hidden_size)
        else:
            self.embed_tokens = PPMissingLayer(name)
        num_layers = len(decoder.layers)
        self.own_layers = ctx.parallel.layers(num_layers)
        self.layers = nn.ModuleList(
            DecoderLayer(ctx, decoder.layers[i], spec.layer_prefix(i), self.rotaries)
            if i in self.own_layers
            else PPMissingLayer(spec.layer_prefix(i).removesuffix("."))
            for i in range(num_layers)
        )
        name = "model.norm"
        norm = NORMS[decoder.norm]
        self.norm = norm(ctx, name, decoder.hidden_size) if is_last else PPMissingLayer(name)
        self.aux_layers = decoder.aux_layers

    def embed(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)
        return x if self.embedding_multiplier == 1 else x.mul_(self.embedding_multiplier)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of `batch.read_rows` after the last norm, and beside them those of
        `aux_layers`, [S, (1 + n) * hidden size]; of an earlier stage, what it sent on."""
        is_first = self.pipeline.is_first
        x = self.embed(batch.input_ids) if is_first else self.link.receive(batch)
        residual = torch.zeros_like(x)
        *others, last = self.own_layers
        aux: list[Tensor] = []
        for index in others:
            x = self._keep(index, x, residual, aux)
            x, residual = self.layers[index](x, residual, batch)
        x = self._keep(last, x, residual, aux)
        # Later layers mix all tokens; after the very last of them nobody does.
        rows = batch.read_rows if self.pipeline.is_last else None
        x, residual = self.layers[last](x, residual, batch, rows)
        if not self.pipeline.is_last:
            return self.link.send(x, residual)
        x = self._keep(last + 1, x, residual, aux)
        hidden: Tensor = self.norm.add(x, residual)
        if not aux:
            return hidden
        assert rows is None
        return torch.cat([hidden, *aux], dim=-1)

    def _keep(self, index: int, x: Addend, residual: Tensor, aux: list[Tensor]) -> Addend:
        """x, which is added up where somebody reads what layer `index` does."""
        if index in self.aux_layers:
            x = total(x)
            aux.append(x + residual)
        return x


class MTP(nn.Module):
    """Drafts tokens, as MTPSpec says; one layer with its own part of the KV cache."""

    def __init__(self, ctx: ModelContext, mtp: spec.MTPSpec, rotaries: Rotaries):
        super().__init__()
        norm, size = NORMS[ctx.decoder.norm], ctx.decoder.hidden_size
        self.embedding_norm = norm(ctx, mtp.prefix + mtp.embedding_norm, size)
        self.hidden_norm = norm(ctx, mtp.prefix + mtp.hidden_norm, size)
        self.proj = linear_layer(ctx, mtp.prefix, mtp.proj)
        self.layer = DecoderLayer(ctx, mtp.layer, mtp.layer_prefix, rotaries)
        self.norm = norm(ctx, mtp.prefix + mtp.norm, size)

    def _read(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        both = self.embedding_norm(embeddings), self.hidden_norm(hidden)
        x: Tensor = self.proj(torch.cat(both, dim=-1))
        return x

    def forward(self, embeddings: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] twice -> [S, hidden] of `batch.read_rows`, after the norm."""
        x = self._read(embeddings, hidden)
        x, residual = self.layer(x, torch.zeros_like(x), batch, batch.read_rows)
        return self.norm.add(x, residual)

    def fill_cache(self, embeddings: Tensor, hidden: Tensor, batch: ForwardBatch) -> None:
        """For later tokens of the same requests."""
        x = self._read(embeddings, hidden)
        self.layer.fill_cache(x, torch.zeros_like(x), batch)


class CausalLM(nn.Module):
    """A decoder with its output projection. mtp: what drafts tokens, None where it is not used."""

    def __init__(self, ctx: ModelContext):
        super().__init__()
        self.hidden_size = ctx.decoder.hidden_size
        self.model = DecoderModel(ctx)
        if ctx.parallel.pipeline.is_last:
            self.lm_head = LMHead(ctx, ctx.decoder.lm_head, self.model.embed_tokens)
        else:
            self.lm_head = PPMissingLayer("lm_head")
        self.mtp: MTP | None = None
        if ctx.decoder.mtp is not None:
            self.mtp = MTP(ctx, ctx.decoder.mtp, self.model.rotaries)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [S, hidden size], or wider ones (`DecoderModel.forward`)."""
        return self.model(batch)

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """After the last norm, [S, hidden size], of what `forward` gives."""
        return hidden[:, : self.hidden_size].contiguous() if self.model.aux_layers else hidden

    def aux_hidden(self, hidden: Tensor) -> Tensor:
        """Those of `aux_layers` side by side, [S, n * hidden size], of what `forward` gives."""
        return hidden[:, self.hidden_size :].contiguous()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gives, or [S, hidden size] -> [S, vocab], in the model's type."""
        return self.lm_head(self.last_hidden(hidden))

    def dry_run(self, batch: ForwardBatch, num_logits: int) -> None:
        """All that a step computes, for the memory that it takes."""
        self.compute_logits(self(batch)[:num_logits])
