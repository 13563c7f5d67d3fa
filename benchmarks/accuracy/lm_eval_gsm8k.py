"""lm-evaluation-harness on the 1,319 GSM8K questions, against a running server, without a network.

    vllm serve --port 8000 --max-model-len 2048
    python benchmarks/accuracy/lm_eval_gsm8k.py DIR FILE --model NAME --tokenizer FOLDER

DIR has test.jsonl and train.jsonl; FILE gets the scores and which questions were right (JSON),
and with --against the agreement with what `gsm8k_eval.py --save-results` wrote. The task is the
harness' own `gsm8k` but for two lines: its data is DIR, and the worked examples are the first five
(`first_n`), as in tests/evals/gsm8k/gsm8k_eval.py, instead of five drawn for each question. Needs
lm-eval[api].
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TASK = Path(__file__).parent / "lm_eval" / "gsm8k_local.yaml"
FILTERS = ("strict-match", "flexible-extract")


def run_harness(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Its results, and one row for each question and filter."""
    (folder / TASK.name).write_text(TASK.read_text().replace("DATA/", f"{args.data.resolve()}/"))
    model_args = (
        f"model={args.model},base_url={args.base_url}/v1/completions,tokenizer={args.tokenizer},"
        f"tokenizer_backend=huggingface,num_concurrent=64,tokenized_requests=False,"
        f"max_gen_toks=256,max_length=2048"
    )
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
        *("--model_args", model_args, "--tasks", "gsm8k_local", "--include_path", str(folder)),
        *("--output_path", str(folder / "out"), "--log_samples", "--batch_size", "1"),
    ]
    offline = {"HF_HOME": str(folder / "hf"), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env={**os.environ, "OPENAI_API_KEY": "none", **offline})
    (results,) = folder.glob("out/*/results_*.json")
    (samples,) = folder.glob("out/*/samples_*.jsonl")
    return json.loads(results.read_text()), [json.loads(x) for x in samples.open()]


def summary(results: dict[str, Any], rows: list[Any], against: Path | None) -> dict[str, Any]:
    """Scores without the questions, which are not ours to publish."""
    scores = results["results"]["gsm8k_local"]
    right = {
        name: sorted(r["doc_id"] for r in rows if r["filter"] == name and r["exact_match"])
        for name in FILTERS
    }
    found: dict[str, Any] = {
        "lm_eval": results["lm_eval_version"],
        "num_questions": results["n-samples"]["gsm8k_local"]["effective"],
        "scores": {name: scores[f"exact_match,{name}"] for name in FILTERS},
        "stderr": {name: scores[f"exact_match_stderr,{name}"] for name in FILTERS},
        "right": right,
    }
    if against is not None:
        ours = {a["index"]: a for a in json.loads(against.read_text())["answers"]}
        texts = {r["doc_id"]: r["resps"][0][0] for r in rows}
        found["equal_texts"] = sum(texts[i] == ours[i]["text"] for i in texts)
        found["equal_verdicts"] = {
            name: sum((i in right[name]) == ours[i]["is_correct"] for i in texts)
            for name in FILTERS
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--against", type=Path, metavar="RESULTS")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = summary(*run_harness(args, Path(folder)), args.against)
    args.file.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "right"}, indent=1))


if __name__ == "__main__":
    main()
