"""What can be imported, and what must not be."""

import sys

from vllm import envs


def hide_torch() -> None:
    """Makes torch impossible to import in this process, unless it is imported already.

    transformers imports torch wherever it finds it. A process that only tokenises saves 200 MB
    and most of a second of start-up, which on a small machine the engine beside it needs.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        envs.set_for_children("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
