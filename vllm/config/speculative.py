"""Speculative decoding: how tokens are drafted that a later step verifies."""

from collections.abc import Mapping
from typing import Any

from vllm.config.model import ModelConfig
from vllm.errors import ConfigError, did_you_mean
from vllm.utils.dataclasses import dataclass

SPECULATIVE_METHODS = "ngram", "draft_model", "mtp", "eagle3"
NGRAM, DRAFT_MODEL, MTP, EAGLE3 = SPECULATIVE_METHODS
# Names of mtp that upstream has for single families.
_MTP_NAMES = ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
REJECTION_METHODS = STRICT, SYNTHETIC = "strict", "synthetic"
# Names of upstream's for methods that give the distribution of the model, as strict does.
_EXACT_METHODS = ("standard", "probabilistic")
# Draft tokens of a request and step, at most; and by method, where the user sets no number: those
# of a model cost a pass of it each.
MOST_DRAFT_TOKENS = 32
AUTO_DRAFT_TOKENS = {NGRAM: 16, DRAFT_MODEL: 4, MTP: 4, EAGLE3: 4}
# Draft tokens of all requests of a step: their logits take memory.
STEP_DRAFT_TOKENS = 128
# Of the names of a draft model's layers in reports.
DRAFT_PREFIX = "draft."
_MOST_LOOKUP = 64
_DEFAULT_LOOKUP = 2, 5

_COMMON_KEYS = ("method", "num_speculative_tokens", "disable_by_batch_size",
                "rejection_sample_method", "synthetic_acceptance_rate")  # fmt: skip
_OWN_KEYS = {
    NGRAM: ("prompt_lookup_min", "prompt_lookup_max"),
    DRAFT_MODEL: ("model",),
    MTP: (),
    EAGLE3: ("model",),
}
_MODELS = {
    DRAFT_MODEL: "a smaller model with the same vocabulary",
    EAGLE3: "an EAGLE-3 head that was made for this model",
}
# Methods of upstream's that are not served.
_OTHER_METHODS = ("eagle", "medusa", "mlp_speculator", "suffix")


@dataclass(frozen=True)
class SpeculativeConfig:
    """method: one of SPECULATIVE_METHODS. num_speculative_tokens: draft tokens of a request and
    step, at most. prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that ngram looks up.
    disable_by_batch_size: with more requests than this, none drafts; None for no limit. model:
    folder or hub name of what drafts with draft_model or eagle3; draft_model_config: what its files
    say. acceptance_rate: the mean share of draft tokens that are accepted by lot, for measurements,
    0 to 1; None where the model decides which are.
    """

    method: str = NGRAM
    num_speculative_tokens: int = AUTO_DRAFT_TOKENS[NGRAM]
    prompt_lookup_min: int = _DEFAULT_LOOKUP[0]
    prompt_lookup_max: int = _DEFAULT_LOOKUP[1]
    disable_by_batch_size: int | None = None
    model: str = ""
    draft_model_config: ModelConfig | None = None
    acceptance_rate: float | None = None

    @property
    def has_model(self) -> bool:
        """Whether a model, or a layer of one, drafts."""
        return self.method != NGRAM

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "SpeculativeConfig":
        """From the JSON object of `--speculative-config`; ConfigError for what it cannot be. What
        it says of a model is not looked up yet."""
        method = _method(given)
        num_tokens = given.get("num_speculative_tokens", "auto")
        least, most = _lookup(given)
        limit = given.get("disable_by_batch_size")
        return cls(
            method=method,
            num_speculative_tokens=(
                AUTO_DRAFT_TOKENS[method]
                if num_tokens == "auto"
                else _number("num_speculative_tokens", num_tokens, MOST_DRAFT_TOKENS, " or auto")
            ),
            prompt_lookup_min=least,
            prompt_lookup_max=most,
            disable_by_batch_size=(
                None if limit is None else _number("disable_by_batch_size", limit, 1 << 20)
            ),
            model=_model(given, method) if method in _MODELS else "",
            acceptance_rate=_acceptance_rate(given),
        )


def _method(given: Mapping[str, Any]) -> str:
    """ConfigError also where it does not take all keys."""
    method = given.get("method")
    method = MTP if method in _MTP_NAMES else method
    known = [*_COMMON_KEYS, *(key for keys in _OWN_KEYS.values() for key in keys)]
    names = [*_COMMON_KEYS, *_OWN_KEYS[method]] if method in SPECULATIVE_METHODS else known
    wrong = next((name for name in given if name not in names), None)
    if method not in SPECULATIVE_METHODS and (method is not None or wrong is None):
        raise draft_error(_wrong_method(method))
    if wrong in known:
        owners = " or ".join(name for name, keys in _OWN_KEYS.items() if wrong in keys)
        raise draft_error(
            f"key {wrong!r} belongs to method {owners}, and the method is {method}, which takes "
            f"{', '.join(names)}: leave it out"
        )
    if wrong is not None:
        raise draft_error(
            f"unknown key {wrong!r}{did_you_mean(wrong, names)}; it takes {', '.join(names)}"
        )
    return str(method)


def _wrong_method(method: object) -> str:
    accepted = f'it takes {", ".join(SPECULATIVE_METHODS)}, as in {{"method": "ngram"}}'
    if method is None:
        return f"no method is given: {accepted}"
    if method in _OTHER_METHODS or str(method).endswith("_mtp"):
        return f"method {method!r} is not supported here: {accepted}, which needs no weights"
    return (
        f"method {method!r} is unknown{did_you_mean(str(method), SPECULATIVE_METHODS)}; {accepted}"
    )


def _model(given: Mapping[str, Any], method: str) -> str:
    model = given.get("model")
    if not isinstance(model, str) or not model.strip():
        raise draft_error(
            f"model {model!r}: method {method} takes the folder or hub name of {_MODELS[method]}"
        )
    return model


def _acceptance_rate(given: Mapping[str, Any]) -> float | None:
    """None for strict verification."""
    method = given.get("rejection_sample_method", STRICT)
    rate = given.get("synthetic_acceptance_rate")
    if method not in (*REJECTION_METHODS, *_EXACT_METHODS):
        meant = did_you_mean(str(method), REJECTION_METHODS)
        raise draft_error(
            f"rejection_sample_method {method!r} is unknown{meant}; it takes "
            f"{', '.join(REJECTION_METHODS)}"
        )
    if method != SYNTHETIC:
        if rate is not None:
            raise draft_error(
                f"synthetic_acceptance_rate {rate!r} belongs to rejection_sample_method "
                f"{SYNTHETIC}, and the method is {method}: leave it out, or give that method"
            )
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise draft_error(
            f"synthetic_acceptance_rate {rate!r}: rejection_sample_method {SYNTHETIC} takes a "
            f"share of the draft tokens from 0 to 1, as 0.7"
        )
    return float(rate)


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
        raise draft_error(
            f"prompt_lookup_min {least} is more than prompt_lookup_max {most}; swap them, or leave "
            f"one out"
        )
    return least, most


def _number(name: str, value: Any, most: int, also: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise draft_error(f"{name} {value!r} is out of range: it takes 1 to {most}{also}")
    return value


def draft_error(text: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {text}")
