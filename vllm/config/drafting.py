"""What drafts tokens for a model: another model, a head, or a layer of its own checkpoint."""

from collections.abc import Mapping
from typing import Any

from vllm.config.eagle3 import with_head
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig, check_parallel
from vllm.config.speculative import EAGLE3, MTP, SpeculativeConfig, draft_error
from vllm.errors import CheckpointError, ConfigError
from vllm.logger import get_logger
from vllm.machine import Device
from vllm.utils.dataclasses import replace

logger = get_logger(__name__)


def with_drafts(
    given: Mapping[str, Any] | None, model: ModelConfig, parallel: ParallelConfig, device: Device
) -> tuple[ModelConfig, SpeculativeConfig | None]:
    """The model with the layer that drafts, where there is one, or with the hidden states that a
    head reads, and how it drafts. given: as in `--speculative-config`. ConfigError or
    CheckpointError for what cannot draft for it."""
    if given is None:
        return model, None
    config = SpeculativeConfig.of(given)
    if config.acceptance_rate is not None:
        logger.warning(
            "--speculative-config: rejection_sample_method synthetic accepts draft tokens by lot, "
            "for measurements: answers are NOT those of the model. Leave it out to serve users"
        )
    if not config.has_model:
        return model, config
    _check_parallel(config.method, parallel)
    if config.method == MTP:
        try:
            return model.with_mtp(), config
        except ConfigError as error:
            raise draft_error(f"method mtp: {error}") from error
    draft: ModelConfig
    try:
        if config.method == EAGLE3:
            model, draft = with_head(config.model, model)
        else:
            draft = _draft_model(config.model, model, device)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"--speculative-config: model {config.model}: {error}") from error
    assert draft.decoder is not None
    try:
        check_parallel(draft_parallel(draft, parallel), draft.decoder)
    except ConfigError as error:
        raise draft_error(f"model {config.model}: {error}") from error
    return model, replace(config, draft_model_config=draft)


def draft_parallel(draft: ModelConfig, parallel: ParallelConfig) -> ParallelConfig:
    """How ranks share a model that drafts."""
    has_experts = draft.decoder is not None and draft.decoder.has_experts
    is_ep = parallel.enable_expert_parallel and has_experts
    return replace(parallel, enable_expert_parallel=is_ep)


def _check_parallel(method: str, parallel: ParallelConfig) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise draft_error(
            f"method {method} needs --pipeline-parallel-size 1: a draft reads what the first and "
            f"the last stage have; ngram takes any"
        )
    if parallel.is_in_lock_step:
        raise draft_error(
            f"method {method} needs engines that step by themselves: leave out "
            f"--enable-expert-parallel or --data-parallel-size; ngram takes both"
        )


def _draft_model(name: str, model: ModelConfig, device: Device) -> ModelConfig:
    draft = ModelConfig.load(
        name,
        dtype=model.dtype,
        device=device,
        load_format=model.load_format,
        skip_tokenizer_init=True,
        enforce_eager=model.enforce_eager,
        seed=model.seed,
    )
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"it has a vocabulary of {draft.vocab_size} tokens and {model.model} one of "
            f"{model.vocab_size}: take a model with the same"
        )
    if draft.has_recurrent_states:
        raise ConfigError(
            f"it has layers with recurrent states ({draft.model_type}), which cannot take draft "
            f"tokens back: take a model whose layers are all attention"
        )
    return replace(draft, max_model_len=min(draft.max_model_len, model.max_model_len))
