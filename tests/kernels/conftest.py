from collections.abc import Iterator

import pytest
import torch

from vllm.platforms import native

ISAS = ("avx512", "avx2", "portable")
LINEAR_ISAS = ("avx512_bf16", *ISAS)
"""Those with linear layers of their own; avx512_bf16 shares all else with avx512."""


def use_isa(name: str) -> None:
    """Runs the kernels of `name` from now on; skips the test where the chip lacks it."""
    try:
        native.load(name)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(params=LINEAR_ISAS)
def linear_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    default = native.load().cpu_isa()
    use_isa(request.param)
    yield request.param
    native.load(default)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    default = native.load().cpu_isa()
    use_isa(request.param)
    yield request.param
    native.load(default)


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Restores the number of threads that a test changes."""
    before = native.load().cpu_num_threads()
    yield
    native.load().cpu_set_num_threads(before)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
