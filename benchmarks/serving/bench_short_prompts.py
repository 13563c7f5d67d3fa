"""Time to the first token of a lone short prompt, launched eagerly and as a captured graph.

usage: python benchmarks/serving/bench_short_prompts.py MODEL [--out benchmarks/results/h200]

MODEL is known by name (`vllm kernels explain`) and gets random weights. ttft_ms: the median of 15
prompts by their number of tokens; ready_s: what the start took, with captures.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

TOKENS, PROMPTS, GRAPH_TOKENS = (16, 64, 100, 128, 250, 512, 1024, 2048), 15, 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h100"))
    args = parser.parse_args()
    from bench_gpu import write_config
    from gpu_results import write_results

    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_config(args.model, Path(folder))
        for graph_tokens in (0, GRAPH_TOKENS):
            found.append(measured(folder, graph_tokens))
            print(found[-1], flush=True)
    name = args.model.rpartition("/")[2]
    write_results(args.out, f"short_prompts_{name}.json", model=args.model, starts=found)


def measured(folder: str, graph_tokens: int) -> dict[str, Any]:
    import torch

    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        enable_prefix_caching=False,
        max_prompt_graph_tokens=graph_tokens,
    )
    ready_s = time.perf_counter() - begin
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    ttft_ms = {}
    for count in TOKENS:
        prompt = {"prompt_token_ids": list(range(1, 1 + count))}
        seconds = []
        for _ in range(PROMPTS):
            begin = time.perf_counter()
            llm.generate(prompt, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
        ttft_ms[count] = round(1e3 * statistics.median(seconds), 2)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    start = {"max_prompt_graph_tokens": graph_tokens, "ready_s": round(ready_s, 1)}
    return start | {"ttft_ms": ttft_ms}


if __name__ == "__main__":
    main()
