"""Beam search: which sequences to extend next, and which to keep. Whoever has an engine extends
them by one token and tells the log-probabilities."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm.outputs import LogprobDict
from vllm.sampling_params import BeamSearchParams, SamplingParams


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. tokens: of the prompt and the output; logprobs: at each place of the output;
    cum_logprob: sum over the output tokens; text: of `tokens`, None without a tokenizer."""

    tokens: list[int]
    logprobs: list[LogprobDict]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The beams of one prompt. A beam's score is the sum of the log-probabilities of its output
    tokens over (their number) ** length_penalty, where an end-of-sequence token adds to the sum and
    not to the number.

    live: beams to extend, the likeliest first; none when the search is over.
    """

    def __init__(
        self, prompt_token_ids: Sequence[int], params: BeamSearchParams, eos_ids: Collection[int]
    ):
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._num_steps = 0
        self.live = [BeamSearchSequence([*prompt_token_ids], [])]
        self._done: list[tuple[float, BeamSearchSequence]] = []

    @property
    def step_params(self) -> SamplingParams:
        """For one more token of each live beam: as many of its likeliest tokens as can matter."""
        width = self._params.beam_width
        count = max(2 * width, width + len(self._eos_ids))
        return SamplingParams(
            temperature=0, max_tokens=1, logprobs=count, ignore_eos=True, detokenize=False
        )

    def advance(self, logprobs: Sequence[LogprobDict]) -> None:
        """logprobs: of the next token of each live beam."""
        extended = [
            (beam.cum_logprob + entry.logprob, token, beam, place)
            for beam, place in zip(self.live, logprobs, strict=True)
            for token, entry in place.items()
        ]
        extended.sort(key=lambda one: -one[0])
        self._num_steps += 1
        self.live = []
        for total, token, beam, place in extended:
            is_end = token in self._eos_ids
            if not is_end and len(self.live) < self._params.beam_width:
                places = [*beam.logprobs, place]
                self.live.append(BeamSearchSequence([*beam.tokens, token], places, total))
            elif is_end:
                self._end(total, token, beam, place)
        if self._num_steps >= self._params.max_tokens or self._is_decided():
            for beam in self.live:
                beam.finish_reason = "length"
                self._done.append((self._score(beam.cum_logprob, self._num_steps), beam))
            self.live = []

    def _end(self, total: float, token: int, beam: BeamSearchSequence, place: LogprobDict) -> None:
        shown = [token] if self._params.include_stop_str_in_output else []
        ended = BeamSearchSequence(
            [*beam.tokens, *shown], [*beam.logprobs, place], total, None, "stop", token
        )
        self._done.append((self._score(total, self._num_steps - 1), ended))

    def _score(self, total: float, length: int) -> float:
        return float(total / max(length, 1) ** self._params.length_penalty)

    def _is_decided(self) -> bool:
        """Whether no live beam can become one of the best: its sum never rises."""
        scores = sorted((score for score, _ in self._done), reverse=True)
        if len(scores) < self._params.beam_width or not self.live:
            return False
        lengths = (self._num_steps, self._params.max_tokens)
        best = max(self._score(self.live[0].cum_logprob, length) for length in lengths)
        return best <= scores[self._params.beam_width - 1]

    def best(self) -> BeamSearchOutput:
        self._done.sort(key=lambda one: -one[0])
        return BeamSearchOutput([beam for _, beam in self._done[: self._params.beam_width]])
