"""Which sets of parameters `make test` runs of a test that takes long with all of them."""

from collections.abc import Iterable

import pytest


def quick(values: Iterable, names: Iterable) -> list:
    """Parameters of a test: those whose text is among `names` run in `make test`, the others, which
    are slow, in `make test-all` only."""
    values, names = [*values], [*map(str, names)]
    unknown = {*names} - {*map(str, values)}
    assert not unknown, f"no parameters of this test: {unknown}"
    return [
        value if str(value) in names else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]
