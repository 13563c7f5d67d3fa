"""The import path of LLMEngine."""

from vllm.engine.llm_engine import LLMEngine as LLMEngine
