"""compressed-tensors checkpoints (vllm/formats/readers/compressed_tensors.py)."""

from vllm.formats.readers.compressed_tensors import CompressedTensorsConfig

__all__ = ["CompressedTensorsConfig"]
