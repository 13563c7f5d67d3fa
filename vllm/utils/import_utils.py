"""What can be imported, and what must not be."""

import sys

from vllm import envs
from vllm.platforms.libraries import is_usable


def has_deep_gemm() -> bool:
    """Whether DeepGEMM is usable here: a version that imports and then fails is not."""
    return is_usable("deep_gemm")


def has_flashinfer() -> bool:
    """Whether FlashInfer is usable here, not merely installed."""
    return is_usable("flashinfer")


def hide_torch() -> None:
    """Makes torch impossible to import in this process, unless it is imported already.

    transformers imports torch wherever it finds it. A process that only tokenises saves 200 MB
    and most of a second of start-up, which on a small machine the engine beside it needs.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        envs.set_for_children("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
