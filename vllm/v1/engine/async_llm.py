"""The import path of AsyncLLM."""

from vllm.engine.async_llm import AsyncLLM as AsyncLLM
