"""Makes ready before the first request what libraries compile on this machine."""

from collections.abc import Iterator

import torch
from torch import nn

from vllm import envs
from vllm.distributed.expert_exchange import AllToAll
from vllm.distributed.parallel import Parallel
from vllm.kernels import registry
from vllm.kernels.jit.caches import use_caches
from vllm.kernels.jit.monitor import MONITOR
from vllm.kernels.jit.ready import NVCC, WarmUp, needed_calls
from vllm.kernels.selection import Selection
from vllm.kernels.spec import COMPILERS, Decision
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import Linear
from vllm.utils.torch_utils import dtype_of


def begin_warm_up(selection: Selection, max_tokens: int) -> WarmUp | None:
    """Starts to compile what the chosen kernels call with up to `max_tokens` tokens, by distinct
    kernel; None where that is nothing."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    needed = needed_calls([decision for _, decision in selection.records], max_tokens)
    memory = use_caches()
    if not needed or memory is None:
        return None
    library = selection.libs.get("deep_gemm")
    found = WarmUp(memory, f"{library} on {device.name}, {device.multi_processor_count} SMs")
    found.begin(needed)
    return found


def finish_warm_up(
    found: WarmUp | None, model: nn.Module, max_tokens: int, parallel: Parallel
) -> None:
    """Waits for it, and calls the layers whose kernels compile at a first call. What is not
    compiled in VLLM_KERNEL_COMPILE_SECONDS and has a stand-in goes on in the background."""
    if found is not None:
        found.finish(envs.VLLM_KERNEL_COMPILE_SECONDS)
        MONITOR.made += found.compiled
    for layer in _compiling_layers(model):
        # Experts get the tokens of all engines in lock step together, or a row for each of theirs.
        most = max_tokens * (parallel.data.size if isinstance(layer, FusedMoE) else 1)
        if isinstance(layer, FusedMoE) and isinstance(layer.exchange, AllToAll):
            most *= layer.problem.top_k
        for num_tokens in token_counts(most):
            _call(layer, num_tokens)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def token_counts(most: int) -> list[int]:
    """Powers of two, and what is halfway between them, up to `most`: sizes of grids and buffers
    are rounded up to powers of two by kernels that are compiled for them."""
    counts = {most}
    power = 1
    while power < most:
        counts |= {power, min(most, power + power // 2)}
        power *= 2
    return sorted(counts)


def _compiling_layers(model: nn.Module) -> Iterator[Linear | FusedMoE]:
    """One for each problem whose kernel compiles at a first call; experts, whose rows are sorted by
    kernels that do. nvcc's are planned instead."""
    seen = set()
    for module in model.modules():
        if isinstance(module, Linear | FusedMoE) and module.problem not in seen:
            seen.add(module.problem)
            compiles = isinstance(module, FusedMoE) or _compilers(module.decision) - {NVCC}
            if compiles and not module.decision.is_emulated:
                yield module


def _compilers(decision: Decision) -> set[str]:
    specs = registry.winning_specs(decision)
    used = {name for spec in specs for name in (spec.compiles, *(lib for lib, _ in spec.libs))}
    return used & set(COMPILERS)


def _call(layer: Linear | FusedMoE, num_tokens: int) -> None:
    """With zeros, to experts in turn."""
    dtype = dtype_of(layer.problem.dtype)
    if isinstance(layer, Linear):
        layer.multiply(torch.zeros(num_tokens, layer.problem.k, dtype=dtype, device="cuda"))
        return
    problem, kernel = layer.problem, layer.kernel
    assert kernel is not None
    x = torch.zeros(num_tokens, problem.hidden, dtype=dtype, device="cuda")
    own = problem.num_experts // problem.cut_experts
    # Ranks that exchange rows hand over each of a token's experts by itself.
    top_k = 1 if isinstance(layer.exchange, AllToAll) else problem.top_k
    ids = torch.arange(num_tokens * top_k, device="cuda") % own
    ids = ids.view(num_tokens, top_k)
    kernel(x, torch.ones_like(ids, dtype=torch.float32), ids)
