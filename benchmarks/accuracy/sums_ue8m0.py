"""The score of the model of sums with each kind of scales, paired, in the engine.

    python benchmarks/accuracy/sums_ue8m0.py FILE [--bf16 FOLDER]

FILE (JSON) gets how many of the 4,000 held-out sums are right by each configuration, and McNemar's
test against float32 scales with results of the same type. --bf16: what tests/evals/sums/train.py
wrote.
"""

import argparse
import json
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from evals.sums.answers import MODEL, right_answers
from ue8m0_error import machine

from vllm.evals.paired import compare_answers
from vllm.evals.statistics import wilson_interval

# --linear-backend (None computes activations as they are), variables, and the earlier line that it
# is compared with: results of kernels are bfloat16 with `emulate:`, and float32 without.
CUTLASS, EMULATION = "emulate:cutlass@sm_100", "emulation"
CONFIGURATIONS: tuple[tuple[str | None, dict[str, str], str], ...] = (
    (CUTLASS, {}, CUTLASS),
    ("emulate:deep_gemm@sm_100", {}, CUTLASS),
    ("emulate:sm_100", {}, CUTLASS),
    ("emulate:sm_100", {"VLLM_USE_DEEP_GEMM": "1"}, CUTLASS),
    (EMULATION, {}, EMULATION),
    ("emulation-ue8m0", {}, EMULATION),
    (None, {}, EMULATION),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--bf16", type=Path, help="The model before it was quantised.")
    args = parser.parse_args()
    sides = [(*configuration, MODEL) for configuration in CONFIGURATIONS]
    if args.bf16:
        sides.append((None, {}, EMULATION, args.bf16))
    rows: list[dict[str, Any]] = []
    seen: dict[str | None, list[bool]] = {}
    for backend, variables, reference, model in sides:
        start = time.monotonic()
        right, _ = right_answers(backend, model, **variables)
        seen.setdefault(backend, right)
        rows.append(
            {"linear_backend": backend, "variables": variables, "is_bf16": model is args.bf16,
             "seconds": round(time.monotonic() - start, 1),
             "num_correct": sum(right), "accuracy": sum(right) / len(right),
             "interval": wilson_interval(sum(right), len(right)), "reference": reference,
             "mcnemar": vars(compare_answers(seen[reference], right))}
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    content = {"machine": machine(), "date": datetime.now(UTC).date().isoformat(),
               "command": shlex.join(["python", *sys.argv]), "configurations": rows}  # fmt: skip
    args.file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
