"""The attention of one layer: the kernel the selector chose, with its part of the KV cache."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from vllm.architectures.decoder import SINKS, CachedAttention
from vllm.kernels import registry
from vllm.kernels.problems import attention_problems
from vllm.logger import get_logger
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.quantization.kv_cache import Fp8KVCacheMethod
from vllm.model_executor.weights import FLOATS, Slot, empty_parameter, finite_into
from vllm.ops.paged_attention import CacheTarget, GraphPlanner, PagedAttention
from vllm.utils.torch_utils import SHORT_NAMES

logger = get_logger(__name__)


class Attention(nn.Module):
    """q [T, heads, head_dim], k and v [T, kv heads, head_dim] -> [T, heads * head_dim]. group: of
    the cache, whose block tables it takes; known when the cache is allocated."""

    kernel: PagedAttention
    group = 0

    def __init__(self, ctx: ModelContext, prefix: str, spec: CachedAttention):
        super().__init__()
        self.prefix = prefix = prefix + spec.name
        self.cache_spec = spec.cache
        self.cache_method = Fp8KVCacheMethod()
        self.sinks: nn.Parameter | None = None
        self.sinks_name = f"{self.prefix.rpartition('.')[0]}.{spec.sinks}"
        if spec.variant == SINKS:
            rank = ctx.parallel.tensor
            one_each = replace(spec.heads, unit=1)
            self.own_heads = slice(*one_each.span(rank.rank, rank.size))
            self.num_heads = spec.heads.count
            own = len(range(self.num_heads)[self.own_heads])
            self.sinks = empty_parameter(own, dtype=torch.float32)
        problem, writing = attention_problems(
            spec, ctx.parallel.tensor.size, ctx.kv_cache_format, SHORT_NAMES[ctx.dtype]
        )
        self.decision = ctx.selection.choose(prefix, problem)
        self.writing = ctx.selection.choose(prefix, writing)

    def slots(self) -> dict[str, Slot]:
        slots = self.cache_method.slots(self.prefix)
        if self.sinks is None:
            return slots
        write = finite_into(self.sinks.data, "sinks")
        own = Slot((self.num_heads,), FLOATS, write, (self.own_heads,))
        return slots | {self.sinks_name: own}

    def make_kernel(self) -> None:
        writer = registry.maker(self.writing).kv_quant(self.writing.problem)
        kernel: PagedAttention = registry.maker(self.decision).attention(
            self.decision.problem, writer
        )
        self.kernel = kernel
        if self.sinks is not None:
            kernel.sinks, self.sinks = self.sinks.data, None
        self.cache_method.apply(self.kernel)

    def target(self, v: Tensor, batch: ForwardBatch) -> CacheTarget | None:
        """Where K and V are to be written while K is rotated; None where `forward` does it."""
        return self.kernel.target(v, batch.groups[self.group])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        return self.kernel(q, k, v, batch.groups[self.group]).flatten(1)


def planners(model: nn.Module) -> list[tuple[GraphPlanner, int]]:
    """Of the layers whose kernel the host plans, each once for every cache group."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    found = dict.fromkeys((layer.kernel.planner, layer.group) for layer in layers)
    return [(planner, group) for planner, group in found if planner is not None]


def log_cache_scales(model: nn.Module) -> None:
    """One line where the cache is in FP8, or the checkpoint is made for one that is."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    is_fp8 = any(layer.kernel.problem.format == "fp8" for layer in layers)
    num_scaled = sum(bool(layer.cache_method.scales) for layer in layers)
    if is_fp8 and num_scaled:
        logger.info("FP8 KV cache: %d layers with the checkpoint's calibrated scales", num_scaled)
    elif is_fp8:
        logger.info("FP8 KV cache: scale 1, for the checkpoint has no calibrated ones")
    elif num_scaled:
        logger.info(
            "The checkpoint's calibrated scales are of an FP8 KV cache and not used in this one; "
            "--kv-cache-dtype fp8 uses them"
        )
