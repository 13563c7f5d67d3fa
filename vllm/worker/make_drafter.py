"""What drafts tokens on a rank, as the configuration says."""

from collections.abc import Sequence

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.models.decoder import CausalLM
from vllm.model_executor.models.eagle3 import Eagle3Head
from vllm.worker.draft_model import ModelDrafter
from vllm.worker.drafts import Drafter
from vllm.worker.eagle3 import Eagle3Drafter
from vllm.worker.input_batch import InputBatch
from vllm.worker.mtp import MTPDrafter
from vllm.worker.ngram import NgramDrafter


def make_drafter(
    config: VllmConfig,
    models: Sequence[CausalLM | Eagle3Head],
    batch: InputBatch,
    num_blocks: int,
    device: torch.device,
) -> Drafter:
    """models: the model, and the one that drafts for it, if any. num_blocks: of requests."""
    model, draft = models[0], models[1] if len(models) > 1 else None
    assert isinstance(model, CausalLM)
    drafts, max_len = config.speculative_config, config.model_config.max_model_len
    if drafts is None:
        return Drafter()
    if isinstance(draft, Eagle3Head):
        return Eagle3Drafter(draft, model, batch, config, num_blocks, max_len, device)
    if draft is not None:
        assert drafts.draft_model_config is not None
        max_len = min(max_len, drafts.draft_model_config.max_model_len)
        return ModelDrafter(draft, batch, config, num_blocks, max_len, device)
    if model.mtp is not None:
        return MTPDrafter(model, batch, config, num_blocks, max_len, device)
    return NgramDrafter(drafts, batch)


def drafting_part(models: Sequence[CausalLM | Eagle3Head]) -> nn.Module | None:
    """What drafts and has a KV cache of its own; None for nothing."""
    model, *others = models
    return model.mtp if isinstance(model, CausalLM) and not others else models[-1]
