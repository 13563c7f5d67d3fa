"""Structured outputs with xgrammar: grammars are compiled in threads beside the engine's steps."""

import hashlib
import json
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from vllm.config.model import ModelConfig
from vllm.core.request import Request
from vllm.engine.fair_pool import FairPool
from vllm.engine.grammar import (
    GRAMMAR_KINDS,
    GrammarChecker,
    broken_library,
    compile_grammar,
    make_compiler,
)
from vllm.engine.tokenizer import load_tokenizer
from vllm.errors import GrammarError
from vllm.sampling_params import StructuredOutputsParams

# CPU time of the engine's thread for one token, during which other requests wait. Most grammars
# take a thousandth of it; ambiguous ones take longer with every token.
MAX_STEP_SECONDS = 0.5
# Each has a child process, which its first grammar starts.
_NUM_COMPILERS = 4
_MOST_OF_CLIENT = 2
_MAX_PASSED = 4096
# Time, file and condition, which xgrammar puts before what is wrong.
_XGRAMMAR_MARK = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


class StructuredOutputs:
    """The grammars of all requests that have one, from compilation to the last token."""

    def __init__(self, model_config: ModelConfig):
        self._model_config = model_config
        self._compiler: Any = None
        self._making = threading.Lock()
        self._pool = FairPool(_NUM_COMPILERS, _MOST_OF_CLIENT, "grammar")
        # The one used last is taken first: its process runs already.
        self._idle_checkers: queue.LifoQueue[GrammarChecker] = queue.LifoQueue()
        self._checkers = [GrammarChecker() for _ in range(_NUM_COMPILERS)]
        self._passed: set[bytes] = set()
        self._pending: dict[str, tuple[Request, Future[Any]]] = {}
        self._matchers: dict[str, Any] = {}
        self._slow: set[str] = set()
        self._masks: dict[str, Tensor] = {}  # of drafts, until the next token

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def prepare(self) -> None:
        """Does beside the engine's steps what the first grammar would wait for, some seconds."""
        self._pool.submit("", self._compile, StructuredOutputsParams(json_object=True))

    def submit(self, request: Request) -> None:
        """Starts to compile the grammar of `request`, which waits here meanwhile."""
        params = request.sampling.structured_outputs
        assert params is not None
        compiled = self._pool.submit(request.client, self._compile, params)
        self._pending[request.request_id] = request, compiled

    def collect(self) -> tuple[list[Request], dict[str, str]]:
        """Requests whose grammar is ready; and, by request id, why others are refused."""
        ready, refused = [], {}
        for request_id, (request, compiled) in list(self._pending.items()):
            if not compiled.done():
                continue
            del self._pending[request_id]
            try:
                self._matchers[request_id] = compiled.result()
                ready.append(request)
            except Exception as error:  # xgrammar raises RuntimeError for whatever it dislikes
                said = _XGRAMMAR_MARK.sub("", str(error)).strip()
                refused[request_id] = f"structured output: {said}"
        return ready, refused

    def forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)
        self._masks.pop(request_id, None)
        self._slow.discard(request_id)
        if pending := self._pending.pop(request_id, None):
            pending[1].cancel()

    def bitmasks(self, request_ids: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Allowed tokens of the requests with a grammar, int32 [draft tokens + 1 or fewer, words],
        and why others' grammars allow none."""
        bitmasks, refused = {}, {}
        for request_id in request_ids:
            if request_id in self._matchers:
                try:
                    bitmasks[request_id] = self.bitmask(request_id)
                except GrammarError as error:
                    refused[request_id] = str(error)
        return bitmasks, refused

    def bitmask(self, request_id: str) -> Tensor:
        """Bit masks of the tokens allowed next, and after each token of the draft that `fit_draft`
        took: int32 [1 + draft, ceil(vocab / 32)]. GrammarError where none is allowed next, and for
        a grammar that takes too long."""
        masks = self._masks.get(request_id)
        return self._next_mask(request_id) if masks is None else masks

    def fit_draft(self, request_id: str, draft: list[int]) -> None:
        """Cuts a draft at the first token that the grammar of the request refuses or ends with."""
        matcher = self._matchers.get(request_id)
        if matcher is None:
            return
        masks, num_taken = [], 0
        try:
            masks.append(self._next_mask(request_id))
            for token in draft:
                with self._timed(request_id):
                    is_taken = matcher.accept_token(token)
                num_taken += is_taken
                if not is_taken or matcher.is_terminated():
                    break
                masks.append(self._next_mask(request_id))
        except GrammarError:
            pass  # the step after the tokens before says so
        if num_taken:
            matcher.rollback(num_taken)
        del draft[max(len(masks) - 1, 0) :]
        if draft:
            self._masks[request_id] = torch.cat(masks)

    def _next_mask(self, request_id: str) -> Tensor:
        import xgrammar

        mask: Tensor = xgrammar.allocate_token_bitmask(1, self._model_config.vocab_size)
        with self._timed(request_id):
            self._matchers[request_id].fill_next_token_bitmask(mask)
        if request_id in self._slow:
            raise GrammarError(
                f"structured output: the grammar takes more than {MAX_STEP_SECONDS:g} s for a "
                f"token, and all other requests wait meanwhile; make it less ambiguous"
            )
        if not bool(mask.any()):
            raise GrammarError("structured output: no text matches the grammar")
        return mask

    def accept(self, request_id: str, token: int) -> bool:
        """Advances by a sampled token; True when the grammar is complete with it."""
        matcher = self._matchers[request_id]
        self._masks.pop(request_id, None)
        with self._timed(request_id):
            is_accepted = matcher.accept_token(token)
        return not is_accepted or matcher.is_terminated()

    @contextmanager
    def _timed(self, request_id: str) -> Iterator[None]:
        begin = time.thread_time()
        yield
        if time.thread_time() - begin > MAX_STEP_SECONDS:
            self._slow.add(request_id)

    def close(self) -> None:
        """Kills the child processes; nothing can be submitted any more."""
        self._pool.shutdown()
        for checker in self._checkers:
            checker.close()

    def _compile(self, params: StructuredOutputsParams) -> Any:
        """An xgrammar.GrammarMatcher of the grammar."""
        kind, text = _grammar_of(params)
        with self._making:
            if self._compiler is None:
                self._make_compiler()
        import xgrammar

        self._check(kind, text)
        return xgrammar.GrammarMatcher(compile_grammar(self._compiler, kind, text))

    def _check(self, kind: str, text: str) -> None:
        """GrammarError for what is wrong with a grammar; each is checked once."""
        key = hashlib.sha256(f"{kind} {text}".encode()).digest()
        if key in self._passed:
            return
        checker = self._idle_checkers.get()
        try:
            checker.check(kind, text)
        finally:
            self._idle_checkers.put(checker)
        if len(self._passed) >= _MAX_PASSED:
            self._passed.clear()
        self._passed.add(key)

    def _make_compiler(self) -> None:
        if find_spec("xgrammar") is None:
            raise GrammarError(
                "structured output needs xgrammar, which is not installed: pip install xgrammar"
            )
        if (why := broken_library()) is not None:
            raise GrammarError(f"xgrammar is broken here: {why}; install it again")
        self._checkers[-1].start()  # it imports what it needs while this process does
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(
            load_tokenizer(self._model_config),
            vocab_size=self._model_config.vocab_size,
            stop_token_ids=sorted(self._model_config.eos_token_ids),
        )
        for checker in self._checkers:
            checker.tokenizer_info = info.serialize_json()
            self._idle_checkers.put(checker)
        self._compiler = make_compiler(info)


def _grammar_of(params: StructuredOutputsParams) -> tuple[str, str]:
    """(kind, text) of the one grammar in params."""
    for kind in GRAMMAR_KINDS:
        value = getattr(params, kind)
        if value is not None and value is not False:
            return kind, value if isinstance(value, str) else json.dumps(value)
    raise AssertionError("one field is set")
