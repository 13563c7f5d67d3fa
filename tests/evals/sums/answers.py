"""The model beside this file, and which held-out sums the engine gets right with it."""

from pathlib import Path

from evals.sums import problems, tokenizer

from vllm.engine.arg_utils import EngineArgs
from vllm.evals.measure import Configuration, Job, measure

MODEL = Path(__file__).parent / "model"


def right_answers(
    linear_backend: str | None, model: Path = MODEL, **variables: str
) -> tuple[list[bool], list[int]]:
    """Of every question in order: whether it is right, and the token of the answer."""
    terms = problems.held_out()
    args = EngineArgs(model=str(model), linear_backend=linear_backend, skip_tokenizer_init=True,
                      max_num_seqs=512)  # fmt: skip
    configuration = Configuration(str(linear_backend), args, tuple(variables.items()))
    job = Job((), questions=tokenizer.prompts(terms).tolist(), max_tokens=1)
    tokens = [token for (token,) in measure(configuration, job).outputs]
    wanted = (terms.sum(-1) + tokenizer.NUMBER).tolist()
    return [token == right for token, right in zip(tokens, wanted, strict=True)], tokens
