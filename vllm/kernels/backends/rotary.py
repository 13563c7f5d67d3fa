"""Our CUDA kernel that norms and rotates q and k, which can put K and V into the cache on its way.

Whoever rotates asks an attention layer where its keys go (`PagedAttention.target`).
"""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.backends import shared
from vllm.kernels.select.problem import KVQuantProblem, Problem
from vllm.kernels.select.reason import Reason
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import NATIVE

if TYPE_CHECKING:
    from vllm.ops.paged_attention import CacheWriter


def _head_size(problem: Problem) -> list[Reason]:
    assert isinstance(problem, KVQuantProblem)
    text = f"head_dim = {problem.head_dim} is more than 256"
    return shared.shape_reasons((problem.head_dim > 256, text))


_Spec = partial(
    KernelSpec,
    backend="rotary",
    family="kv_quant",
    devices=frozenset({"sm_8x", "sm_9x", "sm_10x", "sm_12x"}),
    libs=((NATIVE, ""),),
    native=("cuda_layers",),
    native_archs=shared.NATIVE_FROM_SM80,
    check=_head_size,
)

SPECS = (
    # It casts to E4M3 alone.
    *(_Spec(formats=frozenset({name}), dtypes=frozenset({name})) for name in sorted(shared.FLOATS)),
    _Spec(formats=frozenset({"fp8"}), dtypes=shared.FLOATS),
)


def kv_quant(problem: KVQuantProblem) -> "CacheWriter":
    return None
