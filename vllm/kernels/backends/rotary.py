"""Our CUDA kernel that norms and rotates q and k, which can put K and V into the cache on its way.

Whoever rotates asks an attention layer where its keys go (`PagedAttention.target`).
"""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.select.problem import KVQuantProblem, Problem
from vllm.kernels.select.reason import Reason, Why
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import NATIVE

if TYPE_CHECKING:
    from vllm.ops.paged_attention import CacheWriter


def _head_size(problem: Problem) -> list[Reason]:
    assert isinstance(problem, KVQuantProblem)
    if problem.head_dim > 256:
        return [Reason(Why.SHAPE, f"head_dim = {problem.head_dim} is more than 256")]
    return []


_FLOATS = ("bf16", "fp16", "fp32")
_Spec = partial(
    KernelSpec,
    backend="rotary",
    family="kv_quant",
    devices=frozenset({"sm_8x", "sm_9x", "sm_10x", "sm_12x"}),
    libs=((NATIVE, ""),),
    native=("cuda_layers",),
    # Code for 8.0 runs on every later chip of its major version; the others need their own.
    native_archs=frozenset(
        {"80", "86", "87", "89", "90", "90a", "100", "100a", "100f", "103a"}
        | {"120", "120a", "120f", "121a"}
    ),
    check=_head_size,
)

SPECS = (
    # It casts to E4M3 alone.
    *(_Spec(formats=frozenset({name}), dtypes=frozenset({name})) for name in _FLOATS),
    _Spec(formats=frozenset({"fp8"}), dtypes=frozenset(_FLOATS)),
)


def kv_quant(problem: KVQuantProblem) -> "CacheWriter":
    return None
