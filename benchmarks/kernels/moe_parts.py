"""What bench_moe.py times besides backends: small kernels alone, and all kernels of a layer's
mixture of experts in one captured graph."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from gpu_timing import replay_microseconds
from torch import Tensor

from vllm.architectures.decoder import layer_prefix
from vllm.architectures.registry import builtin_config
from vllm.architectures.router import Router
from vllm.config import VllmConfig
from vllm.distributed.groups import total
from vllm.engine.arg_utils import EngineArgs
from vllm.executor.uniproc import make_selection
from vllm.kernels.activations import Activation, InputQuant
from vllm.kernels.interface import MoETensors
from vllm.kernels.select.problem import MoEProblem
from vllm.model_executor.model_loader import _fill_randomly, model_context
from vllm.model_executor.models.decoder import DecoderLayer, Rotaries
from vllm.model_executor.weights import kernel_layers, model_slots
from vllm.ops.fp8_quant import ScaleLayout

NUM_LAYERS, NUM_ROUNDS = 4, 3
EPS = 1e-6


def part_microseconds(
    problem: MoEProblem, tensors: MoETensors, x: Tensor, ids: Tensor
) -> dict[str, float]:
    """Each small kernel alone, in a row of calls over memory of their own: a sum of these is more
    than what they take in a layer, where each may begin while the one before it ends.

    x [T, hidden]; ids [calls, T, top_k].
    """
    from vllm.kernels import cuda_ops
    from vllm.kernels.backends.torch import DenseKernel
    from vllm.kernels.triton import moe, moe_router, moe_rows

    experts = moe.Experts(problem, tensors)
    plan, num_experts = experts.plan(len(x)), problem.num_experts
    num_pairs, hidden = ids[0].numel(), problem.hidden
    weights = torch.rand(len(x), problem.top_k, device=x.device)
    gates = torch.randn(len(ids), num_experts, hidden, device=x.device).bfloat16() / hidden**0.5
    linear = torch.nn.functional.linear
    logits, routing = linear(x, gates[0]), Router(num_experts, problem.top_k, True)
    sorted_rows = moe_rows.sort(ids[0], num_experts, block_m=plan.block_m)
    layout = moe_rows.Rows(num_pairs, is_row_major=True)
    between = torch.randn(num_pairs, 2 * problem.intermediate, device=x.device).bfloat16()
    out = torch.randn(num_pairs, hidden, device=x.device).bfloat16()
    residual, norm_weight = x.clone(), torch.ones(hidden, device=x.device)
    quant = InputQuant(ScaleLayout.ROW_MAJOR)
    kept = InputQuant(ScaleLayout.ROW_MAJOR, keeps_source=True)
    tokens = quant.quantise(x)
    parts: dict[str, Callable[[int], object]] = {
        "norm": lambda i: cuda_ops.fused_add_rms_norm(x, residual, norm_weight, EPS),
        "norm, quantised": lambda i: quant.add_rms_norm(x, residual, norm_weight, EPS),
        "norm, quantised and kept": lambda i: kept.add_rms_norm(x, residual, norm_weight, EPS),
        "router's product": lambda i: linear(x, gates[i]),
        "choice": lambda i: moe_router.route(logits, problem.top_k, True),
        "product and choice by ours": lambda i: moe_router.choose_experts(
            x, DenseKernel(gates[i], linear), routing
        ),
        "sort": lambda i: moe_rows.sort(ids[i], num_experts, block_m=plan.block_m),
        "quantise": lambda i: moe_rows.quantise(x),
        "quantise into rows": lambda i: moe_rows.spread(x, sorted_rows.positions, layout),
        "activate": lambda i: moe_rows.activate(between, sorted_rows.positions, layout),
        "combine": lambda i: moe_rows.combine(out, weights, sorted_rows.positions, num_experts),
        "combine, norm, quantised": lambda i: moe_rows.ExpertRows(
            out, weights, sorted_rows.positions, num_experts
        ).add_rms_norm(residual, norm_weight, EPS, quant),
        "all but combine, of floats": lambda i: experts.pair_rows(x, ids[i], plan),
        "all but combine, of quantised": lambda i: experts.pair_rows(tokens, ids[i], plan),
    }
    return {name: _alone(part, len(ids)) for name, part in parts.items()}


def _alone(part: Callable[[int], object], num_calls: int) -> float:
    return replay_microseconds([lambda i=i: part(i) for i in range(num_calls)], num_replays=10)


# ---------------------------------------------------------------- whole layers


def make_layers(model: str, device: str = "cuda") -> list[DecoderLayer]:
    """Decoder layers of a published model with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(builtin_config(model)))
        config = EngineArgs.from_keywords(
            model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096
        ).create_engine_config()
    return build_layers(config, device)


def build_layers(config: VllmConfig, device: str) -> list[DecoderLayer]:
    context = model_context(config, make_selection(config), None)
    with torch.device(device):
        rotaries: Rotaries = {}
        layers = [
            DecoderLayer(context, context.decoder.layers[i], layer_prefix(i), rotaries)
            for i in range(NUM_LAYERS)
        ]
        for layer in layers:
            _fill_randomly(model_slots(layer), 0, device)
            for part in kernel_layers(layer):
                part.make_kernel()
    return layers


def run_layer(
    layer: DecoderLayer, x: Tensor, residual: Tensor, gives_floats: bool, adds_up: bool
) -> Activation:
    """From what attention adds to the residual to the input of the next layer's mixer.

    gives_floats: whatever experts ask for. adds_up: in a launch of its own.
    """
    reader = None if gives_floats else layer.mlp.reader
    added = layer.mlp(layer.post_attention_layernorm.add(x, residual, reader))
    added = total(added) if adds_up else added
    return layer.input_layernorm.add(added, residual, layer.mixer.reader)


@contextmanager
def most_split(num_tokens: int) -> Iterator[None]:
    from vllm.kernels.triton import moe_router

    before, moe_router.MOST_SPLIT = moe_router.MOST_SPLIT, num_tokens
    try:
        yield
    finally:
        moe_router.MOST_SPLIT = before


@torch.inference_mode()
def layer_microseconds(layers: Sequence[DecoderLayer], num_tokens: int) -> dict[str, float]:
    """A layer from the norm before its experts to the one after them, waits included: the time of a
    graph of several layers, over their number. With one saving left out at a time, and with none.
    """
    hidden = layers[0].mlp.gate.input_size
    shape = (NUM_ROUNDS * len(layers), 2, num_tokens, hidden)
    inputs = torch.randn(shape, device="cuda").bfloat16()

    def time(gives_floats: bool = False, adds_up: bool = False) -> float:
        def run(i: int) -> object:
            return run_layer(layers[i % len(layers)], *inputs[i], gives_floats, adds_up)

        return _alone(run, len(inputs))

    found = {
        "now": time(),
        "experts given floats": time(gives_floats=True),
        "sums apart from the norm": time(adds_up=True),
    }
    with most_split(-1):
        found["product by torch"] = time()
        found["all three"] = time(gives_floats=True, adds_up=True)
    return found
