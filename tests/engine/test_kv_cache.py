"""How large the KV cache and the recurrent states are, and what is said where they do not fit."""

import logging
import re

import pytest

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.worker import kv_cache


def load(folder, **options) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **options)


def test_a_context_may_fill_the_cache_and_no_more(checkpoint):
    folder = checkpoint("llama")
    options = {"block_size": 16, "num_gpu_blocks_override": 4}
    whole = load(folder, max_model_len=64, **options)
    assert whole.llm_engine.core.config.model_config.max_model_len == 64
    with pytest.raises(ConfigError, match="holds 64 tokens, fewer than --max-model-len 65"):
        load(folder, max_model_len=65, **options)
    assert load(folder, **options).llm_engine.core.config.model_config.max_model_len == 64


def test_a_cache_has_as_many_blocks_as_the_bytes_that_are_given_hold(checkpoint, monkeypatch):
    folder = checkpoint("llama")
    one = load(folder, num_gpu_blocks_override=2).llm_engine.core.config.model_config
    block_bytes = 16 * kv_bytes_per_token(folder)
    given = load(folder, kv_cache_memory_bytes=5 * block_bytes + 1).llm_engine.core.config
    assert one.max_model_len == 32 and given.model_config.max_model_len == 5 * 16
    with pytest.raises(ConfigError, match=r"for 2 of them: .* raise --kv-cache-memory-bytes"):
        load(folder, kv_cache_memory_bytes=block_bytes)
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 2097152 is more than the 0\.0"):
        load(folder, kv_cache_memory_bytes=2 << 20)


def kv_bytes_per_token(folder) -> int:
    """Keys and values in float32 of every layer."""
    config = EngineArgs.from_keywords(model=folder).create_engine_config().model_config
    text = config.hf_text_config
    return 2 * 4 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim


def test_a_cache_of_one_block_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(kv_cache, "_num_blocks_on_cpu", lambda *given: 1)
    with pytest.raises(ConfigError, match="no room for 2 of them: lower it, or raise VLLM_CPU_KV"):
        load(checkpoint("llama"))


def test_a_cache_that_memory_does_not_hold_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 1 << 30)
    with pytest.raises(
        ConfigError, match=r"--num-gpu-blocks-override .* 1.0 GiB of memory are free"
    ):
        load(checkpoint("llama"), num_gpu_blocks_override=10**7)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    with pytest.raises(ConfigError, match=r"VLLM_CPU_KVCACHE_SPACE=1.5 GiB is more than the 1.0"):
        load(checkpoint("llama"))


def test_what_is_promised_to_states_is_not_given_to_the_cache(checkpoint, monkeypatch):
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 100 << 20)
    config = EngineArgs.from_keywords(
        model=checkpoint("llama"), max_num_seqs=256
    ).create_engine_config()
    found = [kv_cache._num_blocks_on_cpu(1 << 20, config, promised << 20) for promised in (0, 60)]
    assert found == [50, 20]


def test_so_many_states_as_are_told_fit(checkpoint, monkeypatch):
    monkeypatch.setattr(kv_cache, "_free_memory", lambda config, device: 1 << 20)
    folder = checkpoint("qwen3_5")
    options = {"enable_prefix_caching": True, "num_state_snapshots": 3, "max_model_len": 64}
    with pytest.raises(ConfigError, match="so many recurrent states") as caught:
        load(folder, max_num_seqs=4096, **options)
    most = int(re.search(r"to at most (\d+)", str(caught.value))[1])
    assert most > 1
    load(folder, max_num_seqs=most, **options)
    with pytest.raises(ConfigError, match=f"to at most {most},"):
        load(folder, max_num_seqs=most + 1, **options)


def test_states_of_draft_tokens_are_counted_and_said(checkpoint, monkeypatch, caplog):
    drafts = {"method": "ngram", "num_speculative_tokens": 5}
    options = {"max_num_seqs": 3, "max_model_len": 64}
    with caplog.at_level(logging.INFO, "vllm"):
        llm = load(checkpoint("qwen3_5"), speculative_config=drafts, **options)
    assert "with those after 15 draft tokens" in caplog.text
    layers = kv_cache.state_layers(llm.llm_engine.core.runner.model)
    assert {len(layer.state) for layer in layers} == {1 + 3 + 15}
    one = sum(layer.cache_spec.request_bytes(4, 1) for layer in layers)
    monkeypatch.setattr(kv_cache, "_free_memory", lambda config, device: (1 + 3 + 14) * one)
    load(checkpoint("qwen3_5"), **options)
    with pytest.raises(ConfigError, match=r"and 15 draft tokens \(--speculative-config\): so many"):
        load(checkpoint("qwen3_5"), speculative_config=drafts, **options)
