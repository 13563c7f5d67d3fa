"""The engine finds a user's table and quarantine at its start, and follows them."""

import json

import pytest

from vllm import LLM, SamplingParams
from vllm.kernels.tune_quarantine import Failure, add_failure
from vllm.kernels.tune_table import Entry, Table, file_name, user_folder, write_table
from vllm.platforms.probe import probe_device, probe_libs, probe_num_sms


@pytest.fixture
def choices(checkpoint, tmp_path, monkeypatch):
    """choices() -> the linear decisions of an engine that has generated a token."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    probe_libs.cache_clear()

    def start() -> list[dict]:
        probe_libs.cache_clear()
        llm = LLM(checkpoint("llama"), skip_tokenizer_init=True, dump_decisions=tmp_path / "d")
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        decisions = json.loads((tmp_path / "d").read_text())["decisions"]
        return [d for d in decisions if d["problem"]["family"] == "linear"]

    yield start
    probe_libs.cache_clear()


def size_key(decision: dict) -> str:
    problem = decision["problem"]
    return f"{problem['weight']}:{problem['n']}x{problem['k']} {problem['dtype']}"


def test_a_table_of_this_machine_decides(choices):
    before = choices()
    assert {d["chosen"] for d in before} == {"cpu"}
    slow, fast = (Entry("", "2026-11-22", ((1, us), (256, us))) for us in (9.0, 3.0))
    rows = {size_key(d): {"cpu": slow, "torch": fast} for d in before[:1]}
    table = Table(probe_device(), probe_num_sms(), "this CPU", rows)
    write_table(user_folder() / file_name(table.device, table.num_sms), table)
    after = choices()
    assert after[0]["chosen"] == "torch" and after[0]["origin"]["rank"] == 6
    assert "this CPU" in after[0]["origin"]["text"]
    assert {d["chosen"] for d in after[1:] if size_key(d) not in rows} == {"cpu"}


def test_a_kernel_in_quarantine_is_passed_over_and_the_engine_serves(choices):
    first = choices()[0]
    native = probe_libs().get("native")
    add_failure(
        Failure("cpu", f"native {native.version}", str(probe_device()), size_key(first),
                "library", "killed by SIGSEGV, after M = 33", "2026-11-22")
    )  # fmt: skip
    after = choices()[0]
    assert after["chosen"] == "torch"
    told = next(c for c in after["candidates"] if c["backend"] == "cpu")["reasons"]
    assert [r["why"] for r in told] == ["library"] and "SIGSEGV" in told[0]["text"]
