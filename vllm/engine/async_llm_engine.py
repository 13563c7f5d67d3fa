"""The older import path and name of AsyncLLM."""

from vllm.engine.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
