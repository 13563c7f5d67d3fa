"""Many requests against a cache that is far too small: right texts, no leak, flat memory."""

import gc
import random
from pathlib import Path

import pytest
from slow import quick
from tiny_models import VOCAB

from vllm import LLM, SamplingParams
from vllm.core.request import EngineRequest

NUM_REQUESTS = 2000
NUM_RUNNING = 32
MAX_LEN = 96
# All running requests at their longest would need 192 blocks.
NUM_BLOCKS = 19


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("async_scheduling", quick([False, True], [True]))
def test_2000_requests_with_cancellations_in_a_cache_ten_times_too_small(
    checkpoint, async_scheduling
):
    folder = checkpoint("llama", num_hidden_layers=1)
    roomy = LLM(folder, skip_tokenizer_init=True, max_model_len=MAX_LEN, max_num_seqs=NUM_RUNNING)
    tight = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=NUM_BLOCKS,
    )
    # What a GPU does: the tokens of a step are known to the next one only in the runner's memory.
    core = tight.llm_engine.core
    core.executor.async_scheduling = core.runner.async_scheduling = async_scheduling
    rng = random.Random(0)
    distinct = [random_request(rng) for _ in range(100)]
    wanted = [
        output.outputs[0].token_ids
        for output in roomy.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in distinct],
            [params for _, params in distinct],
            use_tqdm=False,
        )
    ]
    engine, finished, cancelled = tight.llm_engine, {}, set()
    at_half = 0
    for number in range(NUM_REQUESTS):
        prompt, params = distinct[number % len(distinct)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while len(engine.outputs.states) > 3 * NUM_RUNNING or (
            number == NUM_REQUESTS - 1 and engine.has_unfinished
        ):
            for output in engine.step():
                finished[output.request_id] = output.outputs[0].token_ids
            if engine.outputs.states and rng.random() < 0.1:
                victim = rng.choice(list(engine.outputs.states))
                engine.abort(victim)
                cancelled.add(victim)
        if number == NUM_REQUESTS // 2:
            gc.collect()
            at_half = resident_bytes()
    assert len(finished) + len(cancelled) == NUM_REQUESTS
    assert len(cancelled) > 100
    assert all(tokens == wanted[int(name) % 100] for name, tokens in finished.items())
    assert core.scheduler.num_preemptions > 40
    core.check_idle()
    gc.collect()
    assert resident_bytes() - at_half < 8 << 20


def test_a_request_with_the_id_of_one_aborted_during_a_step_gets_its_own_tokens(checkpoint):
    llm = LLM(checkpoint("llama"), skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
              max_num_batched_tokens=16)  # fmt: skip
    core = llm.llm_engine.core
    core.executor.async_scheduling = core.runner.async_scheduling = True
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = {"alone": list(range(9, 49)), "other": [3, 4], "reused": list(range(9, 49))}
    tokens = {name: [] for name in prompts}

    def step():
        for output in core.step():
            tokens[output.request_id] += output.token_ids

    core.add(EngineRequest("alone", prompts["alone"], params, 0, [], 6))
    while core.has_work:
        step()
    core.add(EngineRequest("reused", [5, 6, 7], params, 0, [], 6))
    core.add(EngineRequest("other", prompts["other"], params, 0, [], 6))
    for _ in range(3):
        step()
    core.abort(["reused"])
    tokens["reused"].clear()
    core.add(EngineRequest("reused", prompts["reused"], params, 0, [], 6))
    while core.has_work:
        step()
    assert tokens["reused"] == tokens["alone"]
    assert len(tokens["other"]) == 6
    core.check_idle()


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    shared = [5] * rng.choice([0, 0, 17, 40])
    prompt = shared + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))]
    params = SamplingParams(
        temperature=rng.choice([0, 1.0]),
        seed=rng.randrange(1000),
        max_tokens=rng.randint(1, MAX_LEN - len(prompt)),
        ignore_eos=rng.random() < 0.8,
    )
    params.output_kind = 2
    return prompt, params
