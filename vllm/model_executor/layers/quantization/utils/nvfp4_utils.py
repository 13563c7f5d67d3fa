"""NVFP4 quantisation and the layout of its scales (vllm/ops/nvfp4.py)."""

from vllm.ops.nvfp4 import nvfp4_dequantize, nvfp4_global_scale, nvfp4_quantize, swizzle_scales

__all__ = ["nvfp4_dequantize", "nvfp4_global_scale", "nvfp4_quantize", "swizzle_scales"]
