"""Values that name how a tensor is quantised."""

from vllm.utils.fp8 import GroupShape, get_fp8_min_max

__all__ = ["GroupShape", "get_fp8_min_max"]
