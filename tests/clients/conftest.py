"""One server of the demo model for all clients, and the folder their packages are installed in."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from entrypoints.serving import RunningServer, started_server

from vllm.entrypoints.demo import demo_model_path

# Behind the packages of the environment: those are what the project is tested with.
SITE = os.environ.get("CLIENTS_SITE", str(Path(sys.prefix, "clients")))
if SITE not in sys.path:
    sys.path.append(SITE)
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it asks the network for prices


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The demo model under the name `tiny`, with a template that tells it of tools."""
    template = Path(__file__).with_name("template.jinja")
    log = tmp_path_factory.mktemp("clients") / "log"
    flags = ["--max-model-len", "4096", "--max-num-seqs", "16", "--tool-call-parser", "hermes",
             "--enable-auto-tool-choice", "--chat-template", str(template)]  # fmt: skip
    with started_server(demo_model_path(), log, *flags) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: RunningServer) -> str:
    return f"{server.url}/v1"
