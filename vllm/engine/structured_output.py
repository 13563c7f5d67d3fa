"""Grammars that outputs must match, through xgrammar: compiled beside the engine's steps."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm.config.model import ModelConfig
from vllm.engine.request import EngineRequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.tokenizer import load_tokenizer

# A grammar that takes longer, or is larger, is refused: one request must not hold up others.
MAX_COMPILE_SECONDS = 30.0
MAX_GRAMMAR_CHARS = 200_000
# Unlimited white space lets a small model produce nothing else.
_MAX_WHITESPACE = 16


class GrammarError(ValueError):
    """A grammar that cannot be compiled or that no text matches."""


@dataclass(slots=True)
class _Pending:
    request: EngineRequest
    compiled: "Future[Any]"
    since: float


class StructuredOutputs:
    """The grammars of all requests that have one, from compilation to the last token."""

    def __init__(self, model_config: ModelConfig):
        self._model_config = model_config
        self._compiler: Any = None
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._pending: dict[str, _Pending] = {}
        self._matchers: dict[str, Any] = {}

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def submit(self, request: EngineRequest) -> None:
        """Starts to compile the grammar of `request`, which waits here meanwhile."""
        params = request.sampling.structured_outputs
        assert params is not None
        compiled = self._pool.submit(self._compile, params)
        self._pending[request.request_id] = _Pending(request, compiled, time.monotonic())

    def collect(self) -> tuple[list[EngineRequest], dict[str, str]]:
        """Requests whose grammar is ready; and, by request id, why others are refused."""
        ready, refused = [], {}
        for request_id, pending in list(self._pending.items()):
            if pending.compiled.done():
                try:
                    self._matchers[request_id] = self._matcher(pending.compiled.result())
                    ready.append(pending.request)
                except Exception as error:  # xgrammar raises RuntimeError for whatever it dislikes
                    refused[request_id] = f"structured output: {error}"
            elif time.monotonic() - pending.since > MAX_COMPILE_SECONDS:
                pending.compiled.cancel()
                refused[request_id] = (
                    f"structured output: the grammar took more than {MAX_COMPILE_SECONDS:.0f} s "
                    f"to compile; simplify it"
                )
            else:
                continue
            del self._pending[request_id]
        return ready, refused

    def forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)
        if pending := self._pending.pop(request_id, None):
            pending.compiled.cancel()

    def follows_grammar(self, request_id: str) -> bool:
        return request_id in self._matchers

    def bitmask(self, request_id: str) -> Tensor:
        """Tokens allowed next: int32 [ceil(vocab / 32)]. GrammarError when there is none."""
        import xgrammar

        mask = xgrammar.allocate_token_bitmask(1, self._model_config.vocab_size)
        self._matchers[request_id].fill_next_token_bitmask(mask)
        if not bool(mask.any()):
            raise GrammarError("structured output: no text matches the grammar")
        allowed: Tensor = mask[0]
        return allowed

    def accept(self, request_id: str, token: int) -> bool:
        """Moves on by a sampled token; True when the grammar is complete with it."""
        matcher = self._matchers[request_id]
        return not matcher.accept_token(token) or matcher.is_terminated()

    def _matcher(self, compiled: Any) -> Any:
        import xgrammar

        return xgrammar.GrammarMatcher(compiled)

    def _compile(self, params: StructuredOutputsParams) -> Any:
        if self._compiler is None:
            self._compiler = self._make_compiler()
        for field, compile_field in _COMPILERS.items():
            value = getattr(params, field)
            if value is not None and value is not False:
                return compile_field(self._compiler, value)
        raise AssertionError("one field is set")

    def _make_compiler(self) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise GrammarError(
                "structured output needs xgrammar, which is not installed: pip install xgrammar"
            ) from error
        info = xgrammar.TokenizerInfo.from_huggingface(
            load_tokenizer(self._model_config),
            vocab_size=self._model_config.vocab_size,
            stop_token_ids=sorted(self._model_config.eos_token_ids),
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 << 20)


def _compile_json(compiler: Any, schema: str | dict[str, Any]) -> Any:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return compiler.compile_json_schema(_bounded(text), max_whitespace_cnt=_MAX_WHITESPACE)


def _compile_choice(compiler: Any, choices: list[str]) -> Any:
    if not choices:
        raise GrammarError("choice is empty")
    root = " | ".join(json.dumps(choice) for choice in choices)
    return compiler.compile_grammar(_bounded(f"root ::= {root}"))


def _bounded(text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"{len(text)} characters; at most {MAX_GRAMMAR_CHARS} are taken")
    return text


_COMPILERS: dict[str, Callable[[Any, Any], Any]] = {
    "json": _compile_json,
    "json_object": lambda compiler, _: compiler.compile_builtin_json_grammar(),
    "regex": lambda compiler, text: compiler.compile_regex(_bounded(text)),
    "choice": _compile_choice,
    "grammar": lambda compiler, text: compiler.compile_grammar(_bounded(text)),
}
