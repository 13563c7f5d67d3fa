"""The score of the model of sums with each kind of scales, paired, in the engine.

    python benchmarks/accuracy/sums_ue8m0.py FILE [--bf16 FOLDER]

FILE (JSON) gets how many of the 4,000 held-out sums are right by each configuration, and McNemar's
test against float32 scales. --bf16: what tests/evals/sums/train.py wrote.
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

REFERENCE = "emulate:cutlass@sm_100"
# --linear-backend and variables; None computes activations as they are.
CONFIGURATIONS: tuple[tuple[str | None, dict[str, str]], ...] = (
    (REFERENCE, {}),
    (None, {}),
    ("emulation", {}),
    ("emulation-ue8m0", {}),
    ("emulate:deep_gemm@sm_100", {}),
    ("emulate:sm_100", {}),
    ("emulate:sm_100", {"VLLM_USE_DEEP_GEMM": "1"}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--bf16", type=Path, help="The model before it was quantised.")
    args = parser.parse_args()
    sides = [(backend, variables, MODEL) for backend, variables in CONFIGURATIONS]
    if args.bf16:
        sides.append((None, {}, args.bf16))
    rows: list[dict[str, Any]] = []
    reference: list[bool] = []
    for backend, variables, model in sides:
        start = time.monotonic()
        right, _ = right_answers(backend, model, **variables)
        reference = reference or right
        rows.append(
            {"linear_backend": backend, "variables": variables, "is_bf16": model is args.bf16,
             "seconds": round(time.monotonic() - start, 1),
             "num_correct": sum(right), "accuracy": sum(right) / len(right),
             "interval": wilson_interval(sum(right), len(right)),
             f"against {REFERENCE}": vars(compare_answers(reference, right))}
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    content = {"machine": machine(), "date": datetime.now(UTC).date().isoformat(),
               "command": shlex.join(["python", *sys.argv]), "configurations": rows}  # fmt: skip
    args.file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
