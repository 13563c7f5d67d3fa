"""The import path of the values that `LLM.get_metrics` returns."""

from vllm.engine.metrics_reader import Counter, Gauge, Histogram, Metric

__all__ = ["Counter", "Gauge", "Histogram", "Metric"]
