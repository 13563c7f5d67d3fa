"""NVFP4 with quantised activations (W4A4), with activations as they are (W4A16), and int4 (W4A16)
beside bf16, by the paired gate.

    python benchmarks/accuracy/nvfp4_gate.py BF16 FILE --gsm8k DIR [--num-questions 100]

BF16 is a model in bf16, such as the demo model's weights widened. `vllm quantize` writes it in both
formats; scales of activations, which W4A4 needs and the quantiser does not write, are the largest
magnitudes that the bf16 model has in each layer on questions of DIR's training set. W4A4 is
emulated: every number as on a chip with NVFP4 tensor cores. FILE (JSON) gets the figures.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

from ue8m0_error import machine

from vllm import LLM, SamplingParams
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.quantize import quantize_checkpoint
from vllm.ops.nvfp4 import nvfp4_global_scale

COMMAND = "python benchmarks/accuracy/nvfp4_gate.py BF16 FILE --gsm8k DIR"
NUM_CALIBRATED = 32
INPUTS = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
    "symmetric": True, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
# Name -> what of it is served: a checkpoint, and how it is computed.
SERVED = {
    "NVFP4 W4A4": ("nvfp4", "emulate:sm_100"),
    "NVFP4 W4A16": ("nvfp4", "emulate:sm_90"),
    "int4 W4A16": ("w4a16", "emulate:sm_90"),
}
PAIRS = [("bf16", name) for name in SERVED] + [("NVFP4 W4A16", "NVFP4 W4A4")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bf16", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--num-questions", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served = {"bf16": f"{args.bf16} --dtype bfloat16"}
        for name in ("nvfp4", "w4a16"):
            quantize_checkpoint(args.bf16, Path(folder) / name, name)
        add_input_scales(Path(folder) / "nvfp4", largest_inputs(args.bf16, args.gsm8k))
        for name, (checkpoint, backend) in SERVED.items():
            own = f"--dtype bfloat16 --linear-backend {backend}"
            served[name] = f"{Path(folder) / checkpoint} {own}"
        runs = [
            {"reference": a, "judged": b, **compare(served[a], served[b], args)} for a, b in PAIRS
        ]
    header = {"machine": machine(), "date": datetime.now(UTC).date().isoformat()}
    header["command"] = f"{COMMAND} --num-questions {args.num_questions}"
    args.file.write_text(
        json.dumps(header | {"torch": torch.__version__, "runs": runs}, indent=1) + "\n"
    )
    print(json.dumps(runs, indent=1))


def largest_inputs(folder: Path, gsm8k: Path) -> dict[str, float]:
    """Of every linear layer: the largest magnitude of its input on texts of the training set."""
    llm = LLM(str(folder), dtype="bfloat16", max_model_len=1024, max_num_seqs=8)
    largest: dict[str, float] = {}

    def note(layer: Linear, inputs: tuple[torch.Tensor]) -> None:
        amax = float(inputs[0].abs().max())
        largest[layer.prefix] = max(amax, largest.get(layer.prefix, 0.0))

    model = llm.llm_engine.core.runner.model
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.register_forward_pre_hook(note)
    lines = (gsm8k / "train.jsonl").read_text().splitlines()[:NUM_CALIBRATED]
    texts = [f"{item['question']}\n{item['answer']}" for item in map(json.loads, lines)]
    llm.generate(texts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    return largest


def add_input_scales(folder: Path, largest: dict[str, float]) -> None:
    """Makes a weight-only checkpoint one of W4A4."""
    merged = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
              "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        layer = name.removesuffix(".weight_packed")
        parent, _, last = layer.rpartition(".")
        amax = largest[f"{parent}.{merged.get(last, last)}"]
        tensors[f"{layer}.input_global_scale"] = nvfp4_global_scale(torch.tensor([amax]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = INPUTS
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def compare(a: str, b: str, args: argparse.Namespace) -> dict[str, Any]:
    words = ["eval", "paired", "--a", a, "--b", b, "--gsm8k", str(args.gsm8k)]
    words += ["--num-questions", str(args.num_questions), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    figures = json.loads(done.stdout)
    return {name: figure for name, figure in figures.items() if name not in ("a", "b")}


if __name__ == "__main__":
    main()
