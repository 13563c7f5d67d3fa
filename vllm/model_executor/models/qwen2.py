"""Qwen2 and Qwen2.5: Llama with biased QKV and, in some layers of some models, a window."""

from typing import Any

from vllm.model_executor.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen2Attention(LlamaAttention):
    @staticmethod
    def qkv_bias(config: Any) -> bool:
        return True

    @staticmethod
    def output_bias(config: Any) -> bool:
        return False

    @staticmethod
    def sliding_window(config: Any, layer: int) -> int:
        slides = config.layer_types[layer] == "sliding_attention"
        return int(config.sliding_window) if slides else 0


class Qwen2ForCausalLM(LlamaForCausalLM):
    attention = Qwen2Attention
