"""A serving engine for large language models that chooses the right FP8 or FP4 kernel.

`from vllm import LLM, SamplingParams` loads them on first use: `import vllm` alone is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.version import __version__, __version_tuple__

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from vllm.engine.llm_engine import LLMEngine
    from vllm.entrypoints.llm import LLM
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.model_executor.models import ModelRegistry
    from vllm.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
    from vllm.sampling_params import PoolingParams, SamplingParams

_MODULES = {
    "LLM": "vllm.entrypoints.llm",
    "LLMEngine": "vllm.engine.llm_engine",
    "AsyncLLMEngine": "vllm.engine.async_llm_engine",
    "EngineArgs": "vllm.engine.arg_utils",
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "SamplingParams": "vllm.sampling_params",
    "PoolingParams": "vllm.sampling_params",
    "PromptType": "vllm.inputs",
    "TextPrompt": "vllm.inputs",
    "TokensPrompt": "vllm.inputs",
    "ModelRegistry": "vllm.model_executor.models",
    "RequestOutput": "vllm.outputs",
    "PoolingRequestOutput": "vllm.outputs",
    "CompletionOutput": "vllm.outputs",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "ModelRegistry",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'vllm' has no attribute {name!r}")
