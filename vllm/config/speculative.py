"""Speculative decoding: how tokens are drafted that a later step verifies."""

from collections.abc import Mapping
from typing import Any

from vllm.errors import ConfigError, did_you_mean
from vllm.utils.dataclasses import dataclass, fields

SPECULATIVE_METHODS = ("ngram",)
# Draft tokens of a request and step: at most, and where the user sets no number.
MOST_DRAFT_TOKENS = 32
AUTO_DRAFT_TOKENS = 16
# Draft tokens of all requests of a step: their logits take memory.
STEP_DRAFT_TOKENS = 128
_MOST_LOOKUP = 64
_DEFAULT_LOOKUP = 2, 5

# Methods of upstream's that need weights of their own.
_OTHER_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "suffix")


@dataclass(frozen=True)
class SpeculativeConfig:
    """method: one of SPECULATIVE_METHODS. num_speculative_tokens: draft tokens of a request and
    step, at most. prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that ngram looks up.
    disable_by_batch_size: with more requests than this, none drafts; None for no limit.
    """

    method: str = SPECULATIVE_METHODS[0]
    num_speculative_tokens: int = AUTO_DRAFT_TOKENS
    prompt_lookup_min: int = _DEFAULT_LOOKUP[0]
    prompt_lookup_max: int = _DEFAULT_LOOKUP[1]
    disable_by_batch_size: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "SpeculativeConfig":
        """From the JSON object of `--speculative-config`; ConfigError for what it cannot be."""
        names = [f.name for f in fields(cls)]
        unknown = [name for name in given if name not in names]
        method = given.get("method")
        if method not in SPECULATIVE_METHODS and not (unknown and method is None):
            raise _error(_wrong_method(method))
        for name in unknown:
            raise _error(
                f"unknown key {name!r}{did_you_mean(name, names)}; it takes {', '.join(names)}"
            )
        num_tokens = given.get("num_speculative_tokens", "auto")
        least, most = _lookup(given)
        limit = given.get("disable_by_batch_size")
        return cls(
            method=method,
            num_speculative_tokens=(
                AUTO_DRAFT_TOKENS
                if num_tokens == "auto"
                else _number("num_speculative_tokens", num_tokens, MOST_DRAFT_TOKENS, " or auto")
            ),
            prompt_lookup_min=least,
            prompt_lookup_max=most,
            disable_by_batch_size=(
                None if limit is None else _number("disable_by_batch_size", limit, 1 << 20)
            ),
        )


def _wrong_method(method: object) -> str:
    accepted = f'it takes {", ".join(SPECULATIVE_METHODS)}, as in {{"method": "ngram"}}'
    if method is None:
        return f"no method is given: {accepted}"
    if method in _OTHER_METHODS or str(method).endswith("_mtp"):
        return (
            f"method {method!r} is not supported here, whether or not the checkpoint has draft "
            f"weights: {accepted}, which needs none"
        )
    return (
        f"method {method!r} is unknown{did_you_mean(str(method), SPECULATIVE_METHODS)}; {accepted}"
    )


def _lookup(given: Mapping[str, Any]) -> tuple[int, int]:
    """prompt_lookup_min and prompt_lookup_max; where one is missing, it does not exclude the
    other."""
    values = {}
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        if given.get(name) is not None:
            values[name] = _number(name, given[name], _MOST_LOOKUP)
    least, most = _DEFAULT_LOOKUP
    least = values.get("prompt_lookup_min", min(least, values.get("prompt_lookup_max", least)))
    most = values.get("prompt_lookup_max", max(most, least))
    if least > most:
        raise _error(
            f"prompt_lookup_min {least} is more than prompt_lookup_max {most}; swap them, or leave "
            f"one out"
        )
    return least, most


def _number(name: str, value: Any, most: int, also: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _error(f"{name} {value!r} is out of range: it takes 1 to {most}{also}")
    return value


def _error(text: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {text}")
