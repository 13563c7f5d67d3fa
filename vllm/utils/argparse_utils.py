"""Command lines as scripts of this field write them."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes flags with underscores as those with dashes, and no abbreviated ones."""

    def __init__(self, **options: Any):
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([dashed(word) for word in words], namespace)


def dashed(word: str) -> str:
    """`--max_model_len=8` as `--max-model-len=8`; values stay as they are, so do keys of JSON
    (`--hf_overrides.rope_theta=1`) and a value that is itself a list of flags (`vllm eval paired
    --a "--seed 1 my_model"`)."""
    flag, equals, value = word.partition("=")
    if not flag.startswith("--") or " " in flag:
        return word
    name, dot, keys = flag.partition(".")
    return name.replace("_", "-") + dot + keys + equals + value
