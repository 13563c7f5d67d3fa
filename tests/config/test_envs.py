"""Variables are read in one place, validated, and unknown ones are pointed out."""

import pytest

from vllm import envs
from vllm.errors import ConfigError


def test_an_unset_variable_has_its_default(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_ISA", raising=False)
    assert envs.VLLM_CPU_ISA is None and not envs.is_set("VLLM_CPU_ISA")


def test_a_variable_is_read_when_it_is_used(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    assert envs.VLLM_CPU_KVCACHE_SPACE == 1.5
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert envs.VLLM_CPU_KVCACHE_SPACE == 2.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "lots"),
        ("VLLM_CPU_KVCACHE_SPACE", "-1"),
        ("VLLM_CPU_KVCACHE_SPACE", "nan"),
        ("VLLM_CPU_ISA", "sse"),
        ("VLLM_LOGGING_LEVEL", "loud"),
        ("VLLM_CACHE_ROOT", ""),
    ],
)
def test_an_invalid_value_is_an_error_that_names_it(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=name):
        envs.read(name)
    with pytest.raises(ConfigError):
        envs.check_all()


def test_an_unknown_name_is_a_warning_with_a_suggestion(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPAC", "1")
    warnings = envs.check_all()
    assert warnings == [
        "unknown environment variable VLLM_CPU_KVCACHE_SPAC; did you mean VLLM_CPU_KVCACHE_SPACE?"
    ]


def test_names_that_kubernetes_injects_are_nobodys_mistake(monkeypatch):
    for name in ("VLLM_SERVICE_HOST", "VLLM_SERVICE_PORT", "VLLM_PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.1:8000")
    assert envs.check_all() == []


def test_a_name_that_somebody_knows_is_told_in_their_words(monkeypatch):
    monkeypatch.setenv("VLLM_PORT", "9000")
    assert envs.check_all({"VLLM_PORT": "no effect"}.get) == ["no effect"]


def test_a_name_that_does_not_exist_is_no_attribute():
    with pytest.raises(AttributeError):
        _ = envs.VLLM_NO_SUCH_NAME
