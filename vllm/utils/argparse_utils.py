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
        return super().parse_known_args([_dashed(word) for word in words], namespace)


def _dashed(word: str) -> str:
    """`--max_model_len=8` as `--max-model-len=8`; values stay as they are."""
    flag, equals, value = word.partition("=")
    is_flag = flag.startswith("--") and " " not in flag
    return flag.replace("_", "-") + equals + value if is_flag else word
