"""Drafts of an EAGLE-3 head."""

from typing import Any

from torch import Tensor

from vllm.model_executor.models.decoder import CausalLM
from vllm.model_executor.models.eagle3 import Eagle3Head
from vllm.worker.mtp import MTPDrafter


class Eagle3Drafter(MTPDrafter):
    """As the layer of a checkpoint, but it reads hidden states of the model's layers, and has a
    vocabulary, an output projection and embeddings of its own, or some of them."""

    def __init__(self, head: Eagle3Head, model: CausalLM, *where: Any):
        """where: as for the others."""
        super().__init__(model, *where)
        self._head = head

    @property
    def layer(self) -> Eagle3Head:
        return self._head

    def embed(self, input_ids: Tensor) -> Tensor:
        if self._head.embed_tokens is None:
            return super().embed(input_ids)
        embeddings: Tensor = self._head.embed_tokens(input_ids)
        return embeddings

    def given(self, hidden: Tensor | None) -> Tensor:
        return self._head.reduced(self.model.aux_hidden(super().given(hidden)))

    def likeliest(self, hidden: Tensor) -> Tensor:
        head, normed = self._head, self._head.norm(hidden)
        logits = self.model.lm_head(normed) if head.lm_head is None else head.lm_head(normed)
        tokens: Tensor = logits.argmax(-1)
        return tokens + head.d2t[tokens]
