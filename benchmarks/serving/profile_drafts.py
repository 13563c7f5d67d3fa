"""Where a step goes that verifies draft tokens and drafts the next ones: kernels and gaps.

usage: python benchmarks/serving/profile_drafts.py MODEL --out FILE [--batch 1,8]
           [--config '{"method": "mtp", "num_speculative_tokens": 1}'] [--acceptance 0.7]

Random weights; for each batch size with drafts, accepted by lot, and without them in that engine.
Of the steps in the middle of a run, from one sampled token to the next, means:
  period_us   of a step, while torch's profiler records, which slows the host and the launch of CUDA
              graphs: gaps are longer than without it (bench_drafts.py has the times without it)
  busy_us     in which at least one kernel runs
  idle_us     in which none does, by the kernel that runs next
  kernels     by name: time and launches; those that run beside others count whole
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

# A kernel that runs once a step, and how long to look: thirty milliseconds.
STEP, WINDOW = "sample_kernel", 30_000_000
NAME, MOST_GAPS, MOST_KERNELS = 60, 4, 24


def main() -> None:
    args = parse_args()
    import bench_drafts
    from gpu_results import write_results

    from vllm.core.speculation import Speculation
    from vllm.worker.kernel_spans import in_order, recording, spans_of

    with tempfile.TemporaryDirectory() as folder:
        llm = bench_drafts.load(args, Path(folder), drafts=True)
    core, found = llm.llm_engine.core, {}
    learnt = Speculation(core.config.speculative_config)
    for batch in args.batch:
        for name, speculation in (("drafts", learnt), ("plain", None)):
            core.speculation = speculation
            for turn in range(2):
                bench_drafts.run(llm, "none", batch, turn, "")
            with recording() as recorded:
                bench_drafts.run(llm, "none", batch, 2, "")
            spans = [
                (s.begin, s.end, s.stream, s.name[:NAME]) for s in in_order(spans_of(recorded))
            ]
            if not spans:
                sys.exit("torch's profiler recorded no kernels: this needs a GPU")
            found[f"b{batch} {name}"] = summary(spans)
            print(f"b{batch} {name}", json.dumps(found[f"b{batch} {name}"]), flush=True)
            write_results(args.out.parent, args.out.name, model=args.model, **found)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--config", default='{"method": "mtp", "num_speculative_tokens": 1}')
    parser.add_argument("--acceptance", type=float, default=0.7)
    args = parser.parse_args()
    args.batch = [*map(int, args.batch.split(","))]
    args.config = json.loads(args.config) | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rate": args.acceptance,
    }
    args.load_format, args.cases = "dummy", ["none"]
    args.engine_args = '{"max_model_len": 2048, "max_num_seqs": 64}'
    return args


def summary(spans: Sequence[tuple[int, int, int, str]]) -> dict[str, Any]:
    """spans: begin and end in nanoseconds, stream and name of each kernel, by their beginnings."""
    middle = spans[len(spans) // 2][0]
    spans = [span for span in spans if middle <= span[0] < middle + WINDOW]
    marks = [place for place, span in enumerate(spans) if STEP in span[3]]
    steps = [spans[a + 1 : b + 1] for a, b in pairwise(marks)]
    times, launches, idle, busy = Counter(), Counter(), Counter(), 0
    for a, step in zip(marks, steps):
        ended = spans[a][1]
        for begin, end, _, name in step:
            idle[name] += max(0, begin - ended)
            busy += max(0, end - max(begin, ended))
            ended = max(ended, end)
            times[name] += end - begin
            launches[name] += 1
    count = len(steps)
    period = (spans[marks[-1]][1] - spans[marks[0]][1]) / count
    return {
        "steps": count,
        "period_us": round(period / 1e3),
        "busy_us": round(busy / count / 1e3),
        "idle_us": {name: round(t / count / 1e3) for name, t in idle.most_common(MOST_GAPS)},
        "kernels": {
            name: {"us": round(time / count / 1e3, 1), "launches": round(launches[name] / count, 1)}
            for name, time in times.most_common(MOST_KERNELS)
        },
    }


if __name__ == "__main__":
    main()
