"""Quantising a layer's input to FP8 (E4M3)."""

from vllm.ops.quant_fp8 import QuantFP8

__all__ = ["QuantFP8"]
