"""Beam search for one prompt: each step asks the engine for one token of every beam."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from vllm.beam_search import BeamSearch, BeamSearchSequence
from vllm.engine.engine_client import EngineClient
from vllm.engine.input_processor import Prompt
from vllm.entrypoints.openai.caller import Caller
from vllm.entrypoints.openai.prompts import Prompts
from vllm.entrypoints.openai.streams import merged
from vllm.errors import RequestError
from vllm.outputs import CompletionOutput, LogprobDict, RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams

# Tokens of the prompt that may change how the first tokens of an answer are written.
_CONTEXT = 8


@dataclass(frozen=True)
class Beams:
    """A search. prompt: as the engine takes it, of `token_ids`; params: what the client asked for,
    n of it is the width; request_id: unique in the engine, to which parts are added."""

    engine: EngineClient
    prompts: Prompts
    prompt: Prompt
    token_ids: list[int]
    params: SamplingParams
    length_penalty: float
    request_id: str
    priority: int
    caller: Caller

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """The best beams as choices of one output, the best first."""
        params = self.params
        # Where there is no room the engine says that the prompt is too long.
        room = max(1, self.engine.model_config.max_model_len - len(self.token_ids))
        wanted = BeamSearchParams(
            beam_width=params.n,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            ignore_eos=params.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        for what in ("structured_outputs", "prompt_logprobs"):
            if getattr(params, what) is not None:
                message = f"use_beam_search takes no {what}, and what asks for them"
                raise RequestError(message, "use_beam_search")
        search = BeamSearch(self.token_ids, wanted, self.engine.model_config.eos_token_ids)
        num_steps, num_cached = 0, 0
        while search.live:
            found = await self._next(search, num_steps)
            if not num_steps:
                num_cached = found[0].num_cached_tokens
            num_steps += 1
            search.advance([(output.outputs[0].logprobs or [{}])[0] for output in found])
        sequences = search.best().sequences
        choices = [await self._choice(index, beam) for index, beam in enumerate(sequences)]
        yield RequestOutput(self.request_id, None, self.token_ids, None, choices, True, num_cached)

    async def _next(self, search: BeamSearch, step: int) -> list[RequestOutput]:
        """One more token of each live beam, in their order."""
        params = msgspec.structs.replace(search.step_params, detokenize=self._has_text)
        own = self.prompt if isinstance(self.prompt, dict) else {}
        streams = [
            self.engine.generate(
                {**own, "prompt_token_ids": beam.tokens},
                params,
                f"{self.request_id}-{step}-{place}",
                priority=self.priority,
                client=self.caller.client,
                trace_headers=self.caller.trace_headers,
            )
            for place, beam in enumerate(search.live)
        ]
        found: dict[int, RequestOutput] = {}
        async with aclosing(merged(streams)) as outputs:
            async for place, output in outputs:
                found[place] = output
        return [found[place] for place in range(len(streams))]

    @property
    def _has_text(self) -> bool:
        return self.prompts.tokenizer is not None

    async def _choice(self, index: int, beam: BeamSearchSequence) -> CompletionOutput:
        new = beam.tokens[len(self.token_ids) :]
        text = ""
        if self._has_text:
            before, skips = self.token_ids[-_CONTEXT:], self.params.skip_special_tokens
            context = await self.prompts.decode(before, skips)
            text = (await self.prompts.decode([*before, *new], skips))[len(context) :]
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [
                _shown(place, token, self.params.logprobs)
                for token, place in zip(new, beam.logprobs)
            ]
        return CompletionOutput(index, text, new, beam.cum_logprob, logprobs, beam.finish_reason)


def _shown(place: LogprobDict, taken: int, count: int) -> LogprobDict:
    """The token of the beam, then the likeliest, as many as were asked for."""
    likeliest = sorted(place, key=lambda token: -place[token].logprob)
    likeliest = likeliest if count < 0 else likeliest[:count]
    return {token: place[token] for token in dict.fromkeys([taken, *likeliest])}
