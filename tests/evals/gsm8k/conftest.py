"""Options of the accuracy test; they exist when pytest is started on this folder."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--config-list-file", type=Path, help="File that names configs of tests/evals/gsm8k/configs"
    )
    parser.addoption("--gsm8k-data-dir", type=Path, help="Folder of test.jsonl and train.jsonl")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "config_file" not in metafunc.fixturenames:
        return
    from evals.gsm8k.eval_config import read_list

    path = metafunc.config.getoption("--config-list-file", default=None)
    files = read_list(path) if path else []
    skip = pytest.mark.skip(reason="no --config-list-file=FILE: which models to serve")
    params = [pytest.param(file, id=file.stem) for file in files]
    metafunc.parametrize("config_file", params or [pytest.param(None, marks=skip, id="none")])
