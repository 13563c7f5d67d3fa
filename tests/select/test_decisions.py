"""The committed table of decisions is what selection decides today."""

import difflib
import subprocess
import sys
import time

import decisions
from slowness import slowness

HOW = f"read every changed row, then: {decisions.COMMAND}"


def test_the_committed_table_is_what_selection_decides():
    committed, now = decisions.FILE.read_text(), decisions.table()
    changed = difflib.unified_diff(committed.splitlines(), now.splitlines(), n=0, lineterm="")
    assert committed == now, "\n".join([HOW, *list(changed)[2:60]])


def test_the_table_is_quick_to_make_and_short_enough_to_read():
    start = time.perf_counter()
    lines = decisions.table().splitlines()
    assert time.perf_counter() - start < 5 * slowness()
    assert len(lines) <= 4000


def test_the_command_checks_it_without_torch():
    code = "import sys; sys.path.insert(0, 'tests/select'); import decisions; decisions.table();"
    code += "assert not {'torch', 'numpy'} & set(sys.modules)"
    root = decisions.FILE.parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
    check = subprocess.run([sys.executable, decisions.__file__, "--check"], cwd=root)
    assert check.returncode == 0, HOW
