"""Mistral: Llama, in older models with a sliding window in every layer."""

from typing import Any

from vllm.model_executor.models.llama import LlamaAttention, LlamaForCausalLM


class MistralAttention(LlamaAttention):
    @staticmethod
    def qkv_bias(config: Any) -> bool:
        return False

    @staticmethod
    def output_bias(config: Any) -> bool:
        return False

    @staticmethod
    def sliding_window(config: Any, layer: int) -> int:
        return int(getattr(config, "sliding_window", None) or 0)


class MistralForCausalLM(LlamaForCausalLM):
    attention = MistralAttention
