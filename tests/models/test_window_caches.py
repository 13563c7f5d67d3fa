"""Models whose layers, some or all, have a window: with blocks of their windows alone they give
the bits that they give with blocks of all tokens, and take less memory."""

import random

import pytest
from slow import quick
from tiny_configs import VOCAB

from vllm import LLM, SamplingParams
from vllm.core.scheduler import Scheduler

NAMES = ["gpt_oss", "gemma3", "mimo_v2_flash", "mistral-window", "llama4"]
FURTHER = ["afmoe", "olmo3", "phi3-window", "qwen2_moe", "gemma2", "dots1", "mixtral-window"]
LENGTH = 192
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
OPTIONS = {
    "one chunk": {},
    "chunks": {"max_num_batched_tokens": 13},
    "no prefixes": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
    "drafts": {"speculative_config": NGRAM},
    # Whose bits depend on where a prompt is cut.
    "torch": {"attention_backend": "torch", "enable_prefix_caching": False},
}


def load(folder, **options) -> LLM:
    options = {"block_size": 16, "max_model_len": LENGTH, "max_num_seqs": 4} | options
    return LLM(folder, skip_tokenizer_init=True, **options)


def prompts() -> list[list[int]]:
    """Of one token to many windows; some begin alike, and parts of them repeat."""
    rng = random.Random(1)
    shared = [rng.randrange(VOCAB) for _ in range(100)]
    return [
        shared[:1], shared[:37], shared, shared[:90] + shared[40:70], shared[50:], shared[:81] * 2
    ]  # fmt: skip


def answers(llm: LLM) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Tokens and logprobs, of requests twice: the second time prefixes are cached."""
    params = [SamplingParams(temperature=0, max_tokens=LENGTH - len(p) - i, ignore_eos=True,
                             logprobs=2) for i, p in enumerate(prompts())]  # fmt: skip
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
    found = []
    for _ in range(2):
        for output in llm.generate(inputs, params, use_tqdm=False):
            one = output.outputs[0]
            logprobs = [{t: p.logprob for t, p in entry.items()} for entry in one.logprobs]
            found.append((one.token_ids, logprobs))
    llm.llm_engine.core.check_idle()
    return found


def scheduler_of(llm: LLM) -> Scheduler:
    return llm.llm_engine.core.scheduler


@pytest.fixture(scope="module")
def whole(checkpoint):
    """whole(name, options) -> answers with blocks of all tokens; computed once."""
    made = {}

    def compute(name: str, **options):
        key = name, str(options)
        if key not in made:
            options = {"disable_hybrid_kv_cache_manager": True} | options
            made[key] = answers(load(checkpoint(name), **options))
        return made[key]

    return compute


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", quick(NAMES + FURTHER, NAMES[:2]))
def test_tokens_and_logprobs_have_the_bits_of_a_cache_of_all_tokens(
    checkpoint, whole, name, options
):
    llm = load(checkpoint(name), **options)
    assert any(group.window for group in scheduler_of(llm).blocks.needs.groups)
    assert answers(llm) == whole(name, **options)
    sizes = scheduler_of(llm).blocks.sizes
    if options.get("enable_prefix_caching", True) and max(sizes) < 64:  # whole blocks are found
        assert scheduler_of(llm).prefix_cache.num_hit > 0


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(n, marks=pytest.mark.slow)
                                              for n in NAMES[1:])])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"speculative_config": NGRAM}], ids=str)
def test_after_preemptions_they_have_them_too(checkpoint, whole, name, options):
    folder, limits = checkpoint(name), {"max_num_batched_tokens": 24}
    probe = load(folder, **limits)
    blocks = scheduler_of(probe).blocks
    tight = blocks.needs.of(LENGTH) * cache_bytes(probe) // blocks.pool.num_blocks
    llm = load(folder, kv_cache_memory_bytes=tight, **limits, **options)
    assert answers(llm) == whole(name)
    assert scheduler_of(llm).num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "mimo_v2_flash"])
@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str
)
def test_on_several_ranks_they_have_them_too(checkpoint, whole, name, ranks):
    llm = load(checkpoint(name), **ranks, max_num_batched_tokens=24)
    try:
        assert answers(llm) == whole(name, **ranks)
    finally:
        llm.llm_engine.core.shutdown()


def cache_bytes(llm: LLM) -> int:
    """Of the memory that layers of the engine have, each part once."""
    kernels = [part.kernel for part in llm.llm_engine.core.runner.model.modules()
               if hasattr(part, "cache_spec") and hasattr(part, "kernel")]  # fmt: skip
    caches = [cache.untyped_storage() for one in kernels for cache in (one.k_cache, one.v_cache)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in caches}.values())


@pytest.mark.parametrize(
    "name", quick(["gpt_oss", "gemma3", "mimo_v2_flash", "mistral-window"], ["gpt_oss"])
)
def test_in_the_same_bytes_more_long_requests_run_at_once(checkpoint, name):
    given, mean, held = 2 << 20, {}, []
    for is_whole in (True, False):
        llm = load(
            checkpoint(name),
            kv_cache_memory_bytes=given,
            max_num_batched_tokens=64,
            max_num_seqs=24,
            max_model_len=512,
            disable_hybrid_kv_cache_manager=is_whole,
        )
        scheduler, counts = scheduler_of(llm), []

        def note(step, scheduler=scheduler, counts=counts, is_whole=is_whole):
            counts.append(len(scheduler.running))
            for r in scheduler.running:
                if not is_whole and step.num_scheduled_tokens.get(r.request_id) == 1:
                    held.append(len(r.block_ids[-1]) - r.num_passed[-1])

        llm.llm_engine.core.on_scheduled = note
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        rng = random.Random(0)
        inputs = [{"prompt_token_ids": [rng.randrange(VOCAB) for _ in range(300)]}
                  for _ in range(24)]  # fmt: skip
        llm.generate(inputs, params, use_tqdm=False)
        assert given - cache_bytes(llm) < 1 << 16 and cache_bytes(llm) <= given
        mean[is_whole] = sum(counts) / len(counts)
    assert mean[False] > 1.3 * mean[True]
    group = scheduler.blocks.needs.groups[-1]
    assert max(held) <= -(-group.window // scheduler.blocks.sizes[-1]) + 2
