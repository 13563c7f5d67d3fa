"""How much memory the largest steps take on a GPU, beside weights and caches."""

from collections.abc import Sequence

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.distributed.parallel import Parallel
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.decoder import CausalLM
from vllm.model_executor.models.eagle3 import Eagle3Head
from vllm.worker.cuda_graph import PromptShape
from vllm.worker.first_calls import FirstCalls
from vllm.worker.step_inputs import StepInputs


def peak_memory(
    models: Sequence[CausalLM | Eagle3Head],
    calls: FirstCalls,
    config: VllmConfig,
    parallel: Parallel,
    shapes: Sequence[PromptShape],
    device: torch.device,
) -> int:
    """Bytes of activations at their peak, measured without a KV cache: all tokens of one request,
    and as many requests as possible; 0 on a CPU. models: the model, and what drafts for it. shapes:
    to capture; the one of most tokens and that of most requests are measured."""
    if device.type == "cpu":
        return 0
    num_tokens = config.scheduler_config.max_num_batched_tokens
    num_seqs, block_size = config.scheduler_config.max_num_seqs, config.cache_config.block_size
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for module in nn.ModuleList(models).modules():
        if isinstance(module, Attention):
            module.kernel.allocate(1, block_size, device)
    parallel.num_tokens_across_dp = (num_tokens,) * parallel.data.size
    inputs = StepInputs(
        num_tokens, num_seqs, 1, block_size, device,
        num_groups=len(config.cache_groups), keeps_draft_states=config.num_draft_states > 0,
    )  # fmt: skip
    longest, most = config.model_config.max_model_len, min(num_seqs, num_tokens)
    calls.of_attention(inputs, [(num_tokens, 1, num_tokens), (most, most, longest)])
    torch.cuda.reset_peak_memory_stats()
    for count, max_seq_len in ((1, num_tokens), (most, longest)):
        for model in models:
            model.dry_run(inputs.padding(num_tokens, count, max_seq_len), config.max_num_logits)
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    if not shapes:
        return peak_bytes
    torch.cuda.reset_peak_memory_stats()  # graphs keep their activations allocated
    of_prompts = [shape for shape in shapes if shape.longest == shape.tokens]
    for shape in {shapes[-1], max(of_prompts, key=lambda one: (one.seqs, one.tokens))}:
        parallel.num_tokens_across_dp = (shape.tokens,) * parallel.data.size
        models[0](inputs.padding(shape.tokens, shape.seqs, longest))
    torch.cuda.synchronize()
    return peak_bytes + torch.cuda.max_memory_allocated() - before
