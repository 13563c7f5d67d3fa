"""The attention of one layer: the kernel the selector chose, with its part of the KV cache."""

from torch import Tensor, nn

from vllm.kernels import registry
from vllm.kernels.problem import AttentionProblem, KVQuantProblem
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.utils.torch_utils import SHORT_NAMES


class Attention(nn.Module):
    """q [T, heads, head_dim], k and v [T, kv heads, head_dim] -> [T, heads * head_dim]."""

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        sliding_window: int = 0,
    ):
        super().__init__()
        problem = AttentionProblem(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            format=ctx.kv_cache_format,
            dtype=SHORT_NAMES[ctx.dtype],
            sliding_window=sliding_window,
        )
        writing = KVQuantProblem(num_kv_heads, head_dim, ctx.kv_cache_format, problem.dtype)
        attend = ctx.selection.choose(prefix, problem)
        write = ctx.selection.choose(prefix, writing)
        assert attend.chosen is not None and write.chosen is not None
        writer = registry.backend(write.chosen).kv_quant(writing)
        self.kernel = registry.backend(attend.chosen).attention(problem, writer)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        return self.kernel(q, k, v, batch.attention).flatten(1)
