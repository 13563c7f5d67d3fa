"""This engine beside llama.cpp and transformers on one CPU: the same weights, in one run.

    python -m venv /tmp/peers
    CMAKE_ARGS=-DGGML_NATIVE=ON /tmp/peers/bin/pip install llama-cpp-python==0.3.36
    python benchmarks/serving/bench_cpu_peers.py --peers-python /tmp/peers/bin/python \\
        --json benchmarks/results/FOLDER/cpu_peers.json --write README.md

pip compiles llama.cpp for this chip, which takes minutes. A virtual machine may announce AMX and
then refuse its instructions ("died of SIGILL"): add to CMAKE_ARGS, in quotes,
-DCMAKE_C_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16' and the same -DCMAKE_CXX_FLAGS.

Models: the demo model (SmolLM2-135M-Instruct), and random weights in the shape of Qwen2.5-0.5B.
Each is one bf16 checkpoint; FP8 and int4 (w4a16) are made of it by what `vllm quantize` runs, GGUF
files by llama.cpp's own quantiser. Of the demo model the wheel's Q4_1 file is the origin of all
others. They are made once, in --models (about 5 GB). Output projections keep bf16 in this engine
and have 6 or 8 bits in GGUF files; "int8 head" is `vllm quantize --lm-head int8`, which leaves the
embedding in bf16. MB is the size of the files. This engine computes in float32 unless a row says
bf16 (`--dtype bfloat16`).

Measured, the same for all: `tpotB`, ms per output token for B requests of 32 prompt tokens: (time
of 65 output tokens - time of 1) / 64; `prefill`, tokens per second of a prompt of 512 tokens with
one output token. Greedy, fresh random token ids. Every engine runs alone in a process of its own,
all of them once in each of --rounds, so that a change of the machine's speed meets all; figures are
medians over rounds of the median of --repeat runs.
"""

import argparse
import ctypes
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT, OUTPUT, PREFILL = 32, 64, 512
MAX_LEN, MAX_BATCH = 1024, 8
CASES = ("tpot1", "tpot8", "prefill")
BEGIN = "<!-- cpu peers: written by benchmarks/serving/bench_cpu_peers.py -->"
END = "<!-- end of cpu peers -->"

Generate = Callable[[int, int, int], None]
"""(requests, tokens of each prompt, output tokens of each): runs them together, to the end."""


@dataclass(frozen=True)
class Engine:
    name: str  # as in the table
    worker: str  # which function runs it
    files: str  # in the model's folder
    rival: str  # name of the row that its speed is given against
    dtype: str = "auto"


OURS_FP8, OURS_INT4 = "this engine, FP8", "this engine, int4"
ENGINES = (
    Engine(OURS_FP8, "ours", "fp8", OURS_FP8),
    Engine(OURS_INT4, "ours", "int4", OURS_FP8),
    Engine("this engine, FP8, bf16 activations", "ours", "fp8", OURS_FP8, "bfloat16"),
    Engine("this engine, int4, int8 head", "ours", "int4-head8", OURS_INT4),
    Engine("this engine, int4, int8 head, bf16", "ours", "int4-head8", OURS_INT4, "bfloat16"),
    Engine("llama.cpp, Q8_0", "llama_cpp", "q8_0.gguf", OURS_FP8),
    Engine("llama.cpp, Q4_0", "llama_cpp", "q4_0.gguf", OURS_INT4),
    Engine("llama.cpp, Q4_1", "llama_cpp", "q4_1.gguf", OURS_INT4),
    Engine("transformers, bf16", "transformers", "bf16", OURS_FP8, "bfloat16"),
    Engine("transformers, float32", "transformers", "bf16", OURS_FP8, "float32"),
)
MODELS = {
    "demo": "SmolLM2-135M-Instruct",
    "qwen": "Qwen2.5-0.5B's shape, random weights",
}
# Of Qwen2.5-0.5B's config.json.
QWEN = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
ROPE_THETA = 1e6


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        return run_worker(*sys.argv[2:])
    args = parse_args()
    engines = [e for e in ENGINES if not args.only or e.worker in args.only]
    folders = {model: prepare(model, engines, args) for model in args.model}
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(args.rounds):
        for model, folder in folders.items():
            for engine in engines:
                found = measure(engine, folder, args)
                runs.setdefault((model, engine.name), []).append(found)
                print(f"round {number + 1}: {MODELS[model]}: {engine.name}: {found}", flush=True)
    result = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "rounds": args.rounds,
        "repeat": args.repeat,
        "versions": versions(args.peers_python, {engine.worker for engine in engines}),
        "models": [
            {"model": MODELS[model], "engines": rows(model, folders[model], engines, runs)}
            for model in args.model
        ],
    }
    text = markdown(result)
    print(text)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for page in args.write:
        write_between_markers(page, text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers-python", default="/tmp/peers/bin/python", help="has llama_cpp")
    parser.add_argument("--models", type=Path, default=Path("/tmp/peers-models"))
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", nargs="+", choices=sorted({e.worker for e in ENGINES}))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, nargs="+", default=[], help="pages with the markers")
    return parser.parse_args()


def measure(engine: Engine, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    python = args.peers_python if engine.worker == "llama_cpp" else sys.executable
    words = [engine.worker, str(folder / engine.files), engine.dtype, str(args.repeat)]
    return json.loads(call(python, words).splitlines()[-1])


def call(python: str, words: list[str]) -> str:
    try:
        done = subprocess.run(
            [python, __file__, "worker", *words], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise SystemExit(
            f"--peers-python {python} does not exist: make it with `python -m venv` and install "
            "llama-cpp-python into it (--help shows how)"
        ) from None
    if done.returncode:
        end = (
            f"died of {signal.Signals(-done.returncode).name}" if done.returncode < 0 else "failed"
        )
        raise SystemExit(f"{python} worker {' '.join(words)} {end}:\n{done.stderr[-3000:]}")
    return done.stdout


# ---------------------------------------------------------------- workers


def run_worker(name: str, path: str, *rest: str) -> None:
    if name == "gguf":
        return quantise_gguf(path, *rest)
    dtype, repeat = rest
    generate = {"ours": ours, "llama_cpp": llama_cpp, "transformers": transformers}[name](
        path, dtype
    )
    print(json.dumps({case: time_case(case, generate, int(repeat)) for case in CASES}))


def time_case(case: str, generate: Generate, repeat: int) -> float:
    def seconds(*lengths: int) -> float:
        start = time.perf_counter()
        generate(*lengths)
        return time.perf_counter() - start

    def once() -> float:
        if case == "prefill":
            return PREFILL / seconds(1, PREFILL, 1)
        size = int(case.removeprefix("tpot"))
        many, one = seconds(size, PROMPT, OUTPUT + 1), seconds(size, PROMPT, 1)
        return (many - one) / OUTPUT * 1e3

    once()  # warm-up
    return round(statistics.median(once() for _ in range(repeat)), 3)


def random_ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(50, vocab - 300) for _ in range(count)]


def ours(path: str, dtype: str) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(model=path, dtype=dtype, max_model_len=MAX_LEN, max_num_seqs=MAX_BATCH)
    vocab = json.loads(Path(path, "config.json").read_text())["vocab_size"]
    rng = random.Random(0)

    def generate(size: int, prompt: int, output: int) -> None:
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=output
        )
        prompts = [{"prompt_token_ids": random_ids(rng, prompt, vocab)} for _ in range(size)]
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [len(one.outputs[0].token_ids) for one in found] == [output] * size

    return generate


def transformers(path: str, dtype: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    vocab = model.config.vocab_size
    rng = random.Random(0)

    def generate(size: int, prompt: int, output: int) -> None:
        ids = torch.tensor([random_ids(rng, prompt, vocab) for _ in range(size)])
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output,
                max_new_tokens=output,
                pad_token_id=0,
            )
        assert found.shape == (size, prompt + output)

    return generate


def llama_cpp(path: str, dtype: str) -> Generate:
    """By its C interface, as llama.cpp's own benchmark does: one batch of all requests a step."""
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = MAX_LEN * MAX_BATCH, MAX_BATCH
    params.n_batch = params.n_ubatch = PREFILL
    params.n_threads = params.n_threads_batch = os.cpu_count() or 1
    context = lib.llama_init_from_model(model, params)
    assert context, f"{path} was not loaded"
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(PREFILL, 0, 1)
    rng = random.Random(0)

    def step(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows are (token, position, request, whether its logits are wanted)."""
        batch.n_tokens = len(rows)
        for i, (token, position, request, is_last) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, request
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        found = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = lib.llama_get_logits_ith(context, i)
                found.append(int(np.ctypeslib.as_array(logits, (vocab,)).argmax()))
        return found

    def generate(size: int, prompt: int, output: int) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        rows = [
            (token, position, request, position == prompt - 1)
            for request in range(size)
            for position, token in enumerate(random_ids(rng, prompt, vocab))
        ]
        tokens = step(rows)
        for position in range(prompt, prompt + output - 1):
            tokens = step([(token, position, i, True) for i, token in enumerate(tokens)])

    return generate


# ---------------------------------------------------------------- models


def prepare(model: str, engines: list[Engine], args: argparse.Namespace) -> Path:
    """The model's folder, with every file that `engines` name."""
    from vllm.entrypoints.demo import dequantise, find_gguf
    from vllm.model_executor.quantize import quantize_checkpoint

    folder = args.models / model
    origin = folder / "q4_1.gguf" if model == "demo" else folder / "f16.gguf"
    if not (folder / "bf16").exists():
        unfinished = folder / "unfinished"
        unfinished.mkdir(parents=True, exist_ok=True)
        if model == "demo":
            origin.write_bytes(find_gguf().read_bytes())
            dequantise(find_gguf(), unfinished)
        else:
            make_qwen(unfinished, origin)
        unfinished.rename(folder / "bf16")
    for name, format_name in (("fp8", "fp8-block"), ("int4", "w4a16"), ("int4-head8", "w4a16")):
        if not (folder / name).exists():
            has_int8_head = name.endswith("head8")
            quantize_checkpoint(folder / "bf16", folder / name, format_name, has_int8_head)
    for engine in engines:
        target = folder / engine.files
        if target.suffix == ".gguf" and not target.exists():
            call(args.peers_python, ["gguf", str(origin), str(target)])
    return folder


def quantise_gguf(origin: str, target: str) -> None:
    import llama_cpp as lib

    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{Path(target).stem.upper()}")
    params.allow_requantize = True
    unfinished = f"{target}.unfinished"
    if lib.llama_model_quantize(origin.encode(), unfinished.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot quantise {origin} to {target}")
    os.rename(unfinished, target)


def make_qwen(folder: Path, gguf_file: Path) -> None:
    """Random weights as a bf16 checkpoint and as a GGUF file of float16."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    rope = {"rope_theta": ROPE_THETA, "rope_type": "default"}
    model = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN, rope_parameters=rope))
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    writer = gguf.GGUFWriter(gguf_file, "qwen2")
    writer.add_block_count(QWEN["num_hidden_layers"])
    writer.add_context_length(QWEN["max_position_embeddings"])
    writer.add_embedding_length(QWEN["hidden_size"])
    writer.add_feed_forward_length(QWEN["intermediate_size"])
    writer.add_head_count(QWEN["num_attention_heads"])
    writer.add_head_count_kv(QWEN["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(QWEN["rms_norm_eps"])
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_vocab_size(QWEN["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, QWEN["num_hidden_layers"])
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            is_matrix = tensor.dim() == 2
            data = tensor.to(torch.float16 if is_matrix else torch.float32).numpy()
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---------------------------------------------------------------- results


def rows(
    model: str,
    folder: Path,
    engines: list[Engine],
    runs: dict[tuple[str, str], list[dict[str, float]]],
) -> list[dict[str, Any]]:
    medians = {
        e.name: {
            case: statistics.median(run[case] for run in runs[model, e.name]) for case in CASES
        }
        for e in engines
    }
    found = []
    for engine in engines:
        row: dict[str, Any] = {"engine": engine.name, "megabytes": megabytes(folder / engine.files)}
        row |= {case: round(value, 2) for case, value in medians[engine.name].items()}
        if engine.rival in medians:
            row["rival"] = engine.rival
            row["speed"] = {
                case: round(speed(case, medians[engine.name], medians[engine.rival]), 2)
                for case in CASES
            }
        found.append(row | {"rounds": runs[model, engine.name]})
    return found


def speed(case: str, own: dict[str, float], rival: dict[str, float]) -> float:
    """How many times as fast as its rival."""
    return own[case] / rival[case] if case == "prefill" else rival[case] / own[case]


def megabytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return round(sum(file.stat().st_size for file in files) / 1e6)


def markdown(result: dict[str, Any]) -> str:
    chip = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"{chip['cores']} cores of {chip['cpu']}, {result['date']}; {versions}; rounds: "
        f"{result['rounds']}, of {result['repeat']} each (`{result['command']}`).\nIn brackets the "
        "speed relative to this engine: of 4-bit peers to its int4, of all others to its FP8.",
    ]
    for model in result["models"]:
        lines += [
            "",
            f"| {model['model']} | MB | ms per token, batch 1 | batch 8 | {PREFILL}-token prompt "
            "(tokens/s) |",
            "|---|---|---|---|---|",
        ]
        for row in model["engines"]:
            cells = [f"{row[case]:,.{0 if case == 'prefill' else 1}f}" for case in CASES]
            if "speed" in row:
                cells = [f"{cell} ({row['speed'][case]:.2f}x)" for cell, case in zip(cells, CASES)]
            lines.append(f"| {row['engine']} | {row['megabytes']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_between_markers(page: Path, text: str) -> None:
    before, has_begin, rest = page.read_text().partition(BEGIN)
    _, has_end, after = rest.partition(END)
    if not (has_begin and has_end):
        raise SystemExit(
            f"{page} has no place for the table: it stands between {BEGIN!r} and {END!r}"
        )
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def versions(peers_python: str, workers: set[str]) -> dict[str, str]:
    from importlib.metadata import version

    import vllm

    found = {"vllm": vllm.__version__}
    if "llama_cpp" in workers:
        code = ["-c", "import llama_cpp; print(llama_cpp.__version__)"]
        done = subprocess.run([peers_python, *code], capture_output=True, text=True, check=False)
        found["llama-cpp-python"] = done.stdout.strip() or "absent"
    return found | {"transformers": version("transformers"), "torch": version("torch")}


def machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    names = [line.split(":")[1].strip() for line in text.splitlines() if "model name" in line]
    return {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count()}


if __name__ == "__main__":
    main()
