"""Makes ready before the first request what libraries compile on this machine."""

import torch

from vllm import envs
from vllm.kernels.jit.caches import use_caches
from vllm.kernels.jit.monitor import MONITOR
from vllm.kernels.jit.ready import WarmUp, needed_calls
from vllm.kernels.selection import Selection


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


def finish_warm_up(found: WarmUp | None) -> None:
    """Waits for it. What is not compiled in VLLM_KERNEL_COMPILE_SECONDS and has a stand-in goes on
    in the background."""
    if found is not None:
        found.finish(envs.VLLM_KERNEL_COMPILE_SECONDS)
        MONITOR.made += found.compiled
