"""Speculative decoding changes when tokens come, not which: with it and without it, requests get
the same tokens, log-probabilities and endings."""

import itertools
import math

import pytest
from tiny_configs import VOCAB
from tiny_models import make_tokenizer

from tests.engine.test_captured_steps import capture, capture_prompts, load
from tests.engine.test_memory import Short
from vllm import LLM, SamplingParams
from vllm.core import speculation
from vllm.core.request import EngineRequest
from vllm.sampling_params import StructuredOutputsParams

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
FOX = "the quick brown fox jumps over the lazy dog "
# A few tokens at random repeat themselves soon.
FEW = [5, 6, 7]


class Counts:
    """What engines accepted and preempted."""

    def __init__(self, llm: LLM):
        self.stats = llm.llm_engine.core.stats()
        self.num_accepted = sum(self.stats.num_accepted_tokens.values())
        self.num_rejected = self.stats.num_draft_tokens - self.num_accepted


def run(folder, prompts, params, **options) -> tuple[list, Counts]:
    """What a client sees of each choice of each request."""
    llm = LLM(folder, **{"max_num_seqs": 8, "max_model_len": 256} | options)
    return ask(llm, prompts, params), Counts(llm)


def ask(llm: LLM, prompts, params) -> list:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.core.check_idle()
    return [
        (o.token_ids, o.text, o.logprobs, o.finish_reason, o.stop_reason, output.prompt_logprobs)
        for output in outputs
        for o in output.outputs
    ]


def check(folder, prompts, params, **options) -> Counts:
    """Compares both; some drafts must be accepted, and some not."""
    plain, _ = run(folder, prompts, params, **options)
    found, counts = run(folder, prompts, params, speculative_config=NGRAM, **options)
    assert found == plain
    assert counts.num_accepted > 0 and counts.num_rejected > 0
    return counts


def sampling(**options) -> SamplingParams:
    """Of few tokens at random, so that drafts are accepted and refused."""
    defaults = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    return SamplingParams(**defaults | {"allowed_token_ids": FEW} | options)


MIXED = {
    "greedy": {"temperature": 0, "allowed_token_ids": None, "logprobs": 2},
    "greedy among few": {"temperature": 0},
    "seeds": {"seed": 11, "logprobs": 3},
    "top k and p": {"top_k": 2, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "logprobs": 1},
    "repetition": {"repetition_penalty": 1.3},
    "biases": {"allowed_token_ids": None, "logit_bias": {5: 90.0, 6: 90.0, 7: 89.0}},
    "bad words": {"bad_words": ["quick quick"]},
    "choices": {"n": 3},
    "prompt logprobs": {"prompt_logprobs": 1},
    "named logprobs": {"logprobs": 0, "logprob_token_ids": [9, 6]},
    "stop ids": {"stop_token_ids": [6], "min_tokens": 11, "ignore_eos": True},
}


@pytest.mark.parametrize("name", MIXED)
def test_each_way_to_sample_gives_what_it_gives_without_drafts(text_checkpoint, name):
    check(text_checkpoint, [FOX * 3, FOX + FOX[:9]], sampling(**MIXED[name]))


def test_all_of_them_in_one_batch_with_prompts_in_chunks(text_checkpoint):
    params = [sampling(**options) for options in MIXED.values()]
    prompts = [f"{FOX * (1 + i % 3)}{i}" for i in range(len(params))]
    check(text_checkpoint, prompts, params, max_num_batched_tokens=20)


def test_a_stop_string_in_the_middle_of_an_accepted_run_ends_the_text(text_checkpoint):
    tokenizer = make_tokenizer()
    first, second = tokenizer("fox").input_ids[0], tokenizer("dog").input_ids[0]
    few = {"allowed_token_ids": [first, second], "temperature": 0.7}
    text = tokenizer.decode([first, first, second])
    params = [sampling(**few, stop=[text], seed=seed, max_tokens=60) for seed in range(6)]
    counts = check(text_checkpoint, [FOX * 2] * 6, params)
    assert counts.stats.num_drafts


def test_grammars_allow_and_end_as_without_drafts(text_checkpoint):
    pytest.importorskip("xgrammar")
    grammars = [
        {"regex": "(fox |dog ){3,9}!"},
        {"choice": ["fox fox fox fox fox fox", "fox fox fox dog"]},
        {"json": {"type": "array", "items": {"enum": ["fox", "dog"]}, "minItems": 3}},
        {"regex": "(ab){20}"},
    ]
    params = [
        SamplingParams(
            temperature=0.9, seed=seed, max_tokens=60,
            structured_outputs=StructuredOutputsParams(**grammar),
        )
        for grammar in grammars
        for seed in range(2)
    ]  # fmt: skip
    check(text_checkpoint, [FOX] * len(params), params)


def test_a_draft_is_cut_where_the_grammar_refuses_it_and_the_grammar_stays_where_it_was(
    text_checkpoint,
):
    pytest.importorskip("xgrammar")
    llm = LLM(text_checkpoint, max_num_seqs=2, max_model_len=64)
    core, tokenizer = llm.llm_engine.core, llm.get_tokenizer()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="abab(c|d)"))
    core.add(EngineRequest("x", [5], params, 0, [], 9))
    while core.grammars.has_pending:
        core._held += core._admit_compiled()
    one = {letter: tokenizer(letter).input_ids[0] for letter in "abcd"}
    before = core.grammars.bitmask("x")
    draft = [one[letter] for letter in "abac"]
    core.grammars.fit_draft("x", draft)
    assert draft == [one[letter] for letter in "aba"]
    masks = core.grammars.bitmask("x")
    assert len(masks) == 4 and (masks[:1] == before).all()

    def is_allowed(row: int, letter: str) -> bool:
        return bool(int(masks[row][one[letter] // 32]) >> one[letter] % 32 & 1)

    assert [is_allowed(row, "a") for row in range(4)] == [True, False, True, False]
    assert not core.grammars.accept("x", one["a"])
    assert len(core.grammars.bitmask("x")) == 1, "the masks of the draft are not those of now"
    end = llm.get_tokenizer().eos_token_id
    draft = [*(one[letter] for letter in "babc"), end, one["a"]]
    core.grammars.fit_draft("x", draft)
    assert draft == [one[letter] for letter in "babc"], "nothing follows the end"
    core.abort(["x"])


def test_preempted_requests_go_on_with_the_same_tokens(text_checkpoint):
    params = [sampling(seed=seed, max_tokens=90, logprobs=1) for seed in range(6)]
    prompts = [FOX * (i + 1) for i in range(6)]
    counts = check(text_checkpoint, prompts, params, num_gpu_blocks_override=18)
    assert counts.stats.num_preemptions > 0


def test_blocks_with_refused_tokens_are_found_by_no_later_request(text_checkpoint):
    options = {"max_num_seqs": 8, "max_model_len": 256}
    params = [sampling(seed=seed) for seed in range(5)]
    llm = LLM(text_checkpoint, speculative_config=NGRAM, **options)
    first = ask(llm, [FOX * 2] * 5, params)
    assert Counts(llm).num_rejected > 0
    known = make_tokenizer()(FOX * 2).input_ids
    assert len(known) > 16, "a block"
    longer = [{"prompt_token_ids": known + output[0]} for output in first]
    found = ask(llm, longer, params)
    # Whole blocks of the prompt and of the output, whose last token was never computed.
    whole = (len(known) + len(first[0][0]) - 1) // 16 * 16
    assert Counts(llm).stats.prefix_cache_hits == 5 * whole > 5 * len(known)
    plain = LLM(text_checkpoint, enable_prefix_caching=False, **options)
    assert found == ask(plain, longer, params)


def test_a_request_ends_where_the_context_does(text_checkpoint):
    params = sampling(max_tokens=None)
    plain, _ = run(text_checkpoint, [FOX * 2], params, max_model_len=64)
    found, counts = run(
        text_checkpoint, [FOX * 2], params, max_model_len=64, speculative_config=NGRAM
    )
    assert found == plain and found[0][3] == "length" and counts.num_accepted > 0
    assert len(make_tokenizer()(FOX * 2).input_ids) + len(found[0][0]) == 64


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "gpt_oss",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "llama4",
        "qwen3_moe",
        "mistral-window",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "nemotron_h",
        "nemotron_h-moe",
    ],
)
def test_families_give_what_they_give_without_drafts(checkpoint, name):
    prompts = [{"prompt_token_ids": [10, 11, 12, 13] * 9 + [10 + i]} for i in range(3)]
    hot = {"temperature": 9.0}  # gemma3 is sure of itself
    params = [sampling(temperature=0, logprobs=1), sampling(**hot), sampling(logprobs=2, seed=5)]
    check(checkpoint(name), prompts, params, max_model_len=128, skip_tokenizer_init=True)


@pytest.mark.parametrize("is_switching", [False, True])
def test_steps_that_overlap_and_are_captured_take_drafts(checkpoint, monkeypatch, is_switching):
    """As on a GPU; with drafts all the time, or on and off every few steps."""
    if is_switching:
        for name in ("_FIRST_STEPS", "_PLAIN_STEPS", "_HELD", "_MOST_HELD"):
            monkeypatch.setattr(speculation, name, 3)
    else:
        monkeypatch.setattr(speculation, "_FIRST_STEPS", 1000)
    prompts = [{"prompt_token_ids": [10 + i, *FEW, 11] * 3} for i in range(12)]
    # While there are requests with penalties, steps do not overlap anyway.
    params = [sampling(seed=i, max_tokens=15, frequency_penalty=0.1) for i in range(3)]
    params += [sampling(seed=i, max_tokens=20 + 4 * i, logprobs=i % 2) for i in range(9)]
    plain = load(checkpoint("llama"), async_scheduling=False)
    wanted = ask(plain, prompts, params)
    llm = load(
        checkpoint("llama"), async_scheduling=True, num_gpu_blocks_override=8,
        speculative_config=NGRAM,
    )  # fmt: skip
    graphs, prompt_graphs = capture(llm), capture_prompts(llm, 64)
    overlapping = []
    core = llm.llm_engine.core
    core.on_scheduled = lambda step: overlapping.append(core._running is not None)
    assert ask(llm, prompts, params) == wanted
    counts = Counts(llm)
    assert counts.num_accepted > 10 and counts.num_rejected > 10
    assert counts.stats.num_preemptions > 0
    replays = prompt_graphs.num_replays.items()
    num_verified = sum(n for shape, n in replays if shape.longest == 5 < shape.tokens)
    assert num_verified > 5 and any(overlapping) == is_switching
    assert bool(sum(graphs.num_replays.values())) == is_switching


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_accept_the_same_tokens(checkpoint, ranks):
    prompts = [{"prompt_token_ids": [10, 11, 12, 13] * 5 + [10 + i]} for i in range(3)]
    params = [sampling(temperature=0), sampling(), sampling(seed=5, presence_penalty=0.5)]
    options = {"max_model_len": 128, "skip_tokenizer_init": True, ranks: 2}
    check(checkpoint("llama"), prompts, params, **options)


def test_requests_of_a_step_that_lacks_memory_are_verified_alone(checkpoint):
    options = {"max_model_len": 128, "skip_tokenizer_init": True, "max_num_seqs": 4}
    prompts = [{"prompt_token_ids": [10, 11, 12] * 4 + [i]} for i in range(20, 23)]
    params = [sampling(seed=seed) for seed in range(3)]
    expected, _ = run(checkpoint("llama"), prompts, params, **options)
    llm = LLM(checkpoint("llama"), speculative_config=NGRAM, **options)
    short = Short(llm.llm_engine.core.runner, most=14)
    assert ask(llm, prompts, params) == expected
    assert Counts(llm).num_accepted > 0 and any(count > 14 for count in short.steps[4:])


def test_an_aborted_request_leaves_nothing_behind(checkpoint):
    llm = LLM(
        checkpoint("llama"), max_model_len=128, skip_tokenizer_init=True, speculative_config=NGRAM
    )
    core = llm.llm_engine.core
    for name in ("a", "b"):
        core.add(EngineRequest(name, [10, 11] * 8, sampling(), 1, [], 60))
    for _ in range(6):
        core.step()
    assert core.scheduler.requests["a"].spec_token_ids
    core.abort(["a"])
    while core.has_work:
        core.step()
    core.check_idle()
    assert not core.speculation._lengths


def test_sampled_tokens_have_the_probabilities_of_the_model(checkpoint):
    """Chi-square of the first three tokens of many requests, which are drafted from the second on,
    against the probabilities that the model gives to every continuation."""
    prompt = [10, *FEW, 11, *FEW, 12, 5, 7, 6, 10]
    llm = LLM(
        checkpoint("llama"), max_model_len=64, skip_tokenizer_init=True, max_num_seqs=64,
        speculative_config=NGRAM,
    )  # fmt: skip
    paths = [*itertools.product(FEW, repeat=3)]
    scored = llm.generate(
        [{"prompt_token_ids": prompt + list(path)} for path in paths],
        SamplingParams(max_tokens=1, prompt_logprobs=VOCAB),
        use_tqdm=False,
    )
    expected = {}
    for path, output in zip(paths, scored):
        share = 1.0
        for place, token in enumerate(path):
            entry = output.prompt_logprobs[len(prompt) + place]
            weights = {t: math.exp(entry[t].logprob) for t in FEW}
            share *= weights[token] / sum(weights.values())
        expected[path] = share
    llm.llm_engine.core.stats()
    count = 3000
    outputs = llm.generate(
        [{"prompt_token_ids": prompt}] * count,
        [sampling(seed=seed, max_tokens=4) for seed in range(count)],
        use_tqdm=False,
    )
    assert Counts(llm).num_accepted > count // 20
    found = dict.fromkeys(paths, 0)
    for output in outputs:
        found[tuple(output.outputs[0].token_ids[:3])] += 1
    likely = [path for path in paths if expected[path] * count >= 5]
    chi_square = sum(
        (found[path] - expected[path] * count) ** 2 / (expected[path] * count) for path in likely
    )
    # Mean and three standard deviations of the distribution.
    assert chi_square < len(likely) + 3 * math.sqrt(2 * len(likely))
    assert len(likely) > 8


def test_without_a_match_nothing_is_drafted(checkpoint):
    options = {"max_model_len": 64, "skip_tokenizer_init": True}
    long = NGRAM | {"prompt_lookup_min": 9, "prompt_lookup_max": 9}
    prompts = [{"prompt_token_ids": list(range(10, 30))}]
    _, counts = run(checkpoint("llama"), prompts, sampling(max_tokens=9), **options,
                    speculative_config=long)  # fmt: skip
    assert counts.stats.num_drafts == 0
