"""Everything that is measured on GPUs, one command after another, within the time there is.

    python benchmarks/on_gpu.py [PART ...] [--list] [--out FOLDER] [--seconds S] [--archive FILE]

Without PART: all that the GPUs of this machine are enough for, but for what is run by name alone.
Results go to FOLDER, by default benchmarks/results/ and the chip's name; logs/PART.txt in it has
what a command printed. A part that fails or takes twice its time spares the others; one that is
not expected to end in time is not begun. Tables that `tune` measures serve the parts after it.
--archive packs FOLDER anew after each part, for a machine from which one file is fetched. Needs
the libraries of `vllm kernels list` that shall be compared, and a native library for this chip
(make build-cuda). GSM8K=DIR: where its test.jsonl is, for `demo`; ARITH_BF16=DIR: the arithmetic
model before it was quantised, if it is there (tests/evals/arith/train.py).
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = "Qwen3-8B-FP8 Qwen3-30B-A3B-FP8 Qwen3.5-35B-A3B-FP8 Devstral-Small-2-24B"
BACKENDS = " ".join(
    f"--backend {name}"
    for name in ("cutlass", "skinny", "marlin", "scaled_mm", "triton", "deep_gemm")
)
OWN = {"VLLM_USE_DEEP_GEMM": "0"}


@dataclass(frozen=True)
class Part:
    """seconds: about what `python {command}` takes on an H200. {out}: the folder of results.
    is_by_name: not run unless it is named."""

    name: str
    seconds: int
    command: str
    env: dict[str, str] = field(default_factory=dict)
    num_gpus: int = 1
    is_by_name: bool = False


PARTS = (
    # FlashInfer's experts, for `tests` and `moe`: `on_gpu.py fused_moe tests moe` checks and
    # times them. A guess from three of 182 sources, with 16 compilers at a time; what was built is
    # there when it is run again.
    Part(
        "fused_moe",
        1500,
        "-m vllm.kernels.jit.flashinfer fused_moe_90",
        {"MAX_JOBS": "16"},
        is_by_name=True,
    ),
    Part("tests", 480, "tests/gpu_tests.py --out {out}/tests.txt"),
    Part("sanitizer", 60, "tests/kernels/gpu/sanitize.py"),
    Part(
        "gemm",
        120,
        "benchmarks/kernels/bench_fp8_block_gemm.py --minutes 2 --peers deep_gemm --out {out}",
    ),
    # Compiles for a minute or two before the first size.
    Part(
        "gemm_all",
        240,
        "benchmarks/kernels/bench_fp8_block_gemm.py --minutes 4 --out {out}/with_flashinfer",
    ),
    Part(
        "profiles",
        150,
        "benchmarks/kernels/profile_kernels.py sm90_gemm skinny rms_norm_quant --out {out}",
    ),
    Part("fp8_quant", 60, "benchmarks/kernels/bench_fp8_quant.py --out {out}"),
    Part("cuda_ops", 40, "benchmarks/kernels/bench_cuda_ops.py --out {out}"),
    Part("weight_only", 120, "benchmarks/kernels/bench_weight_only.py --out {out}"),
    Part("weight_only_experts", 40, "benchmarks/kernels/bench_weight_only_experts.py --out {out}"),
    Part("attention", 60, "benchmarks/kernels/bench_attention.py --flashinfer --out {out}"),
    Part("moe", 80, "benchmarks/kernels/bench_moe.py --parts --layers --out {out}"),
    Part("delta_rule", 60, "benchmarks/kernels/bench_delta_rule.py"),
    Part("shared_expert", 30, "benchmarks/kernels/bench_shared_expert.py --out {out}"),
    Part(
        "tune",
        130,
        f"-m vllm.entrypoints.cli.main kernels tune {MODELS} --tp 1,2 {BACKENDS} --jobs 15 "
        "--timeout 60 --budget 120s",
    ),
    Part("choice", 120, "benchmarks/kernels/bench_choice.py choice --tp 4 --out {out}"),
    Part("8b", 90, "benchmarks/serving/bench_gpu.py Qwen/Qwen3-8B-FP8 --out {out}", OWN),
    Part(
        "8b_default",
        100,
        "benchmarks/serving/bench_gpu.py Qwen/Qwen3-8B-FP8 --name Qwen3-8B-FP8-default --out {out}",
    ),
    Part("8b_steps", 70, "benchmarks/serving/bench_steps.py Qwen/Qwen3-8B-FP8 --out {out}", OWN),
    *(
        Part(
            f"{name}_roofline",
            seconds,
            f"-m vllm.entrypoints.cli.main bench steps Qwen/{model} --load-format dummy --roofline "
            f"--json {{out}}/roofline_{model}.json",
            OWN,
        )
        for name, seconds, model in (
            ("8b", 60, "Qwen3-8B-FP8"),
            ("30b", 80, "Qwen3-30B-A3B-FP8"),
            ("35b", 90, "Qwen3.5-35B-A3B-FP8"),
        )
    ),
    Part(
        "prompt_clock",
        90,
        "benchmarks/serving/bench_prompt_clock.py Qwen/Qwen3-8B-FP8 --out {out}",
        OWN,
    ),
    *(
        Part(f"{name}_{kind}", seconds, f"{script}.py Qwen/{model} --out {{out}}", OWN)
        for kind, script, parts in (
            (
                "short",
                "benchmarks/serving/bench_short_prompts",
                (
                    ("8b", 60, "Qwen3-8B-FP8"),
                    ("30b", 90, "Qwen3-30B-A3B-FP8"),
                    ("35b", 120, "Qwen3.5-35B-A3B-FP8"),
                ),
            ),
            (
                "http",
                "benchmarks/serving/bench_http",
                (("8b", 180, "Qwen3-8B-FP8"), ("30b", 240, "Qwen3-30B-A3B-FP8")),
            ),
        )
        for name, seconds, model in parts
    ),
    Part("8b_start", 200, "benchmarks/serving/bench_start.py Qwen/Qwen3-8B-FP8 --out {out}"),
    Part("30b", 120, "benchmarks/serving/bench_gpu.py Qwen/Qwen3-30B-A3B-FP8 --out {out}", OWN),
    Part(
        "35b",
        180,
        "benchmarks/serving/bench_gpu.py Qwen/Qwen3.5-35B-A3B-FP8 --contexts 1024 8192 32000 "
        "--out {out}",
        OWN,
    ),
    Part("nvfp4", 60, "benchmarks/serving/bench_gpu.py Llama-3.1-8B-NVFP4 --out {out}"),
    Part(
        "arith",
        120,
        "benchmarks/accuracy/ue8m0_models.py {out}/arith_ue8m0.json --gpu --only arith "
        "{arith_bf16}",
    ),
    Part(
        "demo",
        60,
        "benchmarks/accuracy/ue8m0_models.py {out}/demo_ue8m0.json --gpu --only demo "
        "--gsm8k {gsm8k}",
    ),
    Part(
        "two_gpus",
        200,
        "benchmarks/serving/bench_several_gpus.py Qwen/Qwen3-8B-FP8 --out {out}",
        OWN,
        num_gpus=2,
    ),
    Part(
        "ranks",
        240,
        "tests/gpu_tests.py tests/distributed/test_nccl_on_gpus.py --out {out}/tests_nccl.txt",
        num_gpus=2,
    ),
    Part("peer_sum", 40, "benchmarks/kernels/bench_custom_all_reduce.py --out {out}", num_gpus=2),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all together")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="a .tar.gz of FOLDER")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(names):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}: there are {', '.join(names)}"
        )
    end = time.monotonic() + args.seconds
    num_gpus, chip = (0, "gpu") if args.list and args.out else gpus()
    out = (args.out or ROOT / "benchmarks" / "results" / chip).resolve()
    wanted = [
        part
        for part in PARTS
        if (part.name in args.parts or not (args.parts or part.is_by_name))
        and (args.list or part.num_gpus <= num_gpus)
    ]
    if args.list:
        for part in wanted:
            print(f"{part.name:14}{part.seconds:4} s  {shown(part, out)}")
        return 0
    if not wanted:
        parser.error(
            f"{', '.join(args.parts)}: needs more than the {num_gpus} GPUs of this machine"
        )
    (out / "logs").mkdir(parents=True, exist_ok=True)
    lines = []
    for part in wanted:
        lines.append(f"{part.name:14}{run(part, out, end)}")
        print(lines[-1], flush=True)
        if args.archive:
            pack(out, args.archive)
    return int(any(" ok, " not in line for line in lines))


def gpus() -> tuple[int, str]:
    """How many GPUs there are, and what results of theirs are filed under: h100, h200."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"no GPU: torch {torch.__version__} finds none")
    name = torch.cuda.get_device_name().lower()
    words = [word for word in name.split() if word[:1].isalpha() and any(map(str.isdigit, word))]
    return torch.cuda.device_count(), words[0] if words else "gpu"


def words_of(part: Part, out: Path) -> list[str]:
    bf16 = os.environ.get("ARITH_BF16", "")
    given = {
        "out": str(out),
        "gsm8k": os.environ.get("GSM8K", "GSM8K"),
        "arith_bf16": f"--bf16 {bf16}" if bf16 else "",
    }
    return shlex.split(part.command.format(**given))


def shown(part: Part, out: Path) -> str:
    variables = [f"{name}={value}" for name, value in part.env.items()]
    return " ".join([*variables, "python", *words_of(part, out)])


def run(part: Part, out: Path, end: float) -> str:
    """Runs it, and says how that went."""
    left = end - time.monotonic()
    if left < part.seconds:
        return f"not begun: takes {part.seconds} s, and {max(left, 0):.0f} are left"
    log = out / "logs" / f"{part.name}.txt"
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **part.env}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    start = time.monotonic()
    with log.open("w") as output:
        output.write(f"{shown(part, out)}\n")
        output.flush()
        process = subprocess.Popen(
            [sys.executable, *words_of(part, out)],
            cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(min(left, 2 * part.seconds))
        except subprocess.TimeoutExpired:
            stop(process)
            return f"ended after {time.monotonic() - start:.0f} s, see {log}"
    spent = time.monotonic() - start
    if process.returncode:
        return f"failed with {process.returncode} after {spent:.0f} s, see {log}"
    return f"ok, {spent:.0f} s"


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Asks it to end, which lets it keep what it has; then ends all its processes."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def pack(out: Path, archive: Path) -> None:
    partial = archive.with_name(f"{archive.name}.partial")
    with tarfile.open(partial, "w:gz") as packed:
        packed.add(out, out.name)
    partial.replace(archive)


if __name__ == "__main__":
    sys.exit(main())
