"""A smaller model drafts: tokens are those without it, and its drafts what it says by itself."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_captured_steps import capture, capture_prompts, load
from tests.engine.test_speculation import FEW, MIXED, Counts, ask, run, sampling
from vllm import LLM, EngineArgs, SamplingParams
from vllm.core import speculation
from vllm.entrypoints.cli.main import main
from vllm.errors import CheckpointError, ConfigError

OPTIONS = {"max_num_seqs": 8, "max_model_len": 128, "skip_tokenizer_init": True}


@pytest.fixture(autouse=True)
def drafts_always(monkeypatch):
    """Whatever it costs on a tiny model."""
    monkeypatch.setattr(speculation, "_FIRST_STEPS", 1 << 30)


@pytest.fixture(scope="module")
def similar(checkpoint, tmp_path_factory):
    """The model with weights that are a little off: it says the same more often than not."""
    folder = tmp_path_factory.mktemp("similar") / "model"
    shutil.copytree(checkpoint("llama"), folder)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: weight * (1 + 0.04 * torch.randn(weight.shape, generator=generator))
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drafted_by(folder, most: int = 4) -> dict:
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": most}
    return {"speculative_config": config}


def prompts(count: int = 3, length: int = 20) -> list:
    return [{"prompt_token_ids": [10, *FEW, 11] * (length // 5) + [20 + i]} for i in range(count)]


def greedy(max_tokens: int = 40, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


class Proposed:
    """Every draft of `llm`, with the tokens that were known."""

    def __init__(self, llm: LLM):
        self._drafter = llm.llm_engine.core.runner._drafter
        self._propose = self._drafter.propose
        self._drafter.propose = self
        self.found: list[tuple[list[int], list[int]]] = []

    def __call__(self, *given, **named):
        batch, proposals = self._drafter.batch, self._propose(*given, **named)
        drafts, in_flight = proposals.drafts, self._drafter.in_flight
        for request_id, draft in (in_flight.resolved(drafts) if in_flight else drafts).items():
            row = batch.row_of[request_id]
            self.found.append((batch.token_ids[row, : batch.num_tokens[row]].tolist(), draft))
        return proposals

    def check(self, folder) -> None:
        """Against what the model of `folder` says after the same tokens."""
        llm = LLM(folder, **OPTIONS | {"enable_prefix_caching": False})
        known = [{"prompt_token_ids": tokens} for tokens, _ in self.found]
        params = [greedy(len(draft)) for _, draft in self.found]
        outputs = llm.generate(known, params, use_tqdm=False)
        for (_, draft), output in zip(self.found, outputs):
            assert draft == output.outputs[0].token_ids


def check(main, draft, given, params, **options) -> Counts:
    """With drafts and without."""
    options = OPTIONS | options
    plain, _ = run(main, given, params, **options)
    found, counts = run(main, given, params, **drafted_by(draft), **options)
    assert found == plain
    return counts


@pytest.mark.parametrize("most", [1, 3, 20])
def test_every_token_that_the_model_drafts_for_itself_is_accepted(checkpoint, most):
    folder = checkpoint("llama")
    plain, _ = run(folder, prompts(), greedy(90, logprobs=2), **OPTIONS)
    found, counts = run(
        folder, prompts(), greedy(90, logprobs=2), **OPTIONS, **drafted_by(folder, most)
    )
    assert found == plain
    assert counts.num_accepted > 0 and counts.num_rejected == 0
    # The first token is of the prompt's step; of later steps nearly all have whole drafts.
    assert counts.stats.num_drafts <= 3 * (90 / (most + 1) + 3)


def test_drafts_are_what_the_model_says_afresh_also_after_refused_ones(checkpoint, similar):
    llm = LLM(checkpoint("llama"), **OPTIONS, **drafted_by(similar))
    proposed = Proposed(llm)
    ask(llm, prompts(4), [greedy(), greedy(), sampling(), sampling(seed=9, temperature=0.3)])
    counts = Counts(llm)
    assert counts.num_accepted > 10 and counts.num_rejected > 10
    assert len(proposed.found) > 40
    proposed.check(similar)


def test_prompts_come_in_chunks_and_from_the_prefix_cache(checkpoint, similar):
    options = OPTIONS | {"max_num_batched_tokens": 12}
    plain = LLM(checkpoint("llama"), **options | {"enable_prefix_caching": False})
    llm = LLM(checkpoint("llama"), **options, **drafted_by(similar))
    proposed = Proposed(llm)
    params = [greedy(20), sampling(max_tokens=20), sampling(seed=7, max_tokens=20, logprobs=1)]
    for given in (prompts(3, 50), prompts(3, 60)):  # the second begins as the first
        assert ask(llm, given, params) == ask(plain, given, params)
    counts = Counts(llm)
    assert counts.stats.prefix_cache_hits >= 3 * 48 and counts.num_accepted > 0
    proposed.check(similar)


def test_blocks_that_the_draft_model_did_not_compute_are_no_hit_for_it(
    checkpoint, similar, monkeypatch
):
    llm = LLM(checkpoint("llama"), **OPTIONS, **drafted_by(similar))
    core = llm.llm_engine.core
    monkeypatch.setattr(core.speculation, "max_draft_tokens", lambda *given: 0)
    ask(llm, prompts(1, 60), greedy(5))
    monkeypatch.undo()
    proposed = Proposed(llm)
    ask(llm, prompts(1, 60), greedy(20))
    assert Counts(llm).stats.prefix_cache_hits >= 48 and len(proposed.found) > 3
    proposed.check(similar)


def test_drafts_begin_again_after_steps_without(checkpoint, similar, monkeypatch):
    for name in ("_FIRST_STEPS", "_PLAIN_STEPS", "_HELD", "_MOST_HELD"):
        monkeypatch.setattr(speculation, name, 3)
    llm = LLM(checkpoint("llama"), **OPTIONS, **drafted_by(similar))
    proposed = Proposed(llm)
    wanted, _ = run(checkpoint("llama"), prompts(4), sampling(max_tokens=90), **OPTIONS)
    assert ask(llm, prompts(4), sampling(max_tokens=90)) == wanted
    assert 0 < len(proposed.found) < 200
    proposed.check(similar)


def test_preempted_requests_go_on_with_the_same_tokens_and_drafts(checkpoint, similar):
    params = [sampling(seed=seed, max_tokens=80, logprobs=1) for seed in range(3)]
    params += [greedy(80)] * 3
    options = OPTIONS | {"num_gpu_blocks_override": 12}
    plain, _ = run(checkpoint("llama"), prompts(6), params, **options)
    llm = LLM(checkpoint("llama"), **options, **drafted_by(similar))
    proposed = Proposed(llm)
    assert ask(llm, prompts(6), params) == plain
    counts = Counts(llm)
    assert counts.stats.num_preemptions > 0 and counts.num_accepted > 0
    proposed.check(similar)


def test_each_way_to_sample_gives_what_it_gives_without_drafts(text_checkpoint):
    params = [sampling(**options) for options in MIXED.values()]
    given = [f"{'the quick brown fox ' * 3}{i}" for i in range(len(params))]
    draft = text_checkpoint
    options = {"max_model_len": 256, "max_num_batched_tokens": 20}
    plain, _ = run(text_checkpoint, given, params, **options)
    found, counts = run(text_checkpoint, given, params, **drafted_by(draft), **options)
    assert found == plain
    assert counts.num_accepted > 0 and counts.num_rejected > 0


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "qwen3_moe", "mistral-window"])
def test_models_of_other_families_draft(checkpoint, name):
    counts = check(checkpoint("llama"), checkpoint(name), prompts(), [greedy(), sampling(),
                   sampling(seed=5, logprobs=1)])  # fmt: skip
    assert counts.stats.num_drafts > 0
    own = check(checkpoint(name), checkpoint(name), prompts(), greedy(30, logprobs=1))
    assert own.num_accepted > 0 and own.num_rejected == 0


def test_a_draft_model_with_a_shorter_context_drafts_up_to_its_end(checkpoint, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(checkpoint("llama"), short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    llm = LLM(checkpoint("llama"), **OPTIONS, **drafted_by(short))
    proposed = Proposed(llm)
    plain, _ = run(checkpoint("llama"), prompts(), greedy(90), **OPTIONS)
    assert ask(llm, prompts(), greedy(90)) == plain
    assert max(len(known) + len(draft) for known, draft in proposed.found) == 40


def test_a_request_ends_where_the_context_does(checkpoint):
    folder = checkpoint("llama")
    options = OPTIONS | {"max_model_len": 64}
    plain, _ = run(folder, prompts(), greedy(None), **options)
    found, counts = run(folder, prompts(), greedy(None), **options, **drafted_by(folder))
    assert found == plain and {one[3] for one in found} == {"length"}
    assert counts.num_accepted > 0 and counts.num_rejected == 0


@pytest.mark.parametrize("is_switching", [False, True])
def test_steps_that_overlap_and_are_captured_take_drafts(
    checkpoint, similar, monkeypatch, is_switching
):
    if is_switching:
        for name in ("_FIRST_STEPS", "_PLAIN_STEPS", "_HELD", "_MOST_HELD"):
            monkeypatch.setattr(speculation, name, 3)
    given = prompts(9)
    free = {"allowed_token_ids": None, "temperature": 0.3}
    params = [sampling(seed=i, max_tokens=20 + 4 * i, logprobs=i % 2, **free) for i in range(9)]
    wanted = ask(load(checkpoint("llama"), async_scheduling=False), given, params)
    llm = load(checkpoint("llama"), async_scheduling=True, **drafted_by(similar))
    capture(llm), capture_prompts(llm, 64)
    proposed = Proposed(llm)
    assert ask(llm, given, params) == wanted
    assert Counts(llm).num_accepted > 0
    proposed.check(similar)


@pytest.mark.slow
def test_tensor_parallel_ranks_draft_the_same(checkpoint, similar):
    params = [greedy(), sampling(), sampling(seed=5, presence_penalty=0.5)]
    counts = check(checkpoint("llama"), similar, prompts(), params, tensor_parallel_size=2)
    assert counts.num_accepted > 0 and counts.num_rejected > 0


def test_its_kernels_are_listed_beside_those_of_the_model(checkpoint):
    llm = LLM(checkpoint("llama"), **OPTIONS, **drafted_by(checkpoint("qwen3_moe")))
    names = [name for name, _ in llm.llm_engine.core.selection.records]
    assert "draft.model.layers.0.mlp.experts" in names and "model.layers.0.mlp.down_proj" in names
    assert "draft.lm_head" in names and len(names) == len(set(names)) + 3 + 3  # writes of caches
    llm = LLM(
        checkpoint("llama"), **OPTIONS, **drafted_by(checkpoint("llama")),
        kernel=["draft.*.down_proj=torch"],
    )  # fmt: skip
    chosen = {name: d.chosen for name, d in llm.llm_engine.core.selection.records
              if name.endswith("down_proj")}  # fmt: skip
    assert {name for name, backend in chosen.items() if backend == "torch"} == {
        f"draft.model.layers.{i}.mlp.down_proj" for i in range(3)
    }
    with pytest.raises(ConfigError, match="means no layer"):
        LLM(checkpoint("llama"), **OPTIONS, **drafted_by(checkpoint("llama")),
            kernel=["drift.*=torch"])  # fmt: skip


def explained(folder, drafts: dict, capsys) -> list:
    """The decisions that `vllm kernels explain` prints."""
    capsys.readouterr()
    words = ["--json", "--speculative-config", json.dumps(drafts["speculative_config"])]
    assert main(["kernels", "explain", str(folder), *words]) == 0
    return json.loads(capsys.readouterr().out)["decisions"]


def test_explain_lists_what_the_engine_does(checkpoint, capsys):
    drafts = drafted_by(checkpoint("deepseek_v3"))
    llm = LLM(checkpoint("llama"), **OPTIONS, **drafts)
    done = json.loads(json.dumps(llm.llm_engine.core.selection.to_json()))["decisions"]
    assert explained(checkpoint("llama"), drafts, capsys) == done


def test_the_cache_of_both_is_counted(checkpoint):
    folder = checkpoint("llama")
    options = OPTIONS | {"kv_cache_memory_bytes": 1 << 22}
    plain = LLM(folder, **options).llm_engine.core
    core = LLM(folder, **options, **drafted_by(folder)).llm_engine.core
    scratch = core.config.num_draft_blocks
    assert scratch == 8
    assert core.executor.num_blocks == (plain.executor.num_blocks - scratch) // 2


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model": "/no/such/folder"}, CheckpointError, "model /no/such/folder: "),
        ({"model": "wide"}, ConfigError, "has a vocabulary of 100 tokens and "),
        ({"model": "qwen3_5"}, ConfigError, "has layers with recurrent states (qwen3_5_text)"),
        ({"num_speculative_tokens": 0}, ConfigError, "num_speculative_tokens 0 is out of range"),
        ({"num_speculative_tokens": 100}, ConfigError, "100 is out of range: it takes 1 to 32"),
        ({"model": ""}, ConfigError, "model '': method draft_model takes the folder or hub name"),
        ({"prompt_lookup_max": 3}, ConfigError, "key 'prompt_lookup_max' belongs to method ngram"),
        ({"draft_model": "x"}, ConfigError, "unknown key 'draft_model'"),
    ],
)
def test_what_cannot_draft_is_refused(checkpoint, changes, error, said):
    own = {"wide": checkpoint("llama", vocab_size=100), "qwen3_5": checkpoint("qwen3_5")}
    given = {"method": "draft_model", "model": str(checkpoint("llama"))} | changes
    given["model"] = str(own.get(given["model"], given["model"]))
    args = EngineArgs(model=str(checkpoint("llama")), speculative_config=given)
    with pytest.raises(error) as raised:
        args.create_engine_config()
    assert str(raised.value).startswith("--speculative-config: ") and said in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"pipeline_parallel_size": 2}, "method draft_model needs --pipeline-parallel-size 1"),
        ({"tensor_parallel_size": 4}, "num_attention_heads"),
    ],
)
def test_ranks_that_it_cannot_be_divided_over_are_refused(checkpoint, flags, said):
    model = checkpoint("llama", num_attention_heads=8, num_key_value_heads=8)
    config = {"method": "draft_model", "model": str(checkpoint("llama"))}
    args = EngineArgs(model=str(model), speculative_config=config, **flags)
    with pytest.raises(ConfigError, match=said):
        args.create_engine_config()
