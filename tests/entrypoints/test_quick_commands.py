"""How long the small things take that a user does all day: their own time on one core, the start of
the interpreter included, once modules are compiled.

The limits are below the 0.15, 0.2 and 0.3 s that are promised: another machine's slowness is known
roughly.
"""

import sys
from pathlib import Path

import pytest
from slowness import slowness

from .serving import COMMAND, environment, run_cli
from .test_explain_cost import seconds_of

IMPORTED = (
    "import sys\nfrom vllm import LLM\n"
    "assert not {'torch', 'numpy', 'transformers', 'tqdm'} & set(sys.modules)\nprint('imported')"
)
QUICK = {
    "vllm --help": ([*COMMAND, "--help"], "collect-env", 0.1),
    "vllm kernels list": ([*COMMAND, "kernels", "list"], "attention, in order of", 0.13),
    "from vllm import LLM": ([sys.executable, "-c", IMPORTED], "imported", 0.16),
}
NUM_RUNS = 5


@pytest.mark.parametrize("name", QUICK)
def test_what_a_user_does_all_day_is_quick(name: str, tmp_path: Path) -> None:
    command, shown, limit = QUICK[name]
    variables = environment(PYTHONPYCACHEPREFIX=str(tmp_path))
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    took = [seconds_of(command, variables, shown) for _ in range(NUM_RUNS)]
    assert min(took[1:]) <= limit * slowness()


def test_listing_kernels_loads_neither_configuration_nor_measurements() -> None:
    done = run_cli("kernels", "list", PYTHONPROFILEIMPORTTIME="1")
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "vllm.kernels.report.catalog" in modules
    assert not modules & {"vllm.config", "vllm.engine", "vllm.kernels.evidence.known"}
