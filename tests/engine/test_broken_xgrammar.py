"""A library of grammars whose import faults, hangs or raises: tried in a child process first."""

import sys

import pytest

from vllm.engine import grammar
from vllm.engine.structured_output import StructuredOutputs
from vllm.errors import GrammarError

BROKEN = {
    "import ctypes; ctypes.string_at(0)": "killed by SIGSEGV",
    "import time; time.sleep(1000)": "more than 2 s",
    "raise RuntimeError('broken build')": "broken build",
}


@pytest.fixture
def put(tmp_path, monkeypatch):
    def put(code: str) -> None:
        (tmp_path / "xgrammar").mkdir()
        (tmp_path / "xgrammar" / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "xgrammar", raising=False)
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
        grammar.broken_library.cache_clear()

    yield put
    grammar.broken_library.cache_clear()


@pytest.mark.parametrize(("code", "says"), BROKEN.items())
def test_an_import_that_fails_in_any_way_is_an_error_of_the_request(put, monkeypatch, code, says):
    monkeypatch.setattr(grammar, "_IMPORT_SECONDS", 2.0)
    put(code)
    with pytest.raises(GrammarError, match=says):
        StructuredOutputs(None)._make_compiler()
    assert "xgrammar" not in sys.modules


def test_an_import_that_passed_is_not_tried_again(put, monkeypatch):
    put("")
    assert grammar.broken_library() is None
    grammar.broken_library.cache_clear()
    monkeypatch.setattr(grammar, "run", None)
    assert grammar.broken_library() is None
