"""One tiny model and one server for all tests here that do not need a server of their own."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from .serving import RunningServer, started_server
from .tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with started_server(tiny_model, log, "--max-num-seqs", "64") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def keyed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that asks for a key, for its metrics too."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys"
    keys.write_text("# of the team\nfrom-file\n\n  another-from-file  \n")
    flags = ("--api-key", "one", "two", "--api-key", "three", "--api-key-file", str(keys))
    with started_server(
        tiny_model, folder / "log", *flags, "--protect-metrics", "--allowed-origins", '["*"]',
        VLLM_API_KEY="variable-key", HF_TOKEN="hub-token", VLLM_SERVER_DEV_MODE="1",
    ) as running:  # fmt: skip
        yield running
