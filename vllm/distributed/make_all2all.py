"""Chooses the all2all backend of an expert-parallel layer."""

from torch import Tensor

from vllm import envs
from vllm.distributed.all2all import All2All, AllGatherReduceScatter, Experts, NaiveAll2All
from vllm.distributed.groups import Addend
from vllm.distributed.parallel import Parallel
from vllm.kernels.activations import Activation, unadded
from vllm.kernels.interface import MoEKernel


def make_all2all(parallel: Parallel, experts: Experts) -> All2All:
    """The backend that VLLM_ALL2ALL_BACKEND names; ConfigError where it is not available."""
    if parallel.expert.size == 1:
        return _NoAll2All(parallel)
    backend = envs.VLLM_ALL2ALL_BACKEND
    if backend == "naive":
        return NaiveAll2All(parallel, experts)
    if backend == "allgather_reducescatter":
        return AllGatherReduceScatter(parallel, experts)
    from vllm.distributed.deep_ep import DeepEPHighThroughput, DeepEPLowLatency

    cls = DeepEPLowLatency if backend == "deepep_low_latency" else DeepEPHighThroughput
    return cls(parallel, experts)


class _NoAll2All:
    """No expert parallelism: every rank holds a shard of every expert."""

    def __init__(self, parallel: Parallel):
        self._group = parallel.tensor

    def __call__(self, kernel: MoEKernel, x: Activation, weights: Tensor, ids: Tensor) -> Addend:
        if self._group.size == 1:
            return unadded(kernel, x, weights, ids)
        return self._group.partial(kernel(x, weights, ids))
