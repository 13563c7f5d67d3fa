"""Chooses the all2all backend of an expert-parallel layer."""

from functools import partial

from torch import Tensor

from vllm import envs
from vllm.distributed.all2all import All2All, AllGatherReduceScatter, Experts, NaiveAll2All
from vllm.distributed.deep_ep import DeepEPHighThroughput, DeepEPLowLatency
from vllm.distributed.groups import Addend, Group
from vllm.distributed.parallel import Parallel
from vllm.kernels.activations import Activation, unadded
from vllm.kernels.interface import MoEKernel

_BACKENDS = {
    "naive": NaiveAll2All,
    "allgather_reducescatter": AllGatherReduceScatter,
    "deepep_high_throughput": DeepEPHighThroughput,
    "deepep_low_latency": DeepEPLowLatency,
}


def make_all2all(parallel: Parallel, experts: Experts) -> All2All:
    """The backend that VLLM_ALL2ALL_BACKEND names; ConfigError where it is not available."""
    if parallel.expert.size == 1:
        return partial(_without_exchange, parallel.tensor)
    return _BACKENDS[envs.VLLM_ALL2ALL_BACKEND](parallel, experts)


def _without_exchange(
    group: Group, kernel: MoEKernel, x: Activation, weights: Tensor, ids: Tensor
) -> Addend:
    """No expert parallelism: every rank of `group` holds a shard of every expert."""
    if group.size == 1:
        return unadded(kernel, x, weights, ids)
    return group.partial(kernel(x, weights, ids))
