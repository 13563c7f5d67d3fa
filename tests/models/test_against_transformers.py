"""Every architecture gives the logits and the greedy tokens that transformers gives."""

import random
from math import lcm

import pytest
import torch
from slow import quick
from tiny_models import ARCHITECTURES, VOCAB, one_thread
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from vllm import LLM, SamplingParams

NUM_GREEDY = 64
# A sampling step that compares equal logits may break ties differently; random weights have none.
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True)


def prompts(seed: int = 0, lengths=(1, 7, 33, 100)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def as_inputs(token_lists):
    return [{"prompt_token_ids": tokens} for tokens in token_lists]


def reference(folder, name):
    is_multimodal = name == "mistral3" or name.endswith("-multimodal")
    cls = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
    model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    # The whole model of transformers 5 needs images.
    return model.language_model if name == "llama4-multimodal" else model


@torch.inference_mode()
@one_thread()
def reference_greedy(model, tokens: list[int], count: int = NUM_GREEDY) -> list[int]:
    chosen: list[int] = []
    cache = None
    for _ in range(count):
        new = tokens if cache is None else chosen[-1:]
        output = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        chosen.append(int(output.logits[0, -1].argmax()))
    return chosen


def load(folder, **options) -> LLM:
    defaults = {"skip_tokenizer_init": True, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    return LLM(folder, **defaults | options)


def generate(llm, token_lists, params=GREEDY) -> list[list[int]]:
    outputs = llm.generate(as_inputs(token_lists), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def greedy_by_architecture():
    """Greedy tokens of the reference, computed once per architecture."""
    return {}


@pytest.fixture
def expected(checkpoint, greedy_by_architecture):
    def get(name):
        if name not in greedy_by_architecture:
            model = reference(checkpoint(name), name)
            greedy_by_architecture[name] = [reference_greedy(model, p) for p in prompts()]
        return greedy_by_architecture[name]

    return get


NUM_DECODED = 9
# One of each mechanism that chunks of a prompt have to themselves.
CHUNKED = ("llama", "qwen2-window", "qwen3_moe", "minimax_m2", "mixtral", "gpt_oss", "deepseek_v3",
           "qwen3_5", "qwen3_next", "llama4", "nemotron_h")  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_of_prefill_and_decode_match(checkpoint, name):
    check_logits(checkpoint(name), name)


@pytest.mark.parametrize("name", quick(ARCHITECTURES, CHUNKED))
def test_logits_match_with_chunked_prefill(checkpoint, name):
    check_logits(checkpoint(name), name, max_num_batched_tokens=13)


def check_logits(folder, name, **options) -> None:
    """At every position of prompts, and of tokens that follow them one a step."""
    model = reference(folder, name)
    llm = load(folder, max_num_seqs=1, **options)
    captured = []
    runner_model = llm.llm_engine.core.runner.model
    runner_model.lm_head.register_forward_hook(lambda _m, _i, out: captured.append(out.clone()))
    params = SamplingParams(temperature=0, max_tokens=NUM_DECODED, prompt_logprobs=0,
                            ignore_eos=True)  # fmt: skip
    for tokens in prompts(1, lengths=(2, 40, 130)):
        captured.clear()
        (answer,) = generate(llm, [tokens], params)
        with torch.inference_mode(), one_thread():
            wanted = model(torch.tensor([[*tokens, *answer[:-1]]])).logits[0]
        ours = torch.cat(captured)
        assert ours.shape == wanted.shape
        assert (ours - wanted).abs().max() < 1e-4
        assert wanted.std() > 0.3, "the logits must differ enough for the comparison to mean much"


# One of each mechanism that steps of one token have to themselves.
STEPS = ("llama", "qwen2-window", "qwen3_moe", "minimax_m2", "mixtral", "gemma2", "gemma3",
         "gpt_oss", "deepseek_v3", "qwen3_5", "qwen3_next", "nemotron_h", "llama4",
         "exaone4")  # fmt: skip


@pytest.mark.parametrize("name", quick(ARCHITECTURES, STEPS))
def test_greedy_tokens_match_in_one_batch(checkpoint, expected, name):
    assert generate(load(checkpoint(name)), prompts()) == expected(name)


@pytest.mark.parametrize("name", quick(ARCHITECTURES, CHUNKED))
def test_greedy_tokens_match_with_chunked_prefill(checkpoint, expected, name):
    llm = load(checkpoint(name), max_num_batched_tokens=13)
    assert generate(llm, prompts()) == expected(name)


RECURRENT = [
    name for name in ARCHITECTURES if name.startswith(("qwen3_5", "qwen3_next", "nemotron_h"))
]
PAGED = [name for name in ARCHITECTURES if name not in RECURRENT]


@pytest.mark.parametrize(
    "name", quick(PAGED, ["mistral-window", "deepseek_v3", "gpt_oss", "llama4"])
)
def test_greedy_tokens_match_with_prefix_cache_hits(checkpoint, expected, name):
    llm = load(checkpoint(name), enable_prefix_caching=True)
    first = llm.generate(as_inputs(prompts()), GREEDY, use_tqdm=False)
    again = llm.generate(as_inputs(prompts()), GREEDY, use_tqdm=False)
    assert [o.num_cached_tokens for o in first] == [0, 0, 0, 0]
    # Of a hit each cache group has whole blocks.
    size = 16 * lcm(*(group.parts for group in llm.llm_engine.vllm_config.cache_groups))
    assert [o.num_cached_tokens for o in again] == [0, 0, 32 // size * size, 96 // size * size]
    assert [o.outputs[0].token_ids for o in again] == expected(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_greedy_tokens_match_after_states_of_a_prefix(checkpoint, name):
    """States are kept of prefixes of 128 tokens and more."""
    (tokens,) = prompts(7, lengths=(200,))
    expected = reference_greedy(reference(checkpoint(name), name), tokens, 24)
    llm = load(checkpoint(name), enable_prefix_caching=True, num_state_snapshots=4)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for num_cached in (0, 192):
        (output,) = llm.generate(as_inputs([tokens]), params, use_tqdm=False)
        assert output.num_cached_tokens == num_cached
        assert output.outputs[0].token_ids == expected


PREEMPTED = ("llama", "qwen3_moe", "qwen3_5", "minimax_m2", "deepseek_v3", "gpt_oss", "qwen3_next",
             "llama4")  # fmt: skip


@pytest.mark.parametrize("name", quick(ARCHITECTURES, PREEMPTED))
def test_greedy_tokens_match_with_preemption(checkpoint, expected, name):
    llm = load(checkpoint(name), max_model_len=176, num_gpu_blocks_override=18)
    assert generate(llm, prompts()) == expected(name)
    scheduler = llm.llm_engine.core.scheduler
    # With windows all fit; test_window_caches.py preempts those.
    assert scheduler.num_preemptions > 0 or scheduler.blocks.has_windows


def test_greedy_tokens_match_in_any_batch_order(checkpoint, expected):
    llm = load(checkpoint("llama"), max_num_seqs=3, enable_prefix_caching=False)
    wanted = expected("llama")
    for seed in range(5):
        order = random.Random(seed).sample(range(4), 4)
        got = generate(llm, [prompts()[i] for i in order])
        assert got == [wanted[i] for i in order]


def test_greedy_tokens_match_through_the_reference_kernels(checkpoint, expected):
    llm = load(checkpoint("llama"), linear_backend="torch")
    assert {d.chosen for _, d in llm.llm_engine.core.selection.records} == {"torch", "cpu"}
    assert generate(llm, prompts()) == expected("llama")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_the_reference_closely(checkpoint, dtype):
    folder = checkpoint("llama")
    model = reference(folder, "llama")
    tokens = prompts(2, lengths=(60,))[0]
    llm = load(folder, dtype=dtype)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    entries = llm.generate(as_inputs([tokens]), params, use_tqdm=False)[0].prompt_logprobs
    with torch.inference_mode():
        wanted = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    ours = torch.tensor([[e[i].logprob for i in range(VOCAB)] for e in entries[1:]])
    tolerance = {"bfloat16": 0.15, "float16": 0.02}[dtype]
    assert (ours - wanted[:-1]).abs().max() < tolerance


@pytest.mark.parametrize(
    ("kv_cache_dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.015), ("fp8", 1.2)]
)
def test_a_narrower_kv_cache_stays_close(checkpoint, kv_cache_dtype, tolerance):
    tokens = prompts(3, lengths=(90,))[0]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)

    def logprobs(**options):
        llm = load(checkpoint("llama"), **options)
        entries = llm.generate(as_inputs([tokens]), params, use_tqdm=False)[0].prompt_logprobs
        return torch.tensor([[e[i].logprob for i in range(VOCAB)] for e in entries[1:]])

    error = (logprobs(kv_cache_dtype=kv_cache_dtype) - logprobs()).abs().max()
    assert 0 < error < tolerance
