"""Quantises a checkpoint and says how far its predictions move: the mean change of the
log-probability of each token of some texts, and how often the likeliest token stays the same.

    python examples/quantize_and_compare.py [MODEL] [FORMAT ...]

MODEL: a folder with a checkpoint in bf16, fp16 or fp32; without it the demo model before it was
quantised. FORMAT: of `vllm quantize --help`, fp8-block and nvfp4 without it. `vllm eval paired`
compares with statistics and a budget.
"""

import sys
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.entrypoints.demo import dequantise, find_gguf
from vllm.model_executor.quantize import quantize_checkpoint

TEXTS = [
    "The sky is blue because air scatters short waves of light more than long ones.",
    "Bread is made of flour, water, salt and yeast, and baked in a hot oven for an hour.",
]
Prediction = tuple[float, int]
"""Log-probability of the token that stands in the text, and the likeliest token there."""


def predictions(model: Path) -> list[Prediction]:
    """For every token of the texts but the first ones."""
    llm = LLM(model, max_model_len=512, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    found = []
    for output in llm.generate(TEXTS, params, use_tqdm=False):
        for token, known in zip(output.prompt_token_ids, output.prompt_logprobs or []):
            if known is not None:  # of the first token nothing is predicted
                likeliest = max(known, key=lambda other: known[other].logprob)
                found.append((known[token].logprob, likeliest))
    return found


def main(source: Path, formats: list[str], folder: Path) -> None:
    before = predictions(source)
    print(f"{'weights':<12}{'log-probability':>18}{'change':>10}{'same token':>12}")
    print(f"{'as stored':<12}{sum(p for p, _ in before) / len(before):>18.4f}")
    for name in formats:
        quantize_checkpoint(source, folder / name, name)
        after = predictions(folder / name)
        mean = sum(p for p, _ in after) / len(after)
        change = sum(abs(p - q) for (p, _), (q, _) in zip(before, after)) / len(after)
        same = sum(a == b for (_, a), (_, b) in zip(before, after)) / len(after)
        print(f"{name:<12}{mean:>18.4f}{change:>10.4f}{same:>12.0%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        if sys.argv[1:]:
            model = Path(sys.argv[1])
        else:
            model = Path(place, "model")
            model.mkdir()
            dequantise(find_gguf(), model)
        main(model, sys.argv[2:] or ["fp8-block", "nvfp4"], Path(place))
