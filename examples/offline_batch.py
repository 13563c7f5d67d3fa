"""Answers many prompts at once, in this process.

    python examples/offline_batch.py [MODEL]

MODEL: a folder or a name on the Hugging Face hub; without it the demo model.
"""

import sys

from vllm import LLM, SamplingParams
from vllm.entrypoints.demo import demo_model_path

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "The largest planet of the solar system is",
    "A prime number is",
]


def main(model: str) -> None:
    llm = LLM(model, max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=16)
    for output in llm.generate(PROMPTS, params):  # in the order of the prompts
        print(f"{output.prompt} ...{output.outputs[0].text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path()))
