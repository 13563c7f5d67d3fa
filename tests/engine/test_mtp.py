"""The checkpoint's own layer drafts: tokens are those without it, and its drafts those of the
formula."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mtp_checkpoints import Reference, add_mtp, write
from safetensors.torch import load_file

from tests.engine.test_captured_steps import capture, capture_drafts, capture_prompts, load
from tests.engine.test_draft_model import Proposed, explained, greedy, prompts
from tests.engine.test_speculation import Counts, ask, run, sampling
from vllm import LLM, EngineArgs
from vllm.core import speculation
from vllm.core.request import EngineRequest
from vllm.errors import CheckpointError, ConfigError
from vllm.executor.uniproc import UniprocExecutor
from vllm.utils.dataclasses import replace
from vllm.utils.fp8 import per_block_cast_to_fp8
from vllm.worker.async_output import AsyncModelRunnerOutput
from vllm.worker.block_table import BlockTable, TableLayout
from vllm.worker.step_inputs import StepInputs

OPTIONS = {"max_num_seqs": 8, "max_model_len": 128, "skip_tokenizer_init": True}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
SERVED = ["glm4_moe", "glm4_moe-normed", "deepseek_v3", "deepseek_v3-halves", "glm4_moe_lite",
          "qwen3_next", "qwen3_5", "qwen3_5_moe"]  # fmt: skip


@pytest.fixture(autouse=True)
def drafts_always(monkeypatch):
    monkeypatch.setattr(speculation, "_FIRST_STEPS", 1 << 30)


@pytest.fixture(scope="module")
def with_mtp(checkpoint, tmp_path_factory):
    """with_mtp(name) -> a checkpoint with a draft layer whose drafts are often accepted."""
    made = {}

    def make(name, is_sure=True):
        if (name, is_sure) not in made:
            folder = tmp_path_factory.mktemp("mtp") / name
            made[name, is_sure] = add_mtp(checkpoint(name), folder, is_sure)
        return made[name, is_sure]

    return make


def assert_alike(name: str, found: list, wanted: list) -> None:
    """Torch's attention over latents rounds by how prompts are cut, and for few heads by how many
    tokens there are: tokens are compared then."""
    if name == "deepseek_v3":
        found, wanted = ([one[0] for one in each] for each in (found, wanted))
    assert found == wanted


class Drafted(Proposed):
    """Of a drafter that follows every step."""

    def __init__(self, llm: LLM):
        self._drafter = llm.llm_engine.core.runner._drafter
        self._follow, self._drafter.follow = self._drafter.follow, self.follow
        self.found = []

    def follow(self, *given):
        self._propose = self._follow(*given)
        return self

    def check(self, reference) -> None:
        """Against what `reference` drafts after the same tokens."""
        assert len(self.found) > 3
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a few numbers at a time
        try:
            for known, draft in self.found:
                assert draft == reference.drafts(known, len(draft)), known
        finally:
            torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", SERVED)
def test_logits_are_those_of_the_formula(with_mtp, name):
    """The layer alone, whether the rest of the model can take draft tokens back or not; of its
    first tokens it computes no more than keys and values."""
    folder = with_mtp(name, is_sure=False)
    reference, tokens = Reference(folder), [(7 * i + 3) % 90 + 3 for i in range(41)]
    hidden = reference.hidden(tokens)[:-1]
    wanted = reference.logits(reference.states(tokens[1:], hidden))
    args = EngineArgs(model=str(folder), max_num_seqs=2, max_model_len=64, skip_tokenizer_init=True)
    config = args.create_engine_config()
    executor = UniprocExecutor(replace(config, model_config=config.model_config.with_mtp()))
    model, inputs = executor.runner.model, StepInputs(64, 2, 4, 16, torch.device("cpu"))
    table = BlockTable(1, 64, 16, TableLayout())
    table.append(0, [3, 1, 2, 0])
    rows = SimpleNamespace(
        token_ids=np.array([tokens[1:]]), tables=[table],
        sampled_at=np.array([-1]), state_slots=np.array([0], np.int32),
    )  # fmt: skip
    with torch.inference_mode():
        for start, count in ((0, 25), (25, 15)):
            filled = inputs.fill(rows, np.array([0]), np.array([count]), np.array([start]))
            own = model.model.embed(filled.input_ids), hidden[start : start + count].float()
            if start == 0:
                model.mtp.fill_cache(*own, filled)
            else:
                logits = model.compute_logits(model.mtp(*own, filled))
    assert wanted.std() > 0.3
    assert (logits - wanted[25:]).abs().max() < 2e-4


@pytest.mark.parametrize("name", SERVED)
def test_drafts_are_those_of_the_formula_and_tokens_those_without_them(with_mtp, name):
    folder = with_mtp(name)
    params = [greedy(30, logprobs=1), sampling(allowed_token_ids=None, logprobs=2),
              sampling(seed=8, temperature=0.4, allowed_token_ids=None)]  # fmt: skip
    plain, _ = run(folder, prompts(), params, **OPTIONS)
    llm = LLM(folder, **OPTIONS, **MTP)
    drafted = Drafted(llm)
    assert ask(llm, prompts(), params) == plain
    counts = Counts(llm)
    assert counts.num_accepted > 0 and counts.num_rejected > 0
    drafted.check(Reference(folder))


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_prompts_in_chunks_hits_and_preemption(with_mtp, name):
    folder = with_mtp(name)
    options = OPTIONS | {"max_num_batched_tokens": 12, "num_gpu_blocks_override": 12}
    plain = LLM(folder, **options | {"enable_prefix_caching": False})
    llm = LLM(folder, **options, **MTP)
    params = [greedy(40), *(sampling(seed=i, max_tokens=40, logprobs=1) for i in range(4))]
    for given in (prompts(5, 30), prompts(5, 35)):
        assert_alike(name, ask(llm, given, params), ask(plain, given, params))
    counts = Counts(llm)
    assert counts.stats.prefix_cache_hits > 0 and counts.stats.num_preemptions > 0
    assert counts.num_accepted > 0 and counts.num_rejected > 0


def test_a_prompt_in_chunks_leaves_the_layer_all_it_needs(with_mtp):
    folder = with_mtp("glm4_moe", is_sure=False)
    llm = LLM(folder, **OPTIONS | {"max_num_batched_tokens": 12}, **MTP)
    drafted = Drafted(llm)
    ask(llm, prompts(2, 50), greedy(8))
    drafted.check(Reference(folder))


@pytest.mark.parametrize("is_switching", [False, True])
def test_steps_that_overlap_and_are_captured_take_drafts(with_mtp, monkeypatch, is_switching):
    """Steps without drafts still leave the layer what it needs for later ones."""
    if is_switching:
        for name in ("_FIRST_STEPS", "_PLAIN_STEPS", "_HELD", "_MOST_HELD"):
            monkeypatch.setattr(speculation, name, 3)
    folder = with_mtp("glm4_moe")
    given = prompts(9)
    free = {"allowed_token_ids": None, "temperature": 0.3}
    params = [sampling(seed=i, max_tokens=20 + 4 * i, logprobs=i % 2, **free) for i in range(9)]
    wanted = ask(load(folder, async_scheduling=False), given, params)
    llm = load(folder, async_scheduling=True, enable_prefix_caching=False, **MTP)
    graphs, _ = capture(llm), capture_prompts(llm, 64)
    drafting = capture_drafts(llm, 64)
    drafted = Drafted(llm)
    assert ask(llm, given, params) == wanted
    # Without switching, the last token of a request alone has no draft.
    assert (sum(graphs.num_replays.values()) > 9) == is_switching
    assert sum(count > 0 for count in drafting.num_replays.values()) > 2
    drafted.check(Reference(folder))


@pytest.mark.parametrize("is_planned", [False, True])
def test_drafts_are_made_before_the_tokens_of_the_step_are_read(with_mtp, monkeypatch, is_planned):
    """Whether kernels take positions from the device, or the host plans attention: it waits for how
    many tokens are accepted then, and no more."""
    folder = with_mtp("glm4_moe")
    llm = load(folder, async_scheduling=True, **MTP)
    drafter, places = llm.llm_engine.core.runner._drafter, []
    drafter._is_planned = is_planned
    reading = []

    def result(output):
        reading.append(output)
        try:
            return own_result(output)
        finally:
            reading.pop()

    def draft(*given):
        places.append(bool(reading))
        return own_draft(*given)

    own_result, own_draft = AsyncModelRunnerOutput.result, drafter.draft
    monkeypatch.setattr(AsyncModelRunnerOutput, "result", result)
    monkeypatch.setattr(drafter, "draft", draft)
    drafted = Drafted(llm)
    params = [sampling(seed=i, allowed_token_ids=None, temperature=0.3) for i in range(4)]
    found = ask(llm, prompts(4), params)
    assert len(places) > 10 and not any(places)
    counts = Counts(llm)
    assert counts.num_accepted > 0 and counts.num_rejected > 0
    assert found == ask(load(folder, async_scheduling=False), prompts(4), params)
    drafted.check(Reference(folder))


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_requests_end_where_the_context_does(with_mtp, room):
    """Drafts that would pass the last position are cut."""
    folder, length = with_mtp("glm4_moe"), 16 + room
    options = OPTIONS | {"max_model_len": 48}
    given = [{"prompt_token_ids": [5 + i] * (length + i)} for i in range(3)]
    params = sampling(max_tokens=None, allowed_token_ids=None, temperature=0.3)
    plain, _ = run(folder, given, params, **options)
    llm = LLM(folder, **options, **MTP)
    drafted = Drafted(llm)
    assert ask(llm, given, params) == plain
    assert {len(one[0]) + len(p["prompt_token_ids"]) for one, p in zip(plain, given)} == {48}
    assert Counts(llm).num_accepted > 0
    assert max(len(known) + len(draft) for known, draft in drafted.found) <= 48
    drafted.check(Reference(folder))


@pytest.mark.parametrize("room", [0, 3, 6])
def test_attention_that_the_host_plans_ends_where_the_context_does(with_mtp, monkeypatch, room):
    """Drafts that are all accepted come to the last position with more tokens than it has room."""
    drafts = {"method": "mtp", "num_speculative_tokens": 8, "rejection_sample_method": "synthetic",
              "synthetic_acceptance_rate": 1.0}  # fmt: skip
    llm = LLM(with_mtp("glm4_moe"), **OPTIONS | {"max_model_len": 48}, speculative_config=drafts)
    drafter, planned = llm.llm_engine.core.runner._drafter, []
    drafter._is_planned = True
    own_forward = drafter.forward

    def forward(filled, hidden):
        (group,) = filled.groups
        planned.extend(group.host.seq_lens.tolist())
        return own_forward(filled, hidden)

    monkeypatch.setattr(drafter, "forward", forward)
    given = [{"prompt_token_ids": [5 + i] * (16 + room + i)} for i in range(3)]
    found = ask(llm, given, sampling(max_tokens=None, allowed_token_ids=None, temperature=0.3))
    assert {len(one[0]) + len(p["prompt_token_ids"]) for one, p in zip(found, given)} == {48}
    assert 44 < max(planned) <= 48


def test_a_prompt_as_long_as_the_context_is_scored_beside_drafts(with_mtp):
    folder, options = with_mtp("glm4_moe"), OPTIONS | {"max_model_len": 48}
    given = [{"prompt_token_ids": [5] * 12}, {"prompt_token_ids": [*range(10, 58)]}]
    params = [greedy(30), greedy(0, prompt_logprobs=1)]
    plain = LLM(folder, **options).llm_engine.core
    core = LLM(folder, **options, **MTP).llm_engine.core

    def outputs(core) -> list:
        """The second request arrives while the first one has drafts."""
        found, num_steps = [], 0
        for place, (prompt, own) in enumerate(zip(given, params)):
            tokens = prompt["prompt_token_ids"]
            core.add(EngineRequest(str(place), tokens, own, 1, [], own.max_tokens))
            while core.has_work and (place or num_steps < 4):
                found += core.step()
                num_steps += 1
        joined = {"0": [], "1": []}
        for output in found:
            joined[output.request_id] += output.token_ids
        scores = [o.prompt_logprobs for o in found if o.prompt_logprobs]
        return [joined, scores]

    assert outputs(core) == outputs(plain)
    assert core.stats().num_drafts > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_tensor_parallel_ranks_draft_the_same(with_mtp, name):
    folder, params = with_mtp(name), [greedy(30), sampling(), sampling(seed=5, logprobs=1)]
    plain, _ = run(folder, prompts(), params, tensor_parallel_size=2, **OPTIONS)
    found, counts = run(folder, prompts(), params, tensor_parallel_size=2, **OPTIONS, **MTP)
    assert_alike(name, found, plain)
    assert counts.num_accepted > 0 and counts.num_rejected > 0


def test_weights_in_fp8_are_read_as_the_checkpoint_says(with_mtp, tmp_path):
    source = with_mtp("glm4_moe")
    tensors = load_file(source / "model.safetensors")
    stored, wide = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        experts = re.match(r"(.*\.experts)\.(gate_up|down)_proj$", name)
        parts = {name: weight}
        if experts is not None:
            kinds = ("gate", "up") if experts[2] == "gate_up" else ("down",)
            parts = {f"{experts[1]}.{e}.{kind}_proj.weight": part for e, own in enumerate(weight)
                     for kind, part in zip(kinds, own.chunk(len(kinds)))}  # fmt: skip
            del stored[name]
        elif re.search(r"\.(q|k|v|o|gate|up|down)_proj\.weight$", name) is None:
            continue
        for part, values in parts.items():
            q, scales = per_block_cast_to_fp8(values, (128, 128))
            stored[part], stored[f"{part}_scale_inv"] = q, scales
            rows, columns = (torch.arange(n) // 128 for n in values.shape)
            values.copy_(q.float() * scales[rows][:, columns])
        wide[name] = weight
    excluded = ["gate", "lm_head", "model.layers.3.self_attn.o_proj"]
    name = "model.layers.3.self_attn.o_proj.weight"
    del stored[f"{name}_scale_inv"]
    stored[name] = wide[name]
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": excluded,
    }
    folder = write(source, tmp_path / "fp8", stored, quantization_config=quantization)
    llm = LLM(folder, **OPTIONS, **MTP)
    drafted = Drafted(llm)
    ask(llm, prompts(), greedy(20))
    drafted.check(Reference(write(source, tmp_path / "wide", wide)))
    formats = {layer: str(d.problem.weight) for layer, d in llm.llm_engine.core.selection.records
               if d.problem.family in ("linear", "moe")}  # fmt: skip
    block, prefix = "fp8-block[128x128]", "model.layers.3."
    assert formats[f"{prefix}mlp.experts"] == formats[f"{prefix}self_attn.qkv_proj"] == block
    assert formats[f"{prefix}self_attn.o_proj"] == formats[f"{prefix}eh_proj"] == "fp32"


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {}, "method mtp: model_type 'llama' has no layer of multi-token prediction"),
        ("glm4_moe", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0"),
        ("glm4_moe", {"k": 0}, "num_speculative_tokens 0 is out of range: it takes 1 to 32"),
        ("glm4_moe", {"k": 100}, "num_speculative_tokens 100 is out of range"),
        ("glm4_moe", {"model": "x"}, "key 'model' belongs to method draft_model or eagle3, and"),
    ],
)
def test_what_cannot_draft_is_refused(checkpoint, tmp_path, name, changes, said):
    folder = checkpoint(name)
    if "num_nextn_predict_layers" in changes:
        folder = write(folder, tmp_path, {"x": torch.zeros(1)}, **changes)
    given = {"method": "mtp"} | {key: value for key, value in changes.items() if key == "model"}
    given |= {"num_speculative_tokens": changes["k"]} if "k" in changes else {}
    args = EngineArgs(model=str(folder), speculative_config=given)
    with pytest.raises(ConfigError) as raised:
        args.create_engine_config()
    assert str(raised.value).startswith("--speculative-config: ") and said in str(raised.value)


def test_a_checkpoint_without_the_layer_or_with_a_part_of_it_is_refused(
    checkpoint, with_mtp, tmp_path
):
    with pytest.raises(CheckpointError, match=r"has no layer of .* \(no tensor model.layers.3."):
        LLM(checkpoint("glm4_moe"), **OPTIONS, **MTP)
    source = with_mtp("glm4_moe")
    tensors = load_file(source / "model.safetensors")
    lacking = {name: t for name, t in tensors.items() if not name.endswith("3.eh_proj.weight")}
    with pytest.raises(CheckpointError, match=r"lacks model.layers.3.eh_proj.weight"):
        LLM(write(source, tmp_path / "lacking", lacking), **OPTIONS, **MTP)
    wrong = tensors | {"model.layers.3.eh_proj.weight": torch.zeros(48, 48)}
    with pytest.raises(CheckpointError, match=r"eh_proj.weight has shape \[48, 48\], but .*96"):
        LLM(write(source, tmp_path / "wrong", wrong), **OPTIONS, **MTP)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_explain_lists_what_the_engine_does(with_mtp, name, capsys):
    folder = with_mtp(name)
    done = LLM(folder, **OPTIONS, **MTP).llm_engine.core.selection.to_json()["decisions"]
    assert explained(folder, MTP, capsys) == json.loads(json.dumps(done))
    assert any("model.layers.3.eh_proj" in layer for d in done for layer in d["layers"])


def test_names_that_upstream_has_for_single_families_mean_the_same(with_mtp):
    config = {"method": "glm4_moe_mtp", "num_speculative_tokens": 3}
    args = EngineArgs(model=str(with_mtp("glm4_moe")), speculative_config=config, max_num_seqs=4)
    found = args.create_engine_config()
    assert found.speculative_config.method == "mtp" and found.model_config.decoder.mtp is not None
