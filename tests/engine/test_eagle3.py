"""An EAGLE-3 head drafts: tokens are those without it, and its drafts those of the formula."""

import json

import pytest
import torch
from eagle3_checkpoints import Reference, make_head, sure_model, write
from safetensors.torch import load_file

from tests.engine.test_captured_steps import capture, capture_drafts, capture_prompts, load
from tests.engine.test_draft_model import explained, greedy, prompts
from tests.engine.test_mtp import Drafted
from tests.engine.test_speculation import Counts, ask, run, sampling
from vllm import LLM, EngineArgs, PoolingParams
from vllm.core import speculation
from vllm.entrypoints.cli.main import main
from vllm.errors import CheckpointError, ConfigError
from vllm.utils.fp8 import per_block_cast_to_fp8

OPTIONS = {"max_num_seqs": 8, "max_model_len": 128, "skip_tokenizer_init": True}
# Of each model: what its head is like, and the layers whose inputs it reads. The tiny ones have 3
# or 4 layers; (2, n / 2, n - 3) of 3 are all of them.
CASES = {
    "llama": ({}, (0, 1, 2)),
    "qwen3": (
        {"is_speculators": True, "norm_before_residual": True, "with_embeddings": True},
        (0, 1, 2),
    ),
    "qwen3_moe": ({"ids": (1, 2)}, (2, 3)),  # counted from what layers give
    "gpt_oss": (
        {
            "ids": (0, 2, 4), "num_drafts": None, "with_lm_head": False, "norm_before_fc": True,
            "is_speculators": True,
        },
        (0, 2, 4),
    ),
    "gemma3": ({"ids": (3, 2, 0), "num_drafts": None}, (0, 2, 3)),
    "glm4_moe_lite": ({}, (0, 1, 2)),
    "qwen3_next": ({"ids": (0, 1, 3)}, (0, 1, 3)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def drafts_always(monkeypatch):
    monkeypatch.setattr(speculation, "_FIRST_STEPS", 1 << 30)


@pytest.fixture(scope="module")
def with_head(checkpoint, tmp_path_factory):
    """with_head(name) -> a checkpoint, and a head for it whose drafts are often accepted."""
    made = {}

    def make(name, is_sure=True):
        if (name, is_sure) not in made:
            folder = tmp_path_factory.mktemp("eagle3")
            model = sure_model(checkpoint(name), folder / name)
            flags = CASES[name][0]
            made[name, is_sure] = model, make_head(model, folder / "head", is_sure=is_sure, **flags)
        return made[name, is_sure]

    return make


def drafted_by(head, most: int = 3) -> dict:
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": most}
    return {"speculative_config": config}


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_formula_and_tokens_those_without_them(with_head, name):
    params = [greedy(30, logprobs=1), sampling(allowed_token_ids=None, prompt_logprobs=2),
              sampling(seed=8, temperature=0.4, allowed_token_ids=None)]  # fmt: skip
    for is_sure in (False, True):
        model, head = with_head(name, is_sure)
        plain, _ = run(model, prompts(), params, **OPTIONS)
        llm = LLM(model, **OPTIONS, **drafted_by(head))
        drafted = Drafted(llm)
        assert ask(llm, prompts(), params) == plain
        drafted.check(Reference(model, head, CASES[name][1]))
    counts = Counts(llm)
    assert counts.num_accepted > 0 and counts.num_rejected > 0


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_prompts_in_chunks_hits_and_preemption(with_head, name):
    model, head = with_head(name)
    options = OPTIONS | {"max_num_batched_tokens": 12, "num_gpu_blocks_override": 12}
    plain = LLM(model, **options | {"enable_prefix_caching": False})
    llm = LLM(model, **options, **drafted_by(head))
    params = [greedy(40), *(sampling(seed=i, max_tokens=40, logprobs=1) for i in range(4))]
    for given in (prompts(5, 30), prompts(5, 35)):
        assert ask(llm, given, params) == ask(plain, given, params)
    counts = Counts(llm)
    assert counts.stats.prefix_cache_hits > 0 and counts.stats.num_preemptions > 0
    assert counts.num_accepted > 0 and counts.num_rejected > 0


def test_a_prompt_in_chunks_leaves_the_head_all_it_needs(with_head):
    """Beyond the context of its config.json too, which means nothing."""
    model, head = with_head("llama", is_sure=False)
    llm = LLM(model, **OPTIONS | {"max_num_batched_tokens": 12}, **drafted_by(head))
    drafted = Drafted(llm)
    ask(llm, prompts(2, 70), greedy(8))
    drafted.check(Reference(model, head, (0, 1, 2)))


@pytest.mark.parametrize("is_switching", [False, True])
def test_steps_that_overlap_and_are_captured_take_drafts(with_head, monkeypatch, is_switching):
    """Steps without drafts still leave the head what it needs for later ones."""
    if is_switching:
        for name in ("_FIRST_STEPS", "_PLAIN_STEPS", "_HELD", "_MOST_HELD"):
            monkeypatch.setattr(speculation, name, 3)
    model, head = with_head("llama", is_sure=False)
    given = prompts(9)
    free = {"allowed_token_ids": None, "temperature": 0.3}
    params = [sampling(seed=i, max_tokens=20 + 4 * i, logprobs=i % 2, **free) for i in range(9)]
    wanted = ask(load(model, async_scheduling=False), given, params)
    llm = load(model, async_scheduling=True, enable_prefix_caching=False, **drafted_by(head))
    graphs, _ = capture(llm), capture_prompts(llm, 64)
    drafting = capture_drafts(llm, 64)
    drafted = Drafted(llm)
    assert ask(llm, given, params) == wanted
    # Without switching, the last token of a request alone has no draft.
    assert (sum(graphs.num_replays.values()) > 9) == is_switching
    assert sum(count > 0 for count in drafting.num_replays.values()) > 2
    drafted.check(Reference(model, head, (0, 1, 2)))


def test_vectors_are_those_of_the_last_norm(with_head):
    model, head = with_head("llama")
    given = prompts(2)
    raw = PoolingParams(normalize=False)
    wanted = LLM(model, **OPTIONS).encode(given, raw, use_tqdm=False)
    found = LLM(model, **OPTIONS, **drafted_by(head)).encode(given, raw, use_tqdm=False)
    assert [one.outputs for one in found] == [one.outputs for one in wanted]
    assert len(found[0].outputs) == 48


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_tensor_parallel_ranks_draft_the_same(with_head, name):
    model, head = with_head(name)
    params = [greedy(30), sampling(allowed_token_ids=None),
              sampling(seed=8, temperature=0.4, allowed_token_ids=None, logprobs=1)]  # fmt: skip
    _, alone = run(model, prompts(), params, **drafted_by(head), **OPTIONS)
    plain, _ = run(model, prompts(), params, tensor_parallel_size=2, **OPTIONS)
    both = {"tensor_parallel_size": 2, **drafted_by(head)}
    found, counts = run(model, prompts(), params, **both, **OPTIONS)
    assert found == plain
    assert counts.num_accepted == alone.num_accepted > 0
    assert counts.num_rejected == alone.num_rejected > 0


def in_fp8(source, folder, excluded: list[str]) -> tuple:
    """A head with weights in FP8, and the one that these are."""
    tensors, config = load_file(source / "model.safetensors"), json.loads(
        (source / "config.json").read_text()
    )  # fmt: skip
    stored, wide = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or layer.endswith(tuple(excluded)):
            continue
        q, scales = per_block_cast_to_fp8(weight, (128, 128))
        stored[name], stored[f"{layer}.weight_scale_inv"] = q, scales
        rows, columns = (torch.arange(n) // 128 for n in weight.shape)
        wide[name] = q.float() * scales[rows][:, columns]
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": excluded,
    }
    config_fp8 = config | {"quantization_config": quantization}
    return write(folder / "fp8", stored, config_fp8), write(folder / "wide", wide, config)


def test_weights_in_fp8_are_read_as_the_head_says(with_head, tmp_path):
    model, source = with_head("llama", is_sure=False)
    fp8, wide = in_fp8(source, tmp_path, ["fc", "lm_head", "self_attn.o_proj"])
    llm = LLM(model, **OPTIONS, **drafted_by(fp8))
    drafted = Drafted(llm)
    ask(llm, prompts(), greedy(20))
    drafted.check(Reference(model, wide, (0, 1, 2)))
    formats = {layer: str(d.problem.weight) for layer, d in llm.llm_engine.core.selection.records
               if d.problem.family == "linear" and layer.startswith("draft.")}  # fmt: skip
    block, prefix = "fp8-block[128x128]", "draft.layers.0."
    assert formats == {
        "draft.fc": "fp32",
        f"{prefix}self_attn.qkv_proj": block,
        f"{prefix}self_attn.o_proj": "fp32",
        f"{prefix}mlp.gate_up_proj": block,
        f"{prefix}mlp.down_proj": block,
        "draft.lm_head": "fp32",
    }


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_explain_lists_what_the_engine_does(with_head, name, capsys):
    model, head = with_head(name)
    llm = LLM(model, **OPTIONS, **drafted_by(head))
    done = json.loads(json.dumps(llm.llm_engine.core.selection.to_json()))["decisions"]
    assert explained(model, drafted_by(head), capsys) == done
    layers = [layer for decision in done for layer in decision["layers"]]
    assert ("draft.lm_head" in layers) == (name == "llama") and "draft.fc" in layers


def test_its_kernels_can_be_requested(with_head):
    model, head = with_head("llama")
    llm = LLM(model, **OPTIONS, **drafted_by(head), kernel=["draft.fc=torch"])
    chosen = {name: d.chosen for name, d in llm.llm_engine.core.selection.records}
    assert chosen["draft.fc"] == "torch" != chosen["draft.lm_head"]


def test_the_cache_of_the_head_is_counted(with_head):
    model, head = with_head("llama")
    options = OPTIONS | {"kv_cache_memory_bytes": 1 << 22}
    plain = LLM(model, **options).llm_engine.core.executor.num_blocks
    core = LLM(model, **options, **drafted_by(head)).llm_engine.core
    # 2 KV heads in each of 3 layers, and 4 in that of the head.
    scratch_bytes = core.config.num_draft_blocks * 4
    assert core.executor.num_blocks == (plain * 6 - scratch_bytes) // 10


def test_random_weights_need_no_files_of_weights(with_head):
    model, head = with_head("llama")
    llm = LLM(model, **OPTIONS, **drafted_by(head), load_format="dummy")
    ask(llm, prompts(), greedy(20))
    assert Counts(llm).stats.num_drafts > 0


# ---------------------------------------------------------------- what is refused


def changed(head, folder, tensors=lambda stored: stored, **fields):
    """The head with other tensors or fields; None for a field that it is to lack."""
    config = json.loads((head / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    return write(folder, tensors(load_file(head / "model.safetensors")), config)


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"hidden_size": 64}, ConfigError, "hidden_size = 64, and the model has 48: take a head"),
        ({"vocab_size": 97}, ConfigError, "vocab_size = 97, and the model has 96: take a head"),
        ({"target_hidden_size": 40}, ConfigError, "target_hidden_size = 40, and the model's"),
        ({"draft_vocab_size": 97}, ConfigError, "draft_vocab_size = 97 is more than the 96"),
        ({"draft_vocab_size": 0}, CheckpointError, "draft_vocab_size = 0 is out of range"),
        ({"num_hidden_layers": 2}, CheckpointError, "num_hidden_layers = 2 is not supported"),
        ({"model_type": "qwen3"}, CheckpointError, "model_type = 'qwen3': heads of EAGLE-3 are"),
        ({"model_type": None}, CheckpointError, "model_type = None: heads of EAGLE-3 are served"),
        ({"hidden_act": 3}, CheckpointError, "is not that of an EAGLE-3 head: a field of a Llama"),
        ({"transformer_layer_config": 3}, CheckpointError, "transformer_layer_config = 3 is no"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]},
            ConfigError,
            "inputs of layers [0, 1, 9], which must differ and be from 0 to 3, for the model has 3",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 2, 2]},
            ConfigError,
            "inputs of layers [0, 2, 2], which must differ",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": "all"},
            CheckpointError,
            "eagle_aux_hidden_state_layer_ids is not a list",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1]},
            CheckpointError,
            "fc.weight has shape [48, 144], and hidden states of 2 layers need [48, 96]",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            CheckpointError,
            "use_aux_hidden_state = False is not supported",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(with_head, tmp_path, fields, error, said, capsys):
    model, head = with_head("llama")
    refused(model, changed(head, tmp_path, **fields), error, said)
    words = ["--speculative-config", json.dumps(drafted_by(tmp_path)["speculative_config"])]
    assert main(["kernels", "explain", str(model), *words]) == 2
    assert said in capsys.readouterr().err


def refused(model, head, error, said: str) -> None:
    args = EngineArgs(model=str(model), **drafted_by(head))
    with pytest.raises(error) as raised:
        args.create_engine_config()
    assert str(raised.value).startswith(f"--speculative-config: model {head}: ")
    assert said in str(raised.value)


def without(*names):
    return lambda stored: {name: t for name, t in stored.items() if name not in names}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (without("d2t"), "no tensor d2t, which tokens it drafts: its vocabulary has 64 of the mod"),
        (without("lm_head.weight"), "no tensor lm_head.weight, what drafts them: its vocabulary"),
        (without("fc.weight"), "has no tensor fc.weight: it is no EAGLE-3 head"),
        (
            lambda stored: stored | {"fc.weight": torch.zeros(48, 96)},
            "fc.weight has shape [48, 96], and hidden states of 3 layers need [48, 144]",
        ),
    ],
)
def test_a_checkpoint_that_is_no_head_of_the_model_is_refused(with_head, tmp_path, tensors, said):
    model, head = with_head("llama")
    refused(model, changed(head, tmp_path, tensors), CheckpointError, said)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (without("midlayer.mlp.up_proj.weight"), "lacks layers.0.mlp.up_proj.weight"),
        (lambda stored: stored | {"x.weight": torch.zeros(2)}, "unknown to this model: x.weight"),
        (
            lambda stored: stored | {"norm.weight": torch.zeros(2)},
            r"norm.weight has shape \[2\], but config.json implies \[48\]",
        ),
        (
            lambda stored: stored | {"d2t": stored["d2t"] + 90},
            r"d2t: it means tokens \d+ to \d+, and the model has 0 to 95",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_at_the_load(with_head, tmp_path, tensors, said):
    model, head = with_head("llama")
    with pytest.raises(CheckpointError, match=said):
        LLM(model, **OPTIONS, **drafted_by(changed(head, tmp_path, tensors)))


def test_files_that_are_cut_off_or_not_there_or_pickled_are_refused(with_head, tmp_path):
    model, head = with_head("llama")
    cut = changed(head, tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    for length in (4, len(whole) // 2, len(whole) - 1):
        (cut / "model.safetensors").write_bytes(whole[:length])
        refused(model, cut, CheckpointError, "is truncated or corrupt")
    (cut / "model.safetensors").rename(cut / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds pickled weights"):
        LLM(model, **OPTIONS, **drafted_by(cut))
    refused(model, "/no/such/head", CheckpointError, "'/no/such/head' is neither a folder")
    refused(model, model, CheckpointError, "num_hidden_layers = 3 is not supported: it takes 1")


def test_a_method_without_a_head_and_stages_are_refused(with_head):
    model, head = with_head("llama")
    with pytest.raises(ConfigError, match="model None: method eagle3 takes the folder or hub name"):
        EngineArgs(model=str(model), speculative_config={"method": "eagle3"}).create_engine_config()
    with pytest.raises(ConfigError, match="method eagle3 needs --pipeline-parallel-size 1"):
        EngineArgs(
            model=str(model), pipeline_parallel_size=2, **drafted_by(head)
        ).create_engine_config()
