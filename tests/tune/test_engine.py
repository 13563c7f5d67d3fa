"""The engine finds a user's table and quarantine at its start, and follows them."""

import json

import pytest

from vllm import LLM, SamplingParams
from vllm.kernels import registry
from vllm.kernels.evidence.quarantine import Failure, add_failure
from vllm.kernels.evidence.tables import Entry, Table, user_folder, write_table
from vllm.kernels.evidence.versions import version_of
from vllm.platforms.probe import probe_chip, probe_device, probe_libs


@pytest.fixture
def choices(checkpoint, tmp_path, monkeypatch):
    """choices() -> the linear decisions of an engine that has generated a token."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))

    def start() -> list[dict]:
        llm = LLM(checkpoint("llama"), skip_tokenizer_init=True, dump_decisions=tmp_path / "d")
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        decisions = json.loads((tmp_path / "d").read_text())["decisions"]
        return [d for d in decisions if d["problem"]["family"] == "linear"]

    return start


def size_key(decision: dict) -> str:
    problem = decision["problem"]
    sizes = f"{problem['weight']}:{problem['n']}x{problem['k']}"
    return f"{sizes} {problem['dtype']} {','.join(problem['act'])}"


def test_a_table_of_this_machine_decides_and_what_is_stale_in_it_is_told(choices, caplog):
    before = choices()
    assert {d["chosen"] for d in before} == {"cpu"}
    slow, fast = (Entry("torch 0.1", "2026-11-22", ((1, us), (256, us))) for us in (9.0, 3.0))
    rows = {size_key(d): {"cpu": slow, "torch": fast} for d in before[:1]}
    table = Table(probe_chip(), "this CPU", rows)
    write_table(user_folder() / table.chip.file_name, table)
    caplog.clear()
    after = choices()
    assert after[0]["chosen"] == "torch" and after[0]["origin"]["rank"] == 6
    assert "this CPU" in after[0]["origin"]["text"]
    told = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert any("torch: measured in another version than the one here" in text for text in told)
    assert {d["chosen"] for d in after[1:] if size_key(d) not in rows} == {"cpu"}


def test_a_kernel_in_quarantine_is_passed_over_and_the_engine_serves(choices):
    first = choices()[0]
    (spec,) = (s for s in registry.specs("linear") if s.backend == "cpu")
    device = probe_device()
    version = version_of(spec, probe_libs(), device)
    add_failure(
        Failure(
            "cpu",
            version,
            str(device),
            size_key(first),
            "library",
            "killed by SIGSEGV",
            "2026-11-22",
        )
    )
    after = choices()[0]
    assert after["chosen"] == "torch"
    told = next(c for c in after["candidates"] if c["backend"] == "cpu")["reasons"]
    assert [r["why"] for r in told] == ["library"] and "SIGSEGV" in told[0]["text"]
