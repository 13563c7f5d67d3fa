"""A serving engine for large language models that chooses the right FP8 or FP4 kernel.

`from vllm import LLM, SamplingParams` loads them on first use: `import vllm` alone is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
    from vllm.sampling_params import PoolingParams, SamplingParams

_MODULES = {
    "LLM": "vllm.entrypoints.llm",
    "SamplingParams": "vllm.sampling_params",
    "PoolingParams": "vllm.sampling_params",
    "RequestOutput": "vllm.outputs",
    "PoolingRequestOutput": "vllm.outputs",
    "CompletionOutput": "vllm.outputs",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'vllm' has no attribute {name!r}")
