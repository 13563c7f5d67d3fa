"""The chaos suite: `make test-chaos`. Every case is one fault, a row of the table at its end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from entrypoints.serving import RunningServer, started_server
from entrypoints.tiny_model import write_tiny_llama

from .harness import PAGE, RESULTS, Fault, Prober, Row, seconds_of, table, write_page

_ROWS: list[Row] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", default="60s", help="how long the soak lasts, such as 2h")
    parser.addoption("--hostile", type=int, default=3000, help="number of hostile requests")
    parser.addoption("--write-page", action="store_true",
                     help="write docs/reliability.md and the figures")  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    row = item.stash.get(_ROW, None)
    if row is not None and not report.skipped:
        if report.when == "call":
            row.survived = report.passed
            _ROWS.append(row)
        elif report.failed:  # no server started, or /health took too long
            row.survived = False
            if row not in _ROWS:
                _ROWS.append(row)
    return report


_ROW = pytest.StashKey[Row]()


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[Fault]:
    """Named by the first line of the test's docstring."""
    text = (request.function.__doc__ or request.node.name).strip().splitlines()[0].rstrip(".")
    if callspec := getattr(request.node, "callspec", None):
        text = f"{text}: {callspec.id}"
    row = request.node.stash[_ROW] = Row(text)
    case = Fault(row)
    yield case
    case.finish()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def _shared(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, Prober]]:
    log = tmp_path_factory.mktemp("shared") / "log"
    with started_server(tiny_model, log, "--max-num-seqs", "32") as server:
        prober = Prober(server.port)
        yield server, prober
        prober.end()


@pytest.fixture
def server(_shared: tuple[RunningServer, Prober], fault: Fault) -> RunningServer:
    """For faults that a server outlives: one for all of them."""
    fault.probe(_shared[1])
    return _shared[0]


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    return seconds_of(request.config.getoption("--soak"))


@pytest.fixture
def num_hostile(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--hostile"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not _ROWS:
        return
    terminalreporter.section("faults")
    terminalreporter.write_line(table(_ROWS))
    if config.getoption("--write-page", False):
        write_page(_ROWS, PAGE, RESULTS)
