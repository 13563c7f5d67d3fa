"""Every call that we make of FlashInfer's functions on Blackwell and of its experts, over small
tensors on the CPU; and whether the installed library takes such arguments."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import flashinfer_stand_in
import torch
from weight_only_cases import make_linear, make_moe

from vllm.kernels.activations import InputQuant, ScaleLayout
from vllm.kernels.flashinfer import linear as linear
from vllm.kernels.flashinfer import moe as moe
from vllm.kernels.interface import MoETensors

NUM_EXPERTS, HIDDEN, INNER, TOP_K, NUM_TOKENS = 4, 256, 128, 2, 5


def nvfp4_linear(shards: tuple[int, ...] = (128, 128), k: int = HIDDEN):
    """(tensors, weight float32 [N, K])."""
    tensors, wide = make_linear("nvfp4", shards, k)
    tensors.input_scale = torch.tensor(1 / 300)
    return tensors, wide


def nvfp4_experts():
    """(tensors, [(gate_up, down)] float32 of every expert); gate and up have own scales."""
    tensors, wide = make_moe("nvfp4", NUM_EXPERTS, HIDDEN, INNER)
    tensors.gate_up_input_scales = torch.rand(NUM_EXPERTS, 2) / 100 + 1e-3
    tensors.down_input_scales = torch.rand(NUM_EXPERTS, 1) / 100 + 1e-3
    return tensors, wide


def choice() -> tuple[torch.Tensor, torch.Tensor]:
    """The router's: weights [T, top_k], and experts, one of another rank."""
    ids = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(TOP_K, 1).indices
    ids[0, 1] = -1
    return torch.rand(NUM_TOKENS, TOP_K), ids


def tokens() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, HIDDEN).bfloat16()


def calls() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(module, function, arguments)."""
    x, routed = tokens(), choice()
    block, _ = make_linear("fp8-block", (128, 128), HIDDEN)
    experts, _ = make_moe("fp8-block", NUM_EXPERTS, HIDDEN, INNER)
    out = torch.empty_like(x)
    for path, layout in (("cutlass", ScaleLayout.ROW_MAJOR), ("trtllm", ScaleLayout.COLUMN_MAJOR)):
        yield (
            "flashinfer.gemm",
            "gemm_fp8_nt_groupwise",
            linear.block_arguments(InputQuant(layout).quantise(x), block, path),
        )
        (part,) = linear.nvfp4_parts(nvfp4_linear((128,))[0], path, None)
        q, scales = torch.empty(NUM_TOKENS, HIDDEN // 2), torch.empty(128, HIDDEN // 16)
        yield "flashinfer", "mm_fp4", part.arguments(q, scales, x.dtype)
    yield "flashinfer", "fp4_quantize", linear.quantise_arguments(x, torch.ones(1))
    for weights in (moe.block_weights(experts), moe.nvfp4_weights(nvfp4_experts()[0])):
        arguments = {**moe.cutlass_tokens(x, *routed), **weights, "output": out}
        yield "flashinfer.fused_moe", "cutlass_fused_moe", arguments
    quantised = InputQuant(ScaleLayout.COLUMN_MAJOR).quantise(x)
    arguments = {
        **moe.trtllm_tokens(quantised, *routed),
        **moe.trtllm_block_weights(experts, NUM_EXPERTS),
    }
    name = "trtllm_fp8_block_scale_routed_moe"
    yield "flashinfer.fused_moe", name, {**arguments, "output": out}
    quantise = moe.trtllm_nvfp4_quantise(x, torch.ones(1))
    yield "flashinfer", "fp4_quantize", quantise
    arguments = trtllm_nvfp4_arguments(nvfp4_experts()[0], x, *routed)
    name = "trtllm_fp4_block_scale_routed_moe"
    yield "flashinfer.fused_moe", name, {**arguments, "output": out}


def trtllm_nvfp4_arguments(
    tensors: MoETensors, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> dict[str, Any]:
    """Rows in the order of the stand-in."""
    inverse = moe.one_input_scale(tensors).reciprocal()
    given = flashinfer_stand_in.fp4_quantize(**moe.trtllm_nvfp4_quantise(x, inverse))
    tokens = moe.trtllm_nvfp4_tokens(*given, weights, ids)
    return {**tokens, **moe.trtllm_nvfp4_weights(tensors, NUM_EXPERTS, flashinfer_stand_in)}


def refused() -> list[str]:
    """Calls whose arguments the installed library has no places for."""
    wrong = []
    for module, name, arguments in calls():
        function: Callable[..., Any] = getattr(import_module(module), name)
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            wrong.append(f"{module}.{name}: {error}")
    return wrong
