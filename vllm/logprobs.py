"""Log-probabilities of answers, under the names of their types."""

from vllm.outputs import Logprob, LogprobDict

PromptLogprobs = list[LogprobDict | None]
SampleLogprobs = list[LogprobDict]

__all__ = ["Logprob", "LogprobDict", "PromptLogprobs", "SampleLogprobs"]
