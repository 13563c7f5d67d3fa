"""Checkpoints that tests share, each written once a session; the same examples in every run."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before torch is imported, and for the processes that tests start: workers that share the cores
# would wait for one another's threads, which doubles the time of a test.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    own_cores = max(1, len(os.sched_getaffinity(0)) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(own_cores))

with contextlib.suppress(ImportError):  # a machine with a GPU may have pytest only
    import hypothesis

    # A gate that draws new examples each time fails changes that have nothing to do with it. To
    # look for more: HYPOTHESIS_PROFILE=explore.
    hypothesis.settings.register_profile("gate", derandomize=True, deadline=None)
    hypothesis.settings.register_profile("explore", deadline=None)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


# Rooms of short tests end a run: behind a long one at its end other processes would wait.
LAST = {"architectures", "config", "formats", "lint", "select", "tool_parsers", "utils"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name in LAST)
    if "build" in config.getoption("markexpr"):
        return
    for item in items:
        if item.get_closest_marker("build"):
            item.add_marker(pytest.mark.skip("compiles every GPU kernel: make test-build"))


@pytest.fixture
def ends_soon() -> Iterator[None]:
    """A test that would wait for ever, in a call of the system too, fails after a minute."""

    def fail(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(name, **changes) -> folder of a float32 checkpoint; made once."""
    from tiny_models import build_model, save  # tests of kernels do without transformers

    made: dict[tuple, Path] = {}

    def make(name: str, **changes) -> Path:
        key = (name, *sorted(changes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            save(build_model(name, **changes), made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer and a chat template: text in, (random) text out."""
    from tiny_models import build_model, make_tokenizer

    folder = tmp_path_factory.mktemp("text")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    model = build_model("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    model.save_pretrained(folder)
    return folder
