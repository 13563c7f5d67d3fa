"""Compiles grammars with xgrammar, and checks them in a child process before that.

A grammar may keep its compiler busy for ever, crash it or take all memory. `GrammarChecker`
compiles it in a child; what compiled in time there is then compiled in the engine by the same code.
"""

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm.engine.json_schemas import check_schema
from vllm.errors import GrammarError
from vllm.platforms.child import Child, ChildEndedError, requests, run
from vllm.platforms.libraries import passed_trials, remember_trial

MAX_GRAMMAR_CHARS = 200_000
MAX_COMPILE_SECONDS = 10.0
_START_SECONDS = 120.0
_IMPORT_SECONDS = 60.0
_MAX_MEMORY = 4 << 30
# Unlimited white space lets a small model produce nothing else.
_MAX_WHITESPACE = 16


@cache
def broken_library() -> str | None:
    """Why xgrammar cannot be loaded, tried in a child process where it was not on this machine: an
    import that faults or hangs must not end the engine. None where it can, or is not installed."""
    spec = find_spec("xgrammar")
    if spec is None or spec.origin is None:
        return None
    key = f"import of {spec.origin} of {Path(spec.origin).stat().st_mtime_ns}"
    if key in passed_trials():
        return None
    try:
        run("vllm.engine.grammar:import_library", timeout=_IMPORT_SECONDS)
    except ChildEndedError as error:
        return f"loading it {error}"
    except TimeoutError:
        return f"loading it took more than {_IMPORT_SECONDS:g} s"
    remember_trial(key)
    return None


def import_library() -> None:
    import xgrammar  # noqa: F401


def make_compiler(tokenizer_info: Any) -> Any:
    import xgrammar

    return xgrammar.GrammarCompiler(tokenizer_info, max_threads=1, cache_limit_bytes=64 << 20)


def compile_grammar(compiler: Any, kind: str, text: str) -> Any:
    """`text` as a grammar of `kind`, the name of its field in StructuredOutputsParams."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"{len(text)} characters; at most {MAX_GRAMMAR_CHARS} are taken")
    return _COMPILERS[kind](compiler, text)


def _compile_json(compiler: Any, schema: str) -> Any:
    return compiler.compile_json_schema(schema, max_whitespace_cnt=_MAX_WHITESPACE)


def _compile_choice(compiler: Any, text: str) -> Any:
    choices = json.loads(text)
    if not choices:
        raise GrammarError("choice is empty")
    # EBNF has JSON's escapes except for surrogate pairs.
    root = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return compiler.compile_grammar(f"root ::= {root}")


def _compile_structural_tag(compiler: Any, text: str) -> Any:
    given = json.loads(text)
    is_whole = isinstance(given, dict) and given.get("type") == "structural_tag"
    return compiler.compile_structural_tag(
        given if is_whole else {"type": "structural_tag", "format": given}
    )


def _compile_tool_calls(compiler: Any, text: str) -> Any:
    from xgrammar import get_model_structural_tag

    asked = json.loads(text)
    or_else = asked.pop("or_else", None)
    calls = get_model_structural_tag(**asked, max_whitespace_cnt=_MAX_WHITESPACE)
    if or_else is None:
        return compiler.compile_structural_tag(calls)
    either = {"type": "or", "elements": [calls.model_dump()["format"], or_else]}
    return compiler.compile_structural_tag({"type": "structural_tag", "format": either})


_COMPILERS: dict[str, Callable[[Any, str], Any]] = {
    "json": _compile_json,
    "json_object": lambda compiler, _: _compile_json(compiler, '{"type": "object"}'),
    "regex": lambda compiler, text: compiler.compile_regex(text),
    "choice": _compile_choice,
    "grammar": lambda compiler, text: compiler.compile_grammar(text),
    "structural_tag": _compile_structural_tag,
    "tool_calls": _compile_tool_calls,
}
GRAMMAR_KINDS = tuple(_COMPILERS)
"""Fields of StructuredOutputsParams that hold a grammar."""


# ---------------------------------------------------------------- in a child process


class GrammarChecker:
    """A child process for one thread at a time, started by `start` or the first grammar.

    tokenizer_info: xgrammar's, as JSON; it may be set after `start`.
    """

    def __init__(self, tokenizer_info: str = ""):
        self.tokenizer_info = tokenizer_info
        self._child: Child | None = None
        self._knows_tokenizer = False

    def start(self) -> Child:
        """The process, started where none runs; its imports take seconds, not waited for here."""
        if self._child is None:
            self._child = Child("vllm.engine.grammar:serve", max_memory=_MAX_MEMORY)
            self._knows_tokenizer = False
        return self._child

    def check(self, kind: str, text: str, timeout: float = MAX_COMPILE_SECONDS) -> None:
        """GrammarError if the grammar does not compile, or not within `timeout` seconds."""
        try:
            child = self.start()
            if not self._knows_tokenizer:
                child.send(self.tokenizer_info)
                child.receive(_START_SECONDS)
                self._knows_tokenizer = True
            child.send((kind, text))
            error = child.receive(timeout)
        except TimeoutError:
            self.close()
            raise GrammarError(
                f"the grammar took more than {timeout:g} s to compile; simplify it"
            ) from None
        except (OSError, ChildEndedError):
            self.close()
            raise GrammarError("the grammar is more than its compiler can take") from None
        if error:
            raise GrammarError(error)

    def close(self) -> None:
        """Kills the process; the next grammar starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


def serve(channel: Connection) -> None:
    """Runs in the child: takes xgrammar's tokenizer info as JSON, then answers each (kind, text)
    with what is wrong with it, "" for nothing."""
    import xgrammar

    compiler = make_compiler(xgrammar.TokenizerInfo.deserialize_json(channel.recv()))
    channel.send("")
    for kind, text in requests(channel):
        error = ""
        try:
            if kind == "json" and len(text) <= MAX_GRAMMAR_CHARS:
                check_schema(text)
            compile_grammar(compiler, kind, text)
        except Exception as failure:  # xgrammar raises RuntimeError for what it dislikes
            error = str(failure) or type(failure).__name__
        channel.send(error)
