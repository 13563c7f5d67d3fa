"""Draft tokens on a GPU: the tokens are those without, and nothing compiles for them."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from eagle3_checkpoints import make_head, sure_model
from mtp_checkpoints import add_mtp
from tiny_models import build_model
from torch import Tensor

from vllm import LLM, SamplingParams
from vllm.core import speculation
from vllm.worker.cuda_graph import PromptShape, verification_shapes

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 40,
}  # fmt: skip
MODELS = {
    "qwen3": {},
    "qwen3_5": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "nemotron_h": {"ssm_state_size": 128, "mamba_head_dim": 64},
}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
# Of so few words that some follow each other again.
PROMPTS = [[3, 4, 5, 6] * 5, [7, 8] * 6, [9, 10, 11], [*range(12, 40)]]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.3, seed=5, max_tokens=60, ignore_eos=True)
# Random models repeat themselves little.
FEWEST_ACCEPTED = 4
# How far below the best of other kernels' logits a greedy token of bfloat16 may be.
NEAR = 0.2
MAX_SEQS = 8


@pytest.fixture(scope="module", params=MODELS)
def folder(tmp_path_factory, request) -> str:
    path = tmp_path_factory.mktemp("model")
    sizes = SIZES | MODELS[request.param]
    build_model(request.param, **sizes).bfloat16().save_pretrained(path)
    return str(path)


def start(folder: str, **options) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, max_num_seqs=MAX_SEQS, max_model_len=256,
               num_gpu_blocks_override=200, **options)  # fmt: skip


def tokens_of(llm: LLM, params: SamplingParams) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_in_float32_tokens_are_those_without_drafts(folder, params):
    wanted = tokens_of(start(folder, dtype="float32"), params)
    llm = start(folder, dtype="float32", speculative_config=NGRAM)
    assert tokens_of(llm, params) == wanted
    assert sum(llm.llm_engine.core.stats().num_accepted_tokens.values()) > FEWEST_ACCEPTED


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_draft_model_drafts(folder, params):
    drafts = {"method": "draft_model", "model": folder, "num_speculative_tokens": 4}
    wanted = tokens_of(start(folder, dtype="float32"), params)
    llm = start(folder, dtype="float32", speculative_config=drafts)
    assert tokens_of(llm, params) == wanted
    stats = llm.llm_engine.core.stats()
    assert sum(stats.num_accepted_tokens.values()) > FEWEST_ACCEPTED
    if params is GREEDY:  # it says what it drafts itself
        assert sum(stats.num_accepted_tokens.values()) > 0.9 * stats.num_draft_tokens


def test_the_layer_of_a_checkpoint_drafts(tmp_path):
    folder, drafts = drafted_by(tmp_path, "mtp")
    wanted = tokens_of(start(folder, dtype="float32"), GREEDY)
    llm = start(folder, dtype="float32", speculative_config=drafts)
    assert tokens_of(llm, GREEDY) == wanted
    assert sum(llm.llm_engine.core.stats().num_accepted_tokens.values()) > FEWEST_ACCEPTED


@pytest.fixture
def drafts_always(monkeypatch):
    """Whatever it costs on a tiny model."""
    monkeypatch.setattr(speculation, "_FIRST_STEPS", 1 << 30)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_an_eagle3_head_drafts(tmp_path, drafts_always, name, params):
    folder, drafts = with_head(tmp_path, name, torch.float32)
    wanted = tokens_of(start(folder, dtype="float32"), params)
    llm = start(folder, dtype="float32", speculative_config=drafts)
    assert tokens_of(llm, params) == wanted
    assert sum(llm.llm_engine.core.stats().num_accepted_tokens.values()) > FEWEST_ACCEPTED


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_drafts_are_launched_without_waiting_for_the_step(tmp_path, drafts_always, method):
    folder, drafts = drafted_by(tmp_path, method)
    # The host waits for attention in float32 at every call.
    llm = start(folder, dtype="bfloat16", speculative_config=drafts)
    calls = []
    tokens_of(llm, GREEDY)  # what is done once may wait
    drafter = llm.llm_engine.core.runner._drafter
    own_follow = drafter.follow

    def follow(*given):
        calls.append(given)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return own_follow(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    drafter.follow = follow
    tokens_of(llm, GREEDY)
    assert len(calls) > 20


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_draft_tokens_are_accepted_by_lot(tmp_path, method):
    folder, drafts = drafted_by(tmp_path, method)
    drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.7}
    llm = start(folder, speculative_config=drafts)
    found = tokens_of(llm, SEEDED)
    assert [len(tokens) for tokens in found] == [60] * len(PROMPTS)
    stats = llm.llm_engine.core.stats()
    assert stats.num_draft_tokens > 150
    share = sum(stats.num_accepted_tokens.values()) / stats.num_draft_tokens
    assert 0.5 < share < 0.9


def drafted_by(path: Path, method: str) -> tuple[str, dict]:
    """A model in float32 and how it drafts."""
    if method == "eagle3":
        return with_head(path, "qwen3", torch.float32)
    build_model("glm4_moe", **SIZES | {"moe_intermediate_size": 256}).save_pretrained(
        path / "plain"
    )
    folder = str(add_mtp(path / "plain", path / "mtp", is_sure=True))
    return folder, {"method": "mtp", "num_speculative_tokens": 3}


def with_head(path: Path, name: str, dtype: torch.dtype) -> tuple[str, dict]:
    """A model and how its EAGLE-3 head drafts: of qwen3 with a vocabulary of its own, of gpt_oss
    without one and with the hidden states that the last layer gives."""
    build_model(name, **SIZES).to(dtype).save_pretrained(path / "wide")
    folder = sure_model(path / "wide", path / "model")
    flags = {"num_drafts": 30}
    if name == "gpt_oss":
        flags = {"ids": (0, 2, 4), "num_drafts": None, "with_lm_head": False}
    head = make_head(folder, path / "head", heads=(4, 4, 128), **flags)
    return str(folder), {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_in_bfloat16_an_eagle3_head_drafts_beside_graphs(tmp_path, drafts_always, name):
    folder, drafts = with_head(tmp_path, name, torch.bfloat16)
    llm = start(folder, speculative_config=drafts)
    found = tokens_of(llm, GREEDY)
    stats = llm.llm_engine.core.stats()
    assert not stats.compile_waits
    assert sum(stats.num_accepted_tokens.values()) > FEWEST_ACCEPTED
    assert_likely(start(folder), found)


@pytest.mark.parametrize("num_drafts", [1, 3, 16])
def test_in_bfloat16_tokens_are_likely_and_nothing_compiles(folder, drafts_always, num_drafts):
    """In graphs of verification shapes; those of prompts for more than 8 tokens of a request."""
    llm = start(folder, speculative_config=NGRAM | {"num_speculative_tokens": num_drafts})
    replayed: Counter[PromptShape] = Counter()
    graphs = llm.llm_engine.core.runner._prompt_graphs
    replay = graphs.replay

    def look(shape: PromptShape) -> Tensor:
        replayed[shape] += 1
        return replay(shape)

    graphs.replay = look
    found = tokens_of(llm, GREEDY)
    stats = llm.llm_engine.core.stats()
    assert not stats.compile_waits
    assert sum(stats.num_accepted_tokens.values()) > (FEWEST_ACCEPTED if num_drafts > 3 else 0)
    shapes = verification_shapes(2048, MAX_SEQS, num_drafts)
    assert shapes[-1] in graphs.shapes
    assert sum(replayed[shape] for shape in shapes) > 10, replayed
    assert_likely(start(folder), found)


def assert_likely(plain: LLM, found: list[list[int]]) -> None:
    """What `plain` says of greedy tokens after PROMPTS."""
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for prompt, tokens in zip(PROMPTS, found):
        assert len(tokens) == 60
        whole = {"prompt_token_ids": prompt + tokens}
        scores = plain.generate([whole], scoring, use_tqdm=False)[0].prompt_logprobs
        for token, entry in zip(tokens, scores[len(prompt) :]):
            best = max(value.logprob for value in entry.values())
            assert entry[token].logprob > best - NEAR
