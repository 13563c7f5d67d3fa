"""NVIDIA ModelOpt checkpoints (vllm/formats/readers/modelopt.py)."""

from vllm.formats.readers.modelopt import (
    ModelOptConfig,
    ModelOptMixedConfig,
    ModelOptNvFp4Config,
)

__all__ = ["ModelOptConfig", "ModelOptMixedConfig", "ModelOptNvFp4Config"]
