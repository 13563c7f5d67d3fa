"""A model whose numbers go wrong: the request fails, says where, and nobody else notices."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB

from vllm import LLM, SamplingParams
from vllm.core.request import EngineRequest, FinishReason
from vllm.entrypoints.openai.errors import as_api_error
from vllm.errors import NumericsError
from vllm.kernels.activations import InputQuant
from vllm.ops.fp8_quant import ScaleLayout
from vllm.worker.numerics import NumericsWatch

POISON = VOCAB - 1
"""A token whose embedding is NaN in `folder`."""


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    source, target = checkpoint("llama"), tmp_path_factory.mktemp("poisoned")
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def run(llm: LLM, prompts: dict[str, list[int]]) -> dict[str, list]:
    """The engine's outputs by request, one list each."""
    core, outputs = llm.llm_engine.core, {name: [] for name in prompts}
    for name, prompt in prompts.items():
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        core.add(EngineRequest(name, prompt, params, 0, [], 6))
    while core.has_work:
        for output in core.step():
            outputs[output.request_id].append(output)
    core.check_idle()
    return outputs


def tokens_of(outputs: list) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_with_nan_fails_and_its_neighbours_do_not(folder, async_scheduling):
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64)
    llm.llm_engine.core.executor.async_scheduling = async_scheduling
    llm.llm_engine.core.runner.async_scheduling = async_scheduling
    healthy = list(range(5, 25))
    alone = tokens_of(run(llm, {"alone": healthy})["alone"])
    together = run(llm, {"good": [3, *healthy], "bad": [7, POISON, 9], "same": healthy})
    assert tokens_of(together["same"]) == alone and len(tokens_of(together["good"])) == 6
    failure = together["bad"][-1]
    assert failure.finish_reason == FinishReason.ERROR
    assert "NaN" in failure.error and "--debug-numerics" in failure.error
    assert tokens_of(together["bad"]) == []


def test_what_a_broken_request_computed_is_not_reused(folder):
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
              max_num_batched_tokens=16)  # fmt: skip
    run(llm, {"bad": [POISON, *range(40)]})
    scheduler = llm.llm_engine.core.scheduler
    run(llm, {"again": [POISON, *range(40)]})
    assert scheduler.prefix_cache.num_hit == 0


def test_debugging_names_the_first_layer_that_is_not_finite(folder):
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, debug_numerics=True)
    outputs = run(llm, {"good": [3, 4], "bad": [7, POISON, 9]})
    assert "model.embed_tokens (Embedding)" in outputs["bad"][-1].error
    assert len(tokens_of(outputs["good"])) == 6


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_later_failure_is_traced_to_where_it_begins_itself(folder, async_scheduling):
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, debug_numerics=True)
    core = llm.llm_engine.core
    core.executor.async_scheduling = core.runner.async_scheduling = async_scheduling
    assert "model.embed_tokens" in run(llm, {"bad": [7, POISON, 9]})["bad"][-1].error
    core.runner.model.model.layers[1].input_layernorm.weight.data.fill_(torch.nan)
    error = run(llm, {"next": [7, 8, 9]})["next"][-1].error
    assert error.endswith("model.layers.1.input_layernorm (RMSNorm)")


@pytest.mark.parametrize("name", ["norm", "layers.0.post_attention_layernorm"])
def test_a_norm_that_adds_to_the_residual_is_named_itself(folder, name):
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, debug_numerics=True)
    module = llm.llm_engine.core.runner.model.model.get_submodule(name)
    module.weight.data.fill_(torch.nan)
    error = run(llm, {"bad": [7, 8, 9]})["bad"][-1].error
    assert error.endswith(f"model.{name} (RMSNorm)")


def test_a_layer_that_was_given_broken_numbers_is_not_blamed_for_them():
    watch = NumericsWatch(layer := torch.nn.Identity())
    layer(torch.full((2, 2), torch.nan))
    assert watch.first == "the model (Identity), whose input was not finite already"


@pytest.mark.parametrize("broken", ["q", "scales", ""])
def test_numbers_that_come_quantised_are_watched(broken):
    values = torch.ones(2, 128)
    given = InputQuant(ScaleLayout.ROW_MAJOR).quantise(values)
    if broken:
        getattr(given, broken).view(torch.uint8).fill_(0xFF)  # NaN in E4M3, and in float32
    watch = NumericsWatch(layer := torch.nn.Identity())
    layer(given)
    assert bool(watch.first) == bool(broken)


def test_who_ends_in_the_step_in_which_another_fails_comes_with_the_next(folder):
    engine = LLM(folder, skip_tokenizer_init=True, max_model_len=64).llm_engine
    params = SamplingParams(temperature=0, max_tokens=1)
    for name, prompt in {"good": [3, 4], "bad": [7, POISON], "same": [3, 4]}.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    with pytest.raises(NumericsError, match="NaN") as raised:
        engine.step()
    assert as_api_error(raised.value).status == 500
    assert engine.has_unfinished
    assert {output.request_id for output in engine.step()} == {"good", "same"}
    assert not engine.has_unfinished
