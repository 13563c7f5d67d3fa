"""Turns a client's prompt into engine requests: tokenises, validates, one request per choice."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from vllm.config import VllmConfig
from vllm.core.request import EngineRequest
from vllm.errors import RequestError
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.sampling_params import PoolingParams, SamplingParams

Prompt = PromptType

# So many are checked in less time than it takes to hand them to a thread and back.
_QUICK_TOKENS = 8192


def refuse_lora(request: LoRARequest | None) -> None:
    """RequestError for a request with an adapter."""
    if request is not None:
        raise RequestError(
            f"lora_request {request.lora_name!r}: adapters are not supported; serve a checkpoint "
            f"into which the adapter is merged",
            "lora_request",
        )


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    prompt: str | None
    prompt_token_ids: list[int]
    requests: list[EngineRequest]


class InputProcessor:
    """Raises RequestError for what the engine cannot serve."""

    def __init__(self, config: VllmConfig, tokenizer: Any):
        self.config = config.model_config
        self.tokenizer = tokenizer
        drafts = config.speculative_config
        self._accepts_by_lot = drafts is not None and drafts.acceptance_rate is not None
        id_range = msgspec.Meta(ge=0, lt=self.config.vocab_size)
        self._ids_type = list[Annotated[int, id_range]]

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        client: str = "",
    ) -> ProcessedInput:
        pooling = None
        if isinstance(params, PoolingParams):
            pooling, params = params, SamplingParams(max_tokens=0, ignore_eos=True, seed=0)
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError(f"cache_salt takes a text that is not empty, not {salt!r}",
                               "cache_salt")  # fmt: skip
        text, token_ids = self._tokenise(prompt)
        self._check_prompt(token_ids)
        self._check_params(params)
        params = _with_text_grammar(params)
        max_tokens = self._max_tokens(len(token_ids), params)
        stops = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops |= self.config.eos_token_ids
        bad_words = self._spellings(params.bad_words or ())
        seed = secrets.randbits(63) if params.seed is None else params.seed
        requests = []
        for index in range(params.n):
            # Only the first choice reports the prompt, which is the same for all.
            own = params if index == 0 else msgspec.structs.replace(params, prompt_logprobs=None)
            requests.append(
                EngineRequest(
                    request_id=f"{request_id}#{index}",
                    prompt_token_ids=token_ids,
                    sampling=own,
                    seed=seed + index,
                    stop_token_ids=sorted(stops),
                    max_tokens=max_tokens,
                    pooling=pooling,
                    bad_words=bad_words,
                    priority=priority,
                    cache_salt=salt,
                    client=client,
                )
            )
        return ProcessedInput(text, token_ids, requests)

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            known = ("prompt", "prompt_token_ids", "cache_salt")
            others = [k for k, value in prompt.items() if value is not None and k not in known]
            if others:
                raise _refusal(f"a prompt object takes {' or '.join(known[:2])}, not {others}")
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
                if isinstance(prompt, str):
                    raise _refusal(f"prompt_token_ids takes token ids, not {prompt!r}")
            elif "prompt" in prompt:
                prompt = prompt["prompt"]
            else:
                raise _refusal(
                    f"a prompt object takes prompt or prompt_token_ids, not {sorted(prompt)}"
                )
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise _refusal("there is no tokenizer: send token ids")
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise _refusal(f"the prompt is no valid Unicode: {error}") from None
            return prompt, list(self.tokenizer(prompt).input_ids)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return None, [*prompt]
        raise _refusal(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise _refusal("the prompt is empty: it needs at least one token")
        try:
            msgspec.convert(token_ids, self._ids_type)
        except msgspec.ValidationError:  # does not name the token
            limit = self.config.vocab_size
            for token in token_ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limit:
                    raise _refusal(
                        f"token id {token!r} in the prompt: it takes integers from 0 to {limit - 1}"
                    ) from None
        if len(token_ids) > self.config.max_model_len:
            raise _refusal(
                f"the prompt has {len(token_ids)} tokens; this server takes at most "
                f"{self.config.max_model_len}, prompt and output together"
            )

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        room = self.config.max_model_len - num_prompt
        if params.max_tokens is None:
            if room == 0:
                raise _refusal(
                    f"the prompt has {num_prompt} tokens, which leaves no room for output in a "
                    f"context of {self.config.max_model_len}"
                )
            return room
        if params.max_tokens > room:
            raise RequestError(
                f"max_tokens = {params.max_tokens} and a prompt of {num_prompt} tokens exceed the "
                f"context of {self.config.max_model_len}; ask for at most {room}",
                "max_tokens",
            )
        return params.max_tokens

    def _check_params(self, params: SamplingParams) -> None:
        limit = self.config.vocab_size
        for name, tokens in (
            ("logit_bias", params.logit_bias or {}),
            ("stop_token_ids", params.stop_token_ids or []),
            ("allowed_token_ids", params.allowed_token_ids or []),
            ("logprob_token_ids", params.logprob_token_ids or []),
        ):
            bad = [t for t in tokens if not isinstance(t, int) or not 0 <= t < limit]
            if bad:
                raise RequestError(
                    f"{name} names token id {bad[0]!r}: it takes 0 to {limit - 1}", name
                )
        for token, bias in (params.logit_bias or {}).items():
            if not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias of token {token} is {bias}: it takes -100 to 100", "logit_bias"
                )
        if self._accepts_by_lot and params.logprobs is not None:
            raise RequestError(
                f"logprobs = {params.logprobs}: draft tokens are accepted by lot and have none "
                "(rejection_sample_method synthetic); ask without them",
                "logprobs",
            )
        needs_text = params.stop_strings or params.structured_outputs or params.bad_words
        if self.tokenizer is None and needs_text:
            raise RequestError(
                "stop texts, bad words and structured output need a tokenizer", "stop"
            )

    def _spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word at the begin of a text and after a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        found = {tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts}
        return [[*ids] for ids in sorted(found) if ids]


def is_quick(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether `process` takes less time than a thread would: a few token ids, and nothing else to
    tokenise, to parse or to check one by one."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    is_short = isinstance(ids, list) and len(ids) <= _QUICK_TOKENS and params.n == 1
    p = params
    tokens = p.allowed_token_ids or p.logit_bias or p.logprob_token_ids or p.stop_token_ids
    return is_short and not (tokens or p.structured_outputs or p.bad_words)


def _refusal(text: str) -> RequestError:
    return RequestError(text, "prompt")


def _with_text_grammar(params: SamplingParams) -> SamplingParams:
    """`params` with its grammar as text: messages cannot hold integers over 64 bits."""
    asked = params.structured_outputs
    names = ("json", "structural_tag", "tool_calls")
    given = {name: getattr(asked, name, None) for name in names}
    objects = {name: value for name, value in given.items() if isinstance(value, dict)}
    if asked is None or not objects:
        return params
    try:
        texts = {name: json.dumps(value) for name, value in objects.items()}
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON: {error}", "structured_outputs") from None
    return msgspec.structs.replace(
        params, structured_outputs=msgspec.structs.replace(asked, **texts)
    )
