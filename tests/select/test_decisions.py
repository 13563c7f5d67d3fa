"""The committed table of decisions is what selection decides today."""

import difflib
import subprocess
import sys
import time
from itertools import product, takewhile

import decisions
import pytest
from decision_sections import SECTIONS
from slowness import slowness

from vllm.kernels import registry
from vllm.utils.entry_points import extensions

HOW = f"read every changed row, then: {decisions.COMMAND}"


@pytest.fixture(scope="module")
def made():
    """The table of this code, and the seconds of the processor that it took."""
    start = time.process_time()
    table = decisions.table()
    return table, time.process_time() - start


def test_the_committed_table_is_what_selection_decides(made):
    committed, now = decisions.FILE.read_text(), made[0]
    changed = difflib.unified_diff(committed.splitlines(), now.splitlines(), n=0, lineterm="")
    assert committed == now, "\n".join([HOW, *list(changed)[2:60]])


def test_the_table_is_quick_to_make_and_short_enough_to_read(made):
    table, seconds = made
    assert seconds < 5 * slowness()
    assert len(table.splitlines()) <= 6000


def _questions(section, row: str) -> list[tuple[str, ...]]:
    """The questions that a row of the table answers."""
    cells = zip(row.split(" | "), section.columns.values(), strict=False)
    return list(product(*(list(all_) if cell == "*" else cell.split(",") for cell, all_ in cells)))


def _in_file(section, title: str) -> list[str]:
    """The rows below a title, or of a section below a title of rejections."""
    text = decisions.FILE.read_text().split(f"## {title}\n", 1)[1].split("\n\n## ", 1)[0]
    if title == section.title:
        return text.partition("chosen | could run\n")[2].splitlines()
    lines = text.split(f"{section.title}\n", 1)[1].splitlines()
    return [line.strip() for line in takewhile(lambda line: line.startswith("  "), lines)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_its_rows_say_what_is_decided_for_every_question_once(section):
    def said(title: str) -> list[tuple[tuple[str, ...], str]]:
        width = len(section.columns)
        return [
            (question, " | ".join(row.split(" | ")[width:]).strip())
            for row in _in_file(section, title)
            for question in _questions(section, row)
        ]

    rows, rejections = decisions.answers(section, decisions.Book())
    assert sorted(said(section.title)) == sorted((key, row.strip()) for key, row in rows)
    for backend, found in rejections.items():
        assert sorted(said(f"Rejected: {section.family} {backend}")) == sorted(found)


@pytest.mark.slow
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


@pytest.mark.slow
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
