"""Tokenizers, libraries and memory that fail under the server."""

from pathlib import Path

import pytest

from .harness import Fault, answers, tokens

pytestmark = pytest.mark.chaos

# Put into the server's process when the module is imported first.
_PATCH = """
import importlib.util, os, sys
class Find:
    def find_spec(name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(Find)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            {patch}
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Find)
"""

_RAISING = """
            make = module.load_tokenizer
            def load_tokenizer(config):
                tokenizer = make(config)
                kind = type(tokenizer)
                def raising(name):
                    whole = getattr(kind, name)
                    def call(self, *given, **options):
                        if any("poison" in str(one) for one in given):
                            raise RuntimeError("the tokenizer broke")
                        return whole(self, *given, **options)
                    return call
                names = ("__call__", "encode", "_encode_plus", "_batch_encode_plus",
                         "apply_chat_template")
                changed = {name: raising(name) for name in names if hasattr(kind, name)}
                tokenizer.__class__ = type(kind.__name__, (kind,), changed)
                return tokenizer
            module.load_tokenizer = load_tokenizer
"""


def test_tokenizer_raises(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """The tokenizer raises for some texts."""
    code = _PATCH.format(module="vllm.engine.tokenizer", patch=_RAISING.strip())
    (tmp_path / "sitecustomize.py").write_text(code)
    with fault.server(tiny_model, tmp_path / "log", PYTHONPATH=str(tmp_path)) as server:
        expected = tokens(server)
        fault.begins()
        for _ in range(50):
            answer = server.post("/v1/completions", {"prompt": "poison"})
            assert answer.status == 500 and answer.json["error"]["type"] == "server_error"
            chat = {"messages": [{"role": "user", "content": "poison"}]}
            assert server.post("/v1/chat/completions", chat).status in (400, 500)
        fault.noticed()
        assert tokens(server) == expected
        fault.recovered()


_LIMIT = """
            import resource
            whole = module.ModelRunner.__init__
            def limited(self, *given, **options):
                whole(self, *given, **options)
                size = int(open("/proc/self/statm").read().split()[0]) * 4096
                resource.setrlimit(resource.RLIMIT_AS, (size + (700 << 20),) * 2)
                import torch
                forward = self.model.forward
                def hungry(inputs, *words, **names):
                    kept = torch.zeros(len(inputs.input_ids) << 20, dtype=torch.uint8)
                    return forward(inputs, *words, **names)
                self.model.forward = hungry
            module.ModelRunner.__init__ = limited
"""


def test_engine_out_of_memory(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """Steps of the engine need more memory than a limit (RLIMIT_AS) leaves."""
    code = _PATCH.format(module="vllm.worker.model_runner", patch=_LIMIT.strip())
    (tmp_path / "sitecustomize.py").write_text(code)
    with fault.server(tiny_model, tmp_path / "log", PYTHONPATH=str(tmp_path)) as server:
        expected = tokens(server)
        fault.begins()
        answer = server.post("/v1/completions", {"prompt": [5] * 1500, "max_tokens": 2})
        assert answer.status == 503 and answer.json["error"]["code"] == "out_of_memory"
        fault.noticed()
        assert tokens(server) == expected
        fault.recovered()


LIBRARY = {
    "absent": "raise ModuleNotFoundError(\"No module named 'xgrammar'\", name='xgrammar')",
    "raising": "raise RuntimeError('the library is broken')",
    "hanging": "import time; time.sleep(10**6)",
    "segfaulting": "import ctypes; ctypes.string_at(0)",
}


@pytest.mark.parametrize("how", LIBRARY)
def test_library_broken(fault: Fault, tiny_model: Path, tmp_path: Path, how: str) -> None:
    """The library of grammars is broken: its requests are refused, and others answered"""
    (tmp_path / "xgrammar").mkdir()
    (tmp_path / "xgrammar" / "__init__.py").write_text(LIBRARY[how])
    with fault.server(tiny_model, tmp_path / "log", PYTHONPATH=str(tmp_path)) as server:
        expected = tokens(server)
        fault.begins()
        request = {"prompt": "a", "max_tokens": 2, "guided_regex": "a+"}
        assert 400 <= server.post("/v1/completions", request).status < 600
        fault.noticed()
        assert tokens(server) == expected
        assert answers(server)
        fault.recovered()
