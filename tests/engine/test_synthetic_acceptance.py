"""Draft tokens that are accepted by lot, for measurements: as many as asked for, whatever the model
says; and nothing else changes."""

import logging
import math

import numpy as np
import pytest
import torch
from mtp_checkpoints import add_mtp

from tests.engine.test_captured_steps import capture, capture_prompts, load
from tests.engine.test_speculation import NGRAM, ask
from vllm import LLM, EngineArgs, SamplingParams
from vllm.config.speculative import SpeculativeConfig
from vllm.core.request import Request
from vllm.core.speculation import Speculation
from vllm.errors import ConfigError, RequestError
from vllm.worker.drafts import Proposals
from vllm.worker.input_batch import InputBatch
from vllm.worker.numerics import BROKEN
from vllm.worker.speculation import SampledRows, Verification, chance_of_each, draw_lots, new_tokens

SYNTHETIC = {"rejection_sample_method": "synthetic"}
OPTIONS = {"max_num_seqs": 8, "max_model_len": 128, "skip_tokenizer_init": True}
PROMPTS = [{"prompt_token_ids": [10 + i, 11, 12, 13 + i] * 3} for i in range(6)]


def at(rate: float, method: str = "mtp", **options) -> dict:
    return {"method": method} | options | SYNTHETIC | {"synthetic_acceptance_rate": rate}


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    """By name: models whose layer drafts something at random."""
    found = {}
    for name in ("glm4_moe", "qwen3_5"):
        folder = tmp_path_factory.mktemp("synthetic") / name
        found[name] = add_mtp(checkpoint(name), folder, is_sure=False)
    return found


def several(**options) -> list[SamplingParams]:
    """As many as PROMPTS."""
    defaults = {"max_tokens": 60, "ignore_eos": True}
    return [SamplingParams(**defaults | {"seed": i} | options) for i in range(len(PROMPTS))]


def ask_with(llm: LLM, most: int, params: list[SamplingParams]) -> list:
    """Of the first prompts, with drafts of at most so many tokens."""
    config = SpeculativeConfig.of(at(0.6, num_speculative_tokens=most))
    llm.llm_engine.core.speculation = Speculation(config)
    return ask(llm, PROMPTS[: len(params)], params)


def accepted(llm: LLM) -> tuple[int, int]:
    stats = llm.llm_engine.core.stats()
    return sum(stats.num_accepted_tokens.values()), stats.num_draft_tokens


def assert_share(num_accepted: int, num_drafted: int, rate: float, most: int) -> None:
    """Within four standard deviations of the mean over drafts of `most` tokens, of which any number
    between none and all is accepted at once."""
    num_drafts = num_drafted / most
    chance = chance_of_each(rate, most)
    at_least = [chance**place for place in range(1, most + 1)]
    square = sum((2 * place - 1) * share for place, share in enumerate(at_least, 1))
    deviation = math.sqrt((square - sum(at_least) ** 2) * num_drafts)
    assert abs(num_accepted - rate * num_drafted) <= 4 * deviation + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "most"), [("glm4_moe", 1), ("glm4_moe", 3), ("qwen3_5", 3)])
def test_as_many_tokens_are_accepted_as_asked_for(folders, name, most, temperature):
    config = at(0.7, num_speculative_tokens=most)
    llm = LLM(folders[name], speculative_config=config, **OPTIONS)
    params = several(temperature=temperature)
    found = ask(llm, PROMPTS * 2, params * 2)
    assert all(len(one[0]) == 60 for one in found)
    assert found[:6] == found[6:], "lots are drawn by seed and place"
    num_accepted, num_drafted = accepted(llm)
    assert num_drafted > 200
    # The last draft of a request is cut to its last token.
    assert_share(num_accepted, num_drafted, 0.7, most)
    # A model with random weights accepts hardly anything by itself.
    strict = LLM(folders[name], speculative_config={"method": "mtp"}, **OPTIONS)
    ask(strict, PROMPTS, params)
    own, of = accepted(strict)
    assert own / of < 0.4


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_all_or_none(folders, rate):
    llm = LLM(folders["glm4_moe"], speculative_config=at(rate, num_speculative_tokens=3), **OPTIONS)
    found = ask(llm, PROMPTS, several(temperature=0, stop_token_ids=[]))
    num_accepted, num_drafted = accepted(llm)
    assert num_drafted > 100 and num_accepted == rate * num_drafted
    if rate == 0:  # each token is then the model's own
        plain = LLM(folders["glm4_moe"], **OPTIONS)
        assert found == ask(plain, PROMPTS, several(temperature=0))


def test_accepted_tokens_are_the_drafts_and_the_model_continues_them(folders):
    """With every draft token accepted, each step gives the whole draft and the token that the model
    gives after it."""
    llm = LLM(folders["glm4_moe"], speculative_config=at(1.0, num_speculative_tokens=2), **OPTIONS)
    core, drafted = llm.llm_engine.core, []

    def scheduled(step):
        drafts, in_flight = step.scheduled_spec_decode_tokens, core.runner._drafter.in_flight
        drafted.extend(in_flight.resolved(drafts).values() if drafts else ())

    core.on_scheduled = scheduled
    params = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
    (tokens, *_), *_ = ask(llm, PROMPTS[:1], [params])
    plain, place = LLM(folders["glm4_moe"], **OPTIONS), 1
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    own = 0
    for draft in drafted:
        end = place + len(draft)
        assert list(tokens[place:end]) == draft
        known = PROMPTS[0]["prompt_token_ids"] + list(tokens[:end])
        assert ask(plain, [{"prompt_token_ids": known}], [one])[0][0][0] == tokens[end]
        place, own = end + 1, own + 1
    assert own == 10 and place == len(tokens)


def test_steps_that_overlap_and_are_captured_accept_the_same(folders):
    """As on a GPU."""
    config, params = at(0.6, num_speculative_tokens=2), several(temperature=1.0)
    options = {"speculative_config": config}
    plain = load(folders["glm4_moe"], async_scheduling=False, **options)
    llm = load(folders["glm4_moe"], async_scheduling=True, **options)
    capture(llm)
    graphs = capture_prompts(llm, 64)
    assert ask(llm, PROMPTS, params) == ask(plain, PROMPTS, params)
    num_accepted, num_drafted = accepted(llm)
    assert_share(num_accepted, num_drafted, 0.6, 2)
    # Drafts of one request alone leave no place for padding, or a place for one token.
    shapes = {1: (2, 2, 1), 2: (4, 3, 3)}
    for most, shape in shapes.items():
        before = graphs.num_replays[shape]
        assert ask_with(llm, most, params[:1]) == ask_with(plain, most, params[:1])
        assert graphs.num_replays[shape] > before + 20


def test_drafts_of_n_grams_are_accepted_by_lot_and_end_where_requests_do(checkpoint):
    llm = LLM(checkpoint("llama"), speculative_config=NGRAM | SYNTHETIC
              | {"synthetic_acceptance_rate": 0.9}, **OPTIONS)  # fmt: skip
    params = several(temperature=1.0, allowed_token_ids=[5, 6, 7], max_tokens=33)
    prompts = [{"prompt_token_ids": [5, 6, 7, 6] * 4 + [5 + i % 3]} for i in range(6)]
    found = ask(llm, prompts, params)
    assert all(len(one[0]) == 33 and set(one[0]) <= {5, 6, 7} for one in found)
    num_accepted, num_drafted = accepted(llm)
    assert num_accepted > num_drafted / 2 > 20


# ---------------------------------------------------------------- lots


def batch_of(seeds: list[int], num_output: int = 0) -> InputBatch:
    batch = InputBatch(len(seeds), 64, 16)
    for index, seed in enumerate(seeds):
        request = Request(
            str(index), SamplingParams(), seed, frozenset(), 60, 2, [3, 4] + [5] * num_output,
            block_ids=[[index]],
        )  # fmt: skip
        batch.add(request, 1)
    return batch


@pytest.mark.parametrize("most", [1, 3, 8])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.7, 0.95])
def test_lots_have_the_mean_that_is_asked_for(rate, most):
    config = SpeculativeConfig.of(at(rate, num_speculative_tokens=most))
    total, count = 0, 0
    for num_output in range(40):
        batch = batch_of([*range(100)], num_output)
        drafts = {str(i): [9] * most for i in range(100)}
        lots = draw_lots(batch, drafts, config)
        total, count = total + sum(lots.values()), count + 100
        assert min(lots.values()) >= 0 and max(lots.values()) <= most
    assert_share(total, count * most, rate, most)


def test_a_lot_depends_on_seed_and_place_and_on_no_other_request():
    config, drafts = SpeculativeConfig.of(at(0.5)), {str(i): [9] * 4 for i in range(30)}
    together = draw_lots(batch_of([*range(30)]), drafts, config)
    alone = {str(i): draw_lots(batch_of([i]), {"0": [9] * 4}, config)["0"] for i in range(30)}
    assert together == alone and len(set(together.values())) > 3
    assert draw_lots(batch_of([*range(30)], 1), drafts, config) != together
    assert draw_lots(batch_of([*range(30, 60)]), drafts, config) != together


def test_no_lots_are_drawn_for_strict_verification():
    drafts = {"0": [9] * 4}
    assert draw_lots(batch_of([1]), drafts, SpeculativeConfig.of({"method": "mtp"})) is None
    assert draw_lots(batch_of([1]), drafts, None) is None


def test_drawn_tokens_are_accepted_whatever_was_sampled_but_not_past_a_broken_row():
    drafts = {"a": [5, 6, 7], "c": [5], "d": [9, 9]}
    verification = Verification(drafts, lambda request_ids: Proposals({}), {"a": 2, "c": 0, "d": 2})
    sampled = [1, 2, 3, 4, 4, 5, 3, 1, BROKEN, 2]
    assert verification.accepted(["a", "b", "c", "d"], sampled) == [
        [5, 6, 3],
        [4],
        [5],
        [9, BROKEN],
    ]


@pytest.mark.parametrize("by_lot", [False, True])
def test_the_device_accepts_what_the_host_does(by_lot):
    """Of requests with and without drafts, in the order of a step's rows."""
    rng = np.random.default_rng(5)
    for _ in range(60):
        batch = batch_of([*range(6)], num_output=3)
        drafts = {str(i): rng.integers(0, 2, rng.integers(0, 4)).tolist() for i in range(6)}
        drafts = {name: draft for name, draft in drafts.items() if draft}
        batch.put_drafts(drafts)
        rows = rng.permutation(6)[: rng.integers(1, 7)]
        ids = [str(row) for row in rows]
        drafts = {name: draft for name, draft in drafts.items() if name in ids}
        counts = batch.num_drafts[rows]
        sampled = SampledRows.of(np.cumsum(counts + 1) - 1, rows, counts)
        tokens = rng.integers(0, 2, len(sampled.rows))
        config = SpeculativeConfig.of(at(0.5)) if by_lot else None
        lots = draw_lots(batch, drafts, config)
        step = [token for name in ids for token in (7, *drafts.get(name, ()))]
        found = new_tokens(batch, sampled, torch.from_numpy(tokens), torch.tensor(step), lots)
        verification = Verification(drafts, lambda request_ids: Proposals({}), lots)
        wanted = verification.accepted(ids, tokens.tolist())
        assert found.rows.tolist() == rows.tolist()
        assert found.last.tolist() == [new[-1] for new in wanted]
        if found.num_accepted is None:
            assert not drafts
        else:
            assert found.num_accepted.tolist() == [len(new) - 1 for new in wanted]


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("most", [1, 2, 32])
def test_the_chance_of_each_token_gives_the_mean(rate, most):
    chance = chance_of_each(rate, most)
    powers = np.cumprod(np.full(most, chance))
    assert powers.mean() == pytest.approx(rate, rel=1e-9)


# ---------------------------------------------------------------- configuration


def test_drafts_that_are_measured_are_whole_and_made_whether_they_pay_or_not():
    speculation = Speculation(SpeculativeConfig.of(at(0.0, num_speculative_tokens=7)))
    speculation._count("a", 7, 0)
    assert speculation.length("a") == speculation.length("b") == 7
    speculation._trials_at(1).is_on = False
    assert speculation.max_draft_tokens(1, ["a"]) == 7
    assert speculation.take_counts()[:2] == (1, 7)


@pytest.mark.parametrize("name", ["strict", "standard", "probabilistic"])
def test_names_of_exact_verification(name):
    given = {"method": "mtp", "rejection_sample_method": name}
    assert SpeculativeConfig.of(given) == SpeculativeConfig.of({"method": "mtp"})
    assert SpeculativeConfig.of(at(1, "ngram")).acceptance_rate == 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rejection_sample_method": "syntetic"}, "did you mean synthetic?; it takes strict, syn"),
        ({"rejection_sample_method": 3}, "rejection_sample_method 3 is unknown"),
        ({"synthetic_acceptance_rate": 0.7}, "belongs to rejection_sample_method synthetic"),
        (
            {"rejection_sample_method": "strict", "synthetic_acceptance_rate": 0.7},
            "0.7 belongs to rejection_sample_method synthetic, and the method is strict: leave it",
        ),
        (SYNTHETIC, "synthetic_acceptance_rate None: rejection_sample_method synthetic takes"),
        (SYNTHETIC | {"synthetic_acceptance_rate": 1.5}, "1.5: rejection_sample_method synthetic"),
        (SYNTHETIC | {"synthetic_acceptance_rate": -0.1}, "-0.1: rejection_sample_method"),
        (SYNTHETIC | {"synthetic_acceptance_rate": math.nan}, "nan: rejection_sample_method"),
        (SYNTHETIC | {"synthetic_acceptance_rate": True}, "from 0 to 1, as 0.7"),
        (SYNTHETIC | {"synthetic_acceptance_rate": "0.7"}, "from 0 to 1, as 0.7"),
        ({"synthetic_acceptance_rates": [0.7]}, "did you mean synthetic_acceptance_rate?"),
    ],
)
def test_a_wrong_configuration_is_refused_with_what_it_takes(given, said):
    with pytest.raises(ConfigError) as error:
        SpeculativeConfig.of({"method": "mtp"} | given)
    assert str(error.value).startswith("--speculative-config: ") and said in str(error.value)


def test_log_probabilities_are_refused(folders):
    llm = LLM(folders["glm4_moe"], **OPTIONS, speculative_config=at(0.6))
    with pytest.raises(RequestError, match="accepted by lot"):
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=4, logprobs=1), use_tqdm=False)
    assert len(ask(llm, PROMPTS[:1], several()[:1])[0][0]) == 60


def test_a_warning_says_that_answers_are_not_the_models(checkpoint, caplog):
    def warnings(config: dict) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            args = EngineArgs(model=str(checkpoint("llama")), speculative_config=config)
            args.create_engine_config()
        return [text for text in caplog.messages if "synthetic" in text]

    (text,) = warnings(at(0.7, "ngram"))
    assert "answers are NOT those of the model" in text
    assert not warnings({"method": "ngram", "rejection_sample_method": "strict"})
