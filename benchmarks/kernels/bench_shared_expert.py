"""Times the experts of a Qwen3.5 layer, the shared expert beside the routed ones or after them.

    python benchmarks/kernels/bench_shared_expert.py [--tokens N ...] [--out DIR]

From the normed tokens to what is added to the residual: router, routed experts, shared expert and
its gate. Medians of CUDA-graph replays over several layers with random weights, so that caches are
cold. `alone`: routed experts without the shared one.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from gpu_results import write_results
from gpu_timing import replay_microseconds
from torch import Tensor

from vllm.architectures.registry import builtin_config
from vllm.distributed.groups import total
from vllm.engine.arg_utils import EngineArgs
from vllm.executor.uniproc import make_selection
from vllm.model_executor.model_loader import _fill_randomly, model_context
from vllm.model_executor.models.feed_forward import SparseMoE
from vllm.model_executor.weights import kernel_layers, model_slots

MODEL = "Qwen/Qwen3.5-35B-A3B-FP8"
TOKENS = (1, 8, 64, 256, 2048)
NUM_LAYERS, NUM_INPUTS = 4, 8


def make_layers() -> list[SparseMoE]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(builtin_config(MODEL)))
        args = EngineArgs.from_keywords(
            model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096
        )
        config = args.create_engine_config()
    context = model_context(config, make_selection(config), None)
    with torch.device("cuda"):
        spec = context.decoder.layers[0].feed_forward
        layers = [SparseMoE(context, f"layers.{i}.", spec) for i in range(NUM_LAYERS)]
        for layer in layers:
            _fill_randomly(model_slots(layer), 0, "cuda")
            for part in kernel_layers(layer):
                part.make_kernel()
    return layers


def alone(layer: SparseMoE, x: Tensor) -> Tensor:
    weights, ids, _ = layer.ops.choose_experts(x, layer.gate.kernel, layer.router)
    return total(layer.experts(x, weights, ids))


def after(layer: SparseMoE, x: Tensor) -> Tensor:
    weights, ids, gate = layer.ops.choose_experts(x, layer.gate.kernel, layer.router)
    shared = layer._gated(layer.shared_expert(x), gate)
    return total(layer.experts(x, weights, ids)).add_(shared)


WAYS: dict[str, Callable[[SparseMoE, Tensor], Tensor]] = {
    "alone": alone, "after": after, "beside": lambda layer, x: total(layer(x)),
}  # fmt: skip


def measure(layers: Sequence[SparseMoE], num_tokens: int) -> dict[str, float]:
    hidden = layers[0].gate.input_size
    shape = (NUM_INPUTS, num_tokens, hidden)
    inputs = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return {
        name: round(
            replay_microseconds(
                [
                    lambda way=way, x=x, layer=layers[i % NUM_LAYERS]: way(layer, x)
                    for i, x in enumerate(inputs)
                ]
            ),
            2,
        )
        for name, way in WAYS.items()
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, help="folder that receives shared_expert.json")
    arguments = parser.parse_args()
    layers, found = make_layers(), {}
    print(f"{'tokens':>7}" + "".join(f"{name:>10}" for name in WAYS) + "  (us)")
    for num_tokens in arguments.tokens:
        found[num_tokens] = own = measure(layers, num_tokens)
        print(f"{num_tokens:>7}" + "".join(f"{own[name]:>10.1f}" for name in WAYS), flush=True)
        if arguments.out:
            write_results(arguments.out, "shared_expert.json", model=MODEL, microseconds=found)


if __name__ == "__main__":
    main()
