"""Runs the engine with one configuration in a process of its own, and reads what it thinks."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import VllmError
from vllm.evals.paired import Position

TokenIds = list[int]


@dataclass(frozen=True)
class Configuration:
    """Engine arguments and environment variables of one side."""

    name: str
    engine_args: EngineArgs
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Job:
    """texts: scored token by token, the first one of each has no position. questions: continued
    greedily by up to max_tokens. num_logprobs: how many of the likeliest tokens to read."""

    texts: Sequence[TokenIds]
    questions: Sequence[TokenIds] = ()
    max_tokens: int = 256
    num_logprobs: int = 100


@dataclass(frozen=True)
class Measured:
    """positions: of all texts in order. outputs: token ids, one list per question."""

    positions: list[Position]
    outputs: list[TokenIds]


def measure(configuration: Configuration, job: Job) -> Measured:
    """Loads, runs and ends a child process, so that nothing of one side is left for the other.

    Raises what the engine raises (ConfigError, CheckpointError ...), or VllmError if it dies.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        try:
            return pool.submit(_run, configuration, job).result()
        except BrokenProcessPool as error:
            raise VllmError(f"{configuration.name}: the engine's process ended early") from error


def _run(configuration: Configuration, job: Job) -> Measured:
    for name, value in configuration.variables:
        envs.set_for_children(name, value)
    envs.check_all()
    from vllm import LLM, SamplingParams

    llm = LLM(**vars(configuration.engine_args))
    scoring = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=job.num_logprobs, detokenize=False
    )
    answering = SamplingParams(temperature=0, max_tokens=job.max_tokens, detokenize=False)
    scored = llm.generate(job.texts, scoring, use_tqdm=False)
    answered = llm.generate(job.questions, answering, use_tqdm=False)
    positions = [
        Position(token, given[token].logprob, {t: entry.logprob for t, entry in given.items()})
        for output in scored
        for token, given in zip(output.prompt_token_ids, output.prompt_logprobs or ())
        if given is not None
    ]
    return Measured(positions, [list(output.outputs[0].token_ids) for output in answered])
