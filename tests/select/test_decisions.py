"""The committed table of decisions is what selection decides today."""

import difflib
import subprocess
import sys
import time

import decisions
import pytest
from decision_sections import SECTIONS
from slowness import slowness

from vllm.kernels import registry
from vllm.utils.entry_points import extensions

HOW = f"read every changed row, then: {decisions.COMMAND}"


def test_the_committed_table_is_what_selection_decides():
    committed, now = decisions.FILE.read_text(), decisions.table()
    changed = difflib.unified_diff(committed.splitlines(), now.splitlines(), n=0, lineterm="")
    assert committed == now, "\n".join([HOW, *list(changed)[2:60]])


def test_the_table_is_quick_to_make_and_short_enough_to_read():
    start = time.perf_counter()
    lines = decisions.table().splitlines()
    assert time.perf_counter() - start < 5 * slowness()
    assert len(lines) <= 12000  # one row per question, and what each backend is rejected for


def test_the_command_checks_it_without_torch():
    code = "import sys; sys.path.insert(0, 'tests/select'); import decisions; decisions.table();"
    code += "assert not {'torch', 'numpy'} & set(sys.modules)"
    root = decisions.FILE.parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
    check = subprocess.run([sys.executable, decisions.__file__, "--check"], cwd=root)
    assert check.returncode == 0, HOW


_ADDED = """
from dataclasses import replace
from vllm.kernels.backends import torch

SPECS = tuple(replace(spec, backend="added") for spec in torch.SPECS if spec.family == "linear")
BEFORE = {"linear": "cpu"}
"""


@pytest.fixture
def added_backend(tmp_path, monkeypatch):
    """A backend of another package, which takes what torch's takes and is preferred to `cpu`."""
    (tmp_path / "added_kernels.py").write_text(_ADDED)
    info = tmp_path / "added_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: added-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\nadded = added_kernels\n")
    caches = (extensions, registry.backend_names, registry.specs, registry.built)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        for cache in caches:
            cache.cache_clear()
        yield "added"
    for cache in caches:
        cache.cache_clear()


def test_a_backend_changes_only_the_rows_in_which_it_could_run(request):
    def rows() -> dict[tuple, str]:
        answers = ((s.title, decisions.answers(s, decisions.Book())[0]) for s in SECTIONS)
        return {(title, key): row for title, found in answers for key, row in found}

    before = rows()
    name = request.getfixturevalue("added_backend")
    after = rows()
    changed = [key for key in before if before[key] != after[key]]
    assert before.keys() == after.keys()
    others = [key for key in changed if name not in after[key].split()]
    # Where only a flag keeps it from running, the choice of the next is due to that flag.
    assert {title for title, _ in others} <= {"Linear: --require-native"}
    kernels = [[rows[key].partition(" by ")[0] for key in others] for rows in (before, after)]
    assert kernels[0] == kernels[1]
    assert 0 < len(changed) < len(before) / 2
