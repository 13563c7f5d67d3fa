"""Memory of the CPU: what limits it, taken before it is needed, and running out."""

import resource
import time
from pathlib import Path

import pytest
import torch

from vllm import LLM, SamplingParams
from vllm.core.request import FinishReason
from vllm.entrypoints.openai.errors import as_api_error
from vllm.errors import NoMemoryError
from vllm.platforms import cpu
from vllm.worker import touch
from vllm.worker.touch import touch_in_background

MIB = 1 << 20


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def put_group(folder, limit, used, stat, version=2):
    folder.mkdir(parents=True, exist_ok=True)
    names = {2: ("memory.max", "memory.current"),
             1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}[version]  # fmt: skip
    for name, value in zip((*names, "memory.stat"), (limit, used, stat)):
        (folder / name).write_text(f"{value}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_cgroups_count_and_pages_of_files_do_not(tmp_path, monkeypatch, version):
    monkeypatch.setattr(cpu, "_CGROUPS", tmp_path)
    root = tmp_path if version == 2 else tmp_path / "memory"
    before = cpu.available_memory()
    put_group(root, 300 * MIB, 100 * MIB, f"anon 1\ninactive_file {30 * MIB}", version)
    assert cpu.memory_limit() == 300 * MIB
    assert cpu.available_memory() == 230 * MIB
    put_group(root, "max" if version == 2 else 9223372036854771712, 100 * MIB, "", version)
    assert cpu.available_memory() > before // 2 > 300 * MIB


def test_the_limit_of_a_group_within_another_is_found(tmp_path, monkeypatch):
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = [line.split(":", 2)[2].strip("/") for line in lines if line.startswith("0:")]
    path = own[0] if own else ""
    monkeypatch.setattr(cpu, "_CGROUPS", tmp_path)
    put_group(tmp_path, "max", 0, "")
    put_group(tmp_path / path, 200 * MIB, 50 * MIB, "")
    assert cpu.available_memory() == 150 * MIB


def test_a_limit_of_the_address_space_counts(monkeypatch):
    used = cpu._left_of_address_space
    assert used() == []
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 500 * MIB, hard))
    try:
        assert 400 * MIB < cpu.available_memory() <= 500 * MIB
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def zeros(num_bytes: int) -> torch.Tensor:
    from vllm.ops.paged_attention import zeros_on_demand

    return zeros_on_demand((num_bytes,), torch.uint8, torch.device("cpu"))


def test_a_cache_is_taken_in_the_background_and_keeps_its_content():
    before = resident()
    cache = zeros(200 * MIB)
    cache[: 20 * MIB] = 7
    assert resident() - before < 100 * MIB
    touch_in_background([cache]).join(30)
    assert resident() - before > 190 * MIB
    assert cache[: 20 * MIB].eq(7).all() and not cache[20 * MIB :].any()


def test_a_cache_that_is_gone_is_neither_kept_nor_taken():
    cache = zeros(640 * MIB)
    reference = [cache]
    before = resident()
    thread = touch_in_background(reference)
    reference.clear()
    del cache
    thread.join(30)
    assert resident() - before < 70 * MIB  # a part that was being taken is taken to its end


def test_where_memory_is_short_the_rest_is_left_with_a_warning(monkeypatch, caplog):
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    left = [1000 * MIB, 1000 * MIB, 100 * MIB]
    monkeypatch.setattr(touch, "available_memory", lambda: left.pop(0))
    before = resident()
    cache = zeros(640 * MIB)
    touch_in_background([cache]).join(30)
    assert resident() - before < 200 * MIB and left == []
    assert "0.12 of 0.62 GiB" in caplog.text and "VLLM_CPU_KVCACHE_SPACE" in caplog.text


def test_an_engine_has_taken_its_cache_soon_after_its_start(checkpoint):
    before = resident()
    llm = LLM(checkpoint("llama"), skip_tokenizer_init=True, max_num_seqs=4,
              kv_cache_memory_bytes=300 * MIB)  # fmt: skip
    end = time.monotonic() + 20
    while resident() - before < 295 * MIB and time.monotonic() < end:
        time.sleep(0.05)
    assert resident() - before >= 295 * MIB
    del llm


# ---------------------------------------------------------------- out of memory in a step


class Short:
    """Memory that does not hold more than `most` tokens in a step of layers, nor `poison`."""

    def __init__(self, runner, most: int, poison: int = -1):
        self.forward, self.most, self.poison = runner.model.forward, most, poison
        self.steps: list[int] = []
        runner.model.forward = self

    def __call__(self, inputs, *given, **options):
        hidden = self.forward(inputs, *given, **options)
        count = len(inputs.input_ids)
        self.steps.append(count)
        if count > self.most or self.poison in inputs.input_ids.tolist():
            torch.empty(1 << 50)  # what torch itself says where there is none
        return hidden


def run(llm: LLM, prompts: dict[str, list[int]], **sampling):
    core, outputs = llm.llm_engine.core, {name: [] for name in prompts}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False,
                            **sampling)  # fmt: skip
    processor = llm.llm_engine.inputs
    for name, ids in prompts.items():
        for request in processor.process(name, {"prompt_token_ids": ids}, params).requests:
            core.add(request)
    while core.has_work:
        for output in core.step():
            outputs[output.request_id.partition("#")[0]].append(output)
    core.check_idle()
    return outputs


def tokens_of(outputs) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


PROMPTS = {"a": list(range(5, 20)), "b": list(range(30, 40)), "c": list(range(50, 75))}


@pytest.fixture
def llm(checkpoint):
    return LLM(checkpoint("llama"), skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4)


def test_requests_that_fit_alone_are_computed_alone_with_the_same_tokens(llm):
    expected = {name: tokens_of(out) for name, out in run(llm, PROMPTS).items()}
    llm.llm_engine.reset_prefix_cache()
    short = Short(llm.llm_engine.core.runner, most=30)
    found = run(llm, PROMPTS)
    assert {name: tokens_of(out) for name, out in found.items()} == expected
    assert short.steps[:4] == [50, 15, 10, 25]


def test_a_request_that_does_not_fit_ends_alone(llm):
    expected = tokens_of(run(llm, {"a": PROMPTS["a"]})["a"])
    llm.llm_engine.reset_prefix_cache()
    Short(llm.llm_engine.core.runner, most=40, poison=60)
    found = run(llm, PROMPTS)
    failure = found["c"][-1]
    assert failure.finish_reason == FinishReason.ERROR and failure.is_out_of_memory
    assert tokens_of(found["a"]) == expected and len(tokens_of(found["b"])) == 6
    assert tokens_of(found["c"]) == []
    assert len(tokens_of(run(llm, {"next": PROMPTS["b"]})["next"])) == 6


def test_a_step_that_lacks_memory_at_its_end_is_computed_from_where_it_began(llm):
    expected = {name: tokens_of(out) for name, out in run(llm, PROMPTS).items()}
    llm.llm_engine.reset_prefix_cache()
    runner = llm.llm_engine.core.runner
    sample = runner._sample

    def sample_one(logits, sampled, *given):
        if len(sampled.rows) > 1:
            raise MemoryError
        return sample(logits, sampled, *given)

    runner._sample = sample_one
    found = run(llm, PROMPTS)
    assert {name: tokens_of(out) for name, out in found.items()} == expected


def test_prompt_logprobs_that_may_be_taken_already_are_not_taken_twice(llm):
    Short(llm.llm_engine.core.runner, most=30)
    found = run(llm, PROMPTS, prompt_logprobs=1)
    assert all(outputs[-1].is_out_of_memory for outputs in found.values())


def test_recurrent_states_that_may_have_advanced_are_not_advanced_twice(checkpoint):
    llm = LLM(checkpoint("qwen3_5"), skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4)
    Short(llm.llm_engine.core.runner, most=40)
    found = run(llm, PROMPTS)
    assert all(outputs[-1].is_out_of_memory for outputs in found.values())
    assert len(tokens_of(run(llm, {"next": PROMPTS["b"]})["next"])) == 6


def test_real_memory_that_runs_out_in_a_step_ends_no_engine(checkpoint):
    """With a real limit: the address space has no room for the step's largest tensor."""
    llm = LLM(checkpoint("llama"), skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4)
    run(llm, PROMPTS)
    llm.llm_engine.reset_prefix_cache()
    runner, limits = llm.llm_engine.core.runner, resource.getrlimit(resource.RLIMIT_AS)
    forward = runner.model.forward

    def needs_much(inputs, *given, **options):
        kept = torch.zeros(len(inputs.input_ids) * 40 * MIB, dtype=torch.uint8)
        hidden = forward(inputs, *given, **options)
        del kept
        return hidden

    runner.model.forward = needs_much
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 900 * MIB, limits[1]))
    try:
        found = run(llm, PROMPTS)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert found["c"][-1].is_out_of_memory  # 25 tokens need 1,000 MiB
    assert len(tokens_of(found["a"])) == len(tokens_of(found["b"])) == 6


def test_who_sent_it_may_send_it_again():
    answer = as_api_error(NoMemoryError("out of memory: now"))
    assert (answer.status, answer.code) == (503, "out_of_memory")
    assert answer.headers["Retry-After"] == "1"


def test_llm_raises_for_the_request_alone(llm):
    Short(llm.llm_engine.core.runner, most=40, poison=60)
    with pytest.raises(NoMemoryError, match="out of memory"):
        llm.generate([{"prompt_token_ids": PROMPTS["c"]}],
                     SamplingParams(max_tokens=2, detokenize=False))  # fmt: skip
