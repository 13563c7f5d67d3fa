"""What DeepGEMM's UE8M0 scales do to two models, end to end through `vllm serve`.

    python benchmarks/accuracy/ue8m0_models.py FILE [--only arith demo layers]
        [--bf16 FOLDER] [--gsm8k DIR] [--gpu]

Writes FILE (JSON), part by part; parts that are not run stay as they are in it.
  arith   the model of tests/evals/arith: answers to its 1,319 held-out problems, to as many with
          numbers up to 1.3 times as large as in training, and what it thinks of the tokens of
          held-out and of stretched problems. --bf16: what tests/evals/arith/train.py wrote.
  demo    the demo model on 100 GSM8K questions with their answers (--gsm8k).
  layers  errors of every layer of the arithmetic model on its own activations (--bf16).
--gpu: arith and demo with the kernels themselves on an H100, where DeepGEMM takes scales of both
kinds, all servers at once. DeepGEMM has only the demo model's down_proj (the others have K = 576).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import exp, fsum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from entrypoints.serving import started_server
from evals.arith import problems, texts
from ue8m0_error import machine, measure_layer, rounded

from vllm.evals import gsm8k, served
from vllm.evals.gsm8k import Server
from vllm.evals.paired import Position, compare, compare_answers

ANSWERS = {"held-out": 1.0, "stretched": 1.3}
TEXTS = {"held-out": (100, 1.0), "stretched": (400, texts.STRETCH)}
PARTS = ("arith", "demo", "layers")
BOTH, DENSE = ("linear", "moe"), ("linear",)


@dataclass(frozen=True)
class Numbers:
    """How one configuration computes. backend: value of --linear-backend and --moe-backend."""

    name: str
    backend: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    is_bf16: bool = False
    answers: bool = True
    more: tuple[str, ...] = ()

    def flags(self, families: tuple[str, ...]) -> list[str]:
        pairs = ((f"--{family}-backend", self.backend) for family in families if self.backend)
        return [*(word for pair in pairs for word in pair), *self.more]

    def command(self, families: tuple[str, ...]) -> str:
        words = [f"{name}={value}" for name, value in self.variables]
        return " ".join([*words, "vllm serve MODEL", *self.flags(families)])


CONFIGURATIONS = (
    Numbers("bf16", is_bf16=True),
    Numbers("fp8, activations float32"),
    Numbers("cutlass on sm_100", "emulate:cutlass@sm_100"),
    Numbers("deep_gemm on sm_100", "emulate:deep_gemm@sm_100"),
    Numbers("automatic on sm_100", "emulate:sm_100"),
    Numbers("rule broken on sm_100", "emulate:sm_100", (("VLLM_USE_DEEP_GEMM", "1"),),
            answers=False),
    Numbers("deep_gemm on sm_90", "emulate:deep_gemm@sm_90", answers=False),
    Numbers("deep_gemm on sm_90, E8M0=1", "emulate:deep_gemm@sm_90",
            (("VLLM_USE_DEEP_GEMM_E8M0", "1"),), answers=False),
)  # fmt: skip
REFERENCES = ("bf16", "fp8, activations float32", "cutlass on sm_100")
# K = 576 is no size that DeepGEMM takes: its arithmetic, without its limits.
DEMO_CONFIGURATIONS = (
    *CONFIGURATIONS[:2],
    Numbers("float32 scales", "emulation"),
    Numbers("UE8M0", "emulation-ue8m0"),
)
DEMO_REFERENCES = ("bf16", "float32 scales")

_CEIL = (("VLLM_USE_DEEP_GEMM_E8M0", "1"),)
# Several servers share the device; graphs change no number.
_SHARED = ("--gpu-memory-utilization", "0.08", "--enforce-eager")
_DOWN = (*_SHARED, "--kernel", "*.down_proj=deep_gemm")
GPU_CONFIGURATIONS = (
    Numbers("bf16", is_bf16=True, more=_SHARED),
    Numbers("fp8, activations bf16", "marlin", more=_SHARED),
    Numbers("cutlass and triton", more=_SHARED, variables=(("VLLM_USE_DEEP_GEMM", "0"),)),
    Numbers("deep_gemm, float32 scales", "deep_gemm", more=_SHARED),
    Numbers("deep_gemm, FLOAT32_CEIL_UE8M0", "deep_gemm", _CEIL, more=_SHARED),
)
GPU_REFERENCES = ("bf16", "fp8, activations bf16", "cutlass and triton")
GPU_DEMO_CONFIGURATIONS = (
    Numbers("cutlass", "cutlass", more=_SHARED),
    Numbers("down_proj by deep_gemm, float32 scales", more=_DOWN),
    Numbers("down_proj by deep_gemm, FLOAT32_CEIL_UE8M0", variables=_CEIL, more=_DOWN),
)
GPU_DEMO_REFERENCES = ("cutlass",)


@contextmanager
def serving(model: Path, numbers: Numbers, families: tuple[str, ...]) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        flags, variables = numbers.flags(families), dict(numbers.variables)
        with started_server(model, log, *flags, start_seconds=180, **variables) as server:
            yield server


def measured(
    measure: Callable[[Numbers], dict[str, Any]], wanted: Sequence[Numbers], at_once: bool
) -> dict[str, dict[str, Any]]:
    """By name what each configuration gives; one that fails has an `error` and spares the rest."""

    def row_of(numbers: Numbers) -> dict[str, Any]:
        try:
            row = measure(numbers)
        except Exception as error:  # whatever its server did
            row = {"error": f"{type(error).__name__}: {error}"[-500:]}
        print(numbers.name, json.dumps(row), flush=True)
        return row

    with ThreadPoolExecutor(len(wanted) if at_once else 1) as pool:
        rows = pool.map(row_of, wanted)
        return {numbers.name: row for numbers, row in zip(wanted, rows, strict=True)}


def choices(server: Any) -> dict[str, str]:
    """Backend of the FP8 layers by family, and who decided."""
    found = {}
    for decision in server.get("/kernels").json["decisions"]:
        problem = decision["problem"]
        if "fp8" in problem["text"] and problem["family"] in ("linear", "moe"):
            found[problem["family"]] = f"{decision['chosen']} ({decision['origin']['text']})"
    return found


def thoughts(server: Any, ids: list[list[int]]) -> list[Position]:
    return served.positions(Server(server.url), ids)


def against(reference: list[Position], other: list[Position]) -> dict[str, Any]:
    found = asdict(compare(reference, other))
    del found["answers"]
    return found


def perplexity(positions: list[Position]) -> float:
    return exp(-fsum(position.logprob for position in positions) / len(positions))


# ---------------------------------------------------------------- the arithmetic model


def measure_arith(bf16: Path | None, gpu: bool) -> dict[str, Any]:
    configurations = GPU_CONFIGURATIONS if gpu else CONFIGURATIONS
    ids = {name: texts.token_ids(count, stretch) for name, (count, stretch) in TEXTS.items()}
    seen: dict[str, dict[str, list[Position]]] = {}
    right: dict[str, dict[str, list[bool]]] = {}

    def measure(numbers: Numbers) -> dict[str, Any]:
        model = bf16 if numbers.is_bf16 and bf16 else texts.MODEL
        with serving(model, numbers, BOTH) as server:
            row = {"command": numbers.command(BOTH), "chosen": choices(server)}
            seen[numbers.name] = {name: thoughts(server, own) for name, own in ids.items()}
            row["perplexity"] = {k: perplexity(v) for k, v in seen[numbers.name].items()}
            if numbers.answers:
                row["answers"], right[numbers.name] = answer(server)
        return row

    wanted = [numbers for numbers in configurations if bf16 or not numbers.is_bf16]
    rows = measured(measure, wanted, gpu)
    for name in seen:
        row = rows[name]
        for reference in GPU_REFERENCES if gpu else REFERENCES:
            if reference in seen:
                row[f"against {reference}"] = {
                    kind: against(seen[reference][kind], seen[name][kind]) for kind in ids
                }
            if reference in right and name in right:
                row[f"mcnemar against {reference}"] = {
                    kind: vars(compare_answers(right[reference][kind], right[name][kind]))
                    for kind in ANSWERS
                }
    return rows


def answer(server: Any) -> tuple[dict[str, Any], dict[str, list[bool]]]:
    """Scores after one worked example, and which answers are right, by kind of problem."""
    scores, right = {}, {}
    for kind, stretch in ANSWERS.items():
        with tempfile.TemporaryDirectory() as folder:
            problems.write(Path(folder), stretch)
            asked = gsm8k.questions_and_shots(Path(folder), problems.NUM_HELD_OUT, 1, None, False)
        result = gsm8k.evaluate(Server(server.url), *asked)
        assert result["error"] is None, result["error"]
        scores[kind] = {
            "num_correct": result["num_correct"],
            "accuracy": result["accuracy"],
            "interval": list(result["interval"]),
        }
        right[kind] = [a.is_correct for a in result["answers"]]
    return scores, right


# ---------------------------------------------------------------- the demo model


def measure_demo(gsm8k_folder: Path, gpu: bool) -> dict[str, Any]:
    """Perplexity of 100 questions with their worked answers; experts it has none."""
    from transformers import AutoTokenizer

    from vllm.entrypoints import demo

    questions, _ = gsm8k.questions_and_shots(gsm8k_folder, 100, 0, None)
    encode = AutoTokenizer.from_pretrained(demo.demo_model_path())
    ids = [encode(f"Question: {q.question}\nAnswer: {q.solution}")["input_ids"] for q in questions]
    seen = {}
    configurations = GPU_DEMO_CONFIGURATIONS if gpu else DEMO_CONFIGURATIONS
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder)
        if any(numbers.is_bf16 for numbers in configurations):
            demo.dequantise(demo.find_gguf(), plain)

        def measure(numbers: Numbers) -> dict[str, Any]:
            model = plain if numbers.is_bf16 else demo.demo_model_path()
            with serving(model, numbers, DENSE) as server:
                row = {"command": numbers.command(DENSE), "chosen": choices(server)}
                seen[numbers.name] = thoughts(server, ids)
            row["perplexity"] = perplexity(seen[numbers.name])
            return row

        rows = measured(measure, configurations, gpu)
    for name in seen:
        for reference in GPU_DEMO_REFERENCES if gpu else DEMO_REFERENCES:
            if reference in seen:
                rows[name][f"against {reference}"] = against(seen[reference], seen[name])
    return rows


# ---------------------------------------------------------------- layer by layer


def measure_layers(bf16: Path) -> dict[str, dict[str, float]]:
    """`measure_layer` of every quantised weight, on what the model before quantisation feeds it."""
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3_5MoeForCausalLM

    model = Qwen3_5MoeForCausalLM.from_pretrained(bf16, dtype=torch.float32)
    ids = [i for text in texts.token_ids(8) for i in text]
    inputs: dict[str, torch.Tensor] = {}

    def keep(name: str):
        return lambda _, args: inputs.__setitem__(name, args[0].detach().flatten(0, -2))

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or name.endswith(".experts"):
            module.register_forward_pre_hook(keep(name))
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    plain = load_file(bf16 / "model.safetensors")
    stored = load_file(texts.MODEL / "model.safetensors")
    rows = {}
    for name, scales in stored.items():
        if not name.endswith(".weight_scale_inv"):
            continue
        layer = name.removesuffix(".weight_scale_inv")
        x = inputs.get(layer)
        if x is None:
            x = _expert_input(layer, inputs, plain)
        weight = f"{layer}.weight"
        rows[layer] = measure_layer(x, plain[weight].float(), stored[weight], scales)
    return rows


def _expert_input(layer: str, inputs: dict[str, Any], plain: dict[str, Any]) -> Any:
    """All tokens, as if each had been sent to this expert."""
    from torch.nn.functional import silu

    expert, _, own = layer.rpartition(".")
    x = inputs[expert.rpartition(".")[0]]
    if own != "down_proj":
        return x
    gate, up = (x @ plain[f"{expert}.{part}.weight"].float().T for part in ("gate_proj", "up_proj"))
    return silu(gate) * up


def gpu_machine() -> dict[str, Any]:
    import torch

    date = datetime.now(UTC).date().isoformat()
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--bf16", type=Path, help="The arithmetic model before it was quantised.")
    parser.add_argument("--gsm8k", type=Path, help="Folder of test.jsonl.")
    parser.add_argument("--gpu", action="store_true", help="On an H100, with its own kernels.")
    args = parser.parse_args()
    for part, needed in (("demo", "gsm8k"), ("layers", "bf16")):
        if part in args.only and getattr(args, needed) is None:
            parser.error(f"{part} needs --{needed}")
    content = json.loads(args.file.read_text()) if args.file.exists() else {}
    content |= gpu_machine() if args.gpu else machine()
    measures = {
        "arith": lambda: measure_arith(args.bf16, args.gpu),
        "demo": lambda: measure_demo(args.gsm8k, args.gpu),
        "layers": lambda: measure_layers(args.bf16),
    }
    for part in args.only:
        content[part] = rounded(measures[part]())
        args.file.write_text(json.dumps(content, indent=1) + "\n")
    failed = [
        name for part in args.only for name in content[part] if "error" in content[part][name]
    ]
    if failed:
        sys.exit(f"failed, see {args.file}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
