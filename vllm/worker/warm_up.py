"""Compiles the JIT kernels of libraries before the first request."""

import torch

from vllm import envs
from vllm.kernels.jit.caches import use_caches
from vllm.kernels.jit.monitor import MONITOR
from vllm.kernels.jit.ready import WarmUp, needed_calls
from vllm.kernels.selection import Selection


def begin_warm_up(selection: Selection, max_tokens: int) -> WarmUp | None:
    """Starts to compile the JIT kernels that the decisions call with up to `max_tokens` tokens;
    None where there are none."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    needed = needed_calls([decision for _, decision in selection.records], max_tokens)
    memory = use_caches()
    if not needed or memory is None:
        return None
    library = selection.libs.get("deep_gemm")
    found = WarmUp(memory, f"{library} on {device.name}, {device.multi_processor_count} SMs")
    found.begin(needed)
    return found


def finish_warm_up(found: WarmUp | None) -> None:
    """Waits for the compilation. After VLLM_KERNEL_COMPILE_SECONDS, kernels that have a fallback
    continue to compile in the background."""
    if found is not None:
        found.finish(envs.VLLM_KERNEL_COMPILE_SECONDS)
        MONITOR.made += found.compiled
