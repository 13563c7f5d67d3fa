"""A kernel of your own in a file: it serves the layers that are named, and no others. At its first
call it is compared with the engine's reference, and a wrong one does not serve.

    python examples/plugin_backend.py [MODEL]
    vllm serve MODEL --kernel '*.down_proj=examples/plugin_backend.py:backend'

MODEL: a folder or a name on the Hugging Face hub with weights in bf16 or fp32; without it the demo
model before it was quantised. docs/backends.md describes the interface.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.kernels.select.spec import KernelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearTensors
    from vllm.kernels.select.decision import Candidate
    from vllm.kernels.select.problem import LinearProblem


class Backend:
    """Multiplies by torch."""

    SPECS = (
        KernelSpec(
            backend="example",
            family="linear",
            devices=frozenset({"cpu"}),
            formats=frozenset({"bf16", "fp32"}),
            dtypes=frozenset({"fp32"}),
        ),
    )

    def linear(
        self, problem: "LinearProblem", tensors: "LinearTensors", candidate: "Candidate"
    ) -> "Callable[[Tensor], Tensor]":
        """x [M, K] to y [M, N]; torch is imported here, since explaining a choice needs none."""
        import torch

        weight, bias = tensors.weight.float(), tensors.bias
        return lambda x: torch.nn.functional.linear(x, weight, bias)


backend = Backend()


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    own = f"*.down_proj={Path(__file__).resolve()}:backend"
    llm = LLM(model, kernel=[own], max_model_len=512)
    for decision in llm.llm_engine.core.executor.kernels()["decisions"]:
        if decision["chosen"] == "example":
            print(f"example serves {len(decision['layers'])} layers: {decision['problem']}")
    output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16))
    print(output[0].outputs[0].text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        from vllm.entrypoints.demo import dequantise, find_gguf

        with tempfile.TemporaryDirectory() as folder:
            dequantise(find_gguf(), Path(folder))
            main(folder)
