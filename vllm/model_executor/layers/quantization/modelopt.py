"""NVIDIA ModelOpt checkpoints (vllm/formats/readers/modelopt.py)."""

from vllm.formats.readers.modelopt import ModelOptConfig, ModelOptNvFp4Config

__all__ = ["ModelOptConfig", "ModelOptNvFp4Config"]
