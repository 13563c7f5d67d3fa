"""Upstream's names for scripts: where they are, and what they do."""

import itertools
import math
from importlib import import_module

import pytest
import torch

import vllm
from vllm import LLM, EngineArgs, LLMEngine, ModelRegistry, SamplingParams, TokensPrompt
from vllm.beam_search import BeamSearch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.errors import ConfigError, RequestError
from vllm.lora.request import LoRARequest
from vllm.outputs import Logprob
from vllm.sampling_params import BeamSearchParams, SamplingType
from vllm.utils import FlexibleArgumentParser
from vllm.v1.metrics.reader import Counter, Histogram

NAMES = (
    "vllm:AsyncEngineArgs", "vllm:AsyncLLMEngine", "vllm:EngineArgs", "vllm:LLMEngine",
    "vllm:ModelRegistry", "vllm:PromptType", "vllm:TextPrompt", "vllm:TokensPrompt",
    "vllm.beam_search:BeamSearchOutput", "vllm.engine.arg_utils:AsyncEngineArgs",
    "vllm.engine.async_llm_engine:AsyncLLMEngine", "vllm.engine.llm_engine:LLMEngine",
    "vllm.entrypoints.chat_utils:resolve_hf_chat_template", "vllm.inputs:PromptType",
    "vllm.inputs:TextPrompt", "vllm.inputs:TokensPrompt", "vllm.logger:init_logger",
    "vllm.logprobs:Logprob", "vllm.logprobs:PromptLogprobs", "vllm.logprobs:SampleLogprobs",
    "vllm.lora.request:LoRARequest", "vllm.model_executor.models:ModelRegistry",
    "vllm.pooling_params:PoolingParams", "vllm.sampling_params:BeamSearchParams",
    "vllm.sampling_params:GuidedDecodingParams", "vllm.tokenizers:get_tokenizer",
    "vllm.transformers_utils.tokenizer:get_tokenizer", "vllm.usage.usage_lib:UsageContext",
    "vllm.utils.argparse_utils:FlexibleArgumentParser", "vllm.utils.network_utils:get_open_port",
    "vllm.utils:FlexibleArgumentParser", "vllm.utils:random_uuid",
    "vllm.v1.engine.async_llm:AsyncLLM", "vllm.v1.engine.llm_engine:LLMEngine",
    "vllm.v1.metrics.reader:Gauge",
)  # fmt: skip


@pytest.fixture(scope="module")
def llm(text_checkpoint):
    neutral = {"swap_space": 4, "enable_lora": False, "tokenizer_mode": "auto", "max_lora_rank": 16}
    own = {"max_num_seqs": 8, "max_model_len": 512, "disable_log_stats": False}
    return LLM(text_checkpoint, **own, **neutral)


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def tokens_of(output):
    return output.outputs[0].token_ids


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_where_upstream_has_it(name):
    module, _, attribute = name.partition(":")
    assert getattr(import_module(module), attribute) is not None


def test_aliases_are_the_code_that_runs():
    assert import_module("vllm.v1.engine.llm_engine").LLMEngine is LLMEngine
    assert vllm.AsyncLLMEngine is import_module("vllm.engine.async_llm").AsyncLLM


def test_the_version_is_upstreams_with_our_own_as_its_local_part():
    from packaging.version import Version

    version = Version(vllm.__version__)
    assert version.release == vllm.__version_tuple__[:3] == (0, 33, 0)
    assert version.local == vllm.__version_tuple__[3]


def test_sampling_params_take_positions_none_and_copies():
    params = SamplingParams(3, 0.5, temperature=0.7, seed=4, stop=["a"], logprobs=-1)
    assert (params.n, params.presence_penalty) == (3, 0.5)
    copy = params.clone()
    copy.stop.append("b")
    assert params.stop == ["a"] and copy != params
    assert params.sampling_type == SamplingType.RANDOM_SEED
    assert SamplingParams.from_optional(n=None, top_p=None, max_tokens=7).max_tokens == 7
    with pytest.raises(RequestError, match="did you mean max_tokens"):
        SamplingParams.from_optional(max_token=7)


def test_all_log_probabilities_sum_to_one(llm):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    output = llm.generate("the quick", params, use_tqdm=False)[0]
    vocabulary = llm.model_config.vocab_size
    for place in (output.outputs[0].logprobs[0], output.prompt_logprobs[1]):
        assert len(place) == vocabulary
        assert sum(math.exp(one.logprob) for one in place.values()) == pytest.approx(1, abs=1e-4)


def test_an_argument_that_would_change_answers_is_refused_and_an_unknown_one_too(text_checkpoint):
    with pytest.raises(ConfigError, match=r"enable_lora.*Use instead"):
        LLM(text_checkpoint, enable_lora=True)
    with pytest.raises(ConfigError, match="unknown engine argument 'swap_spac'"):
        LLM(text_checkpoint, swap_spac=4)


def test_outputs_tell_the_times_of_their_request(llm):
    times = llm.generate("the quick", GREEDY, use_tqdm=False)[0].metrics
    moments = (times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts)
    assert sorted(moments) == [*moments] and times.num_generation_tokens == 6
    assert times.first_token_latency > 0 and times.arrival_time > 1e9


def test_requests_can_be_queued_and_waited_for(llm):
    prompts = ["the quick", TokensPrompt(prompt_token_ids=[5, 6, 7], prompt="x")]
    ids = llm.enqueue(prompts, GREEDY)
    among = llm.generate("lazy dog", GREEDY, use_tqdm=False)  # runs them too
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids and len(among) == 1
    alone = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert list(map(tokens_of, outputs)) == list(map(tokens_of, alone))
    assert not llm.llm_engine.finished and llm.wait_for_completion(use_tqdm=False) == []


def test_metrics_count_what_was_generated(llm):
    def counted():
        return {metric.name: metric for metric in llm.get_metrics()}

    before = counted()["vllm:generation_tokens"].value
    llm.generate(["the", "quick"], GREEDY, use_tqdm=False)
    after = counted()
    assert after["vllm:generation_tokens"] == Counter(
        "vllm:generation_tokens",
        {"model_name": llm.model_config.served_model_name[0], "engine": "0"},
        before + 12,
    )
    assert isinstance(after["vllm:time_to_first_token_seconds"], Histogram)
    assert after["vllm:num_requests_running"].value == 0


def test_a_forgotten_prefix_is_computed_again(llm):
    prompt = TokensPrompt(prompt_token_ids=list(range(3, 43)))
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 32
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_an_engine_that_slept_answers_as_before(llm):
    before = tokens_of(llm.generate("the quick", GREEDY, use_tqdm=False)[0])
    llm.enqueue("the quick", GREEDY)
    with pytest.raises(RequestError, match="while it has requests"):
        llm.sleep()
    llm.wait_for_completion(use_tqdm=False)
    llm.sleep(level=2)
    assert not hasattr(llm.llm_engine.core, "executor")
    with pytest.raises(RequestError, match="sleeps"):
        llm.generate("the quick", GREEDY, use_tqdm=False)
    llm.wake_up()
    assert tokens_of(llm.generate("the quick", GREEDY, use_tqdm=False)[0]) == before


def test_a_function_sees_the_model_and_its_rank(llm):
    count = llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))
    assert count[0] > 1000
    assert llm.collective_rpc("kernels") == [llm.llm_engine.core.executor.kernels()]
    assert llm.collective_rpc(lambda rank, k: rank.num_blocks * k, args=(2,)) == [
        2 * llm.llm_engine.core.executor.num_blocks
    ]
    with pytest.raises(ConfigError, match="did you mean kernels"):
        llm.collective_rpc("kernel")


def test_a_profile_is_a_file_with_the_steps(llm, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="VLLM_TORCH_PROFILER_DIR"):
        llm.start_profile()
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    llm.start_profile()
    llm.generate("the", SamplingParams(max_tokens=2), use_tqdm=False)
    llm.stop_profile()
    (trace,) = (tmp_path / "traces").glob("trace-*.json.gz")
    assert trace.stat().st_size > 1000


@pytest.mark.parametrize("name", ["embed", "score", "classify", "reward"])
def test_a_model_of_text_refuses_to_pool(llm, name):
    with pytest.raises(RequestError, match="not a pooling model"):
        getattr(llm, name)(["the"])


def test_an_adapter_is_refused(llm):
    with pytest.raises(RequestError, match="adapters are not supported"):
        llm.generate("the", GREEDY, lora_request=LoRARequest("mine", 1, "/path"))


def test_tools_and_earlier_calls_reach_the_template(llm):
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %}{% endfor %}"
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "fox", "arguments": '{"x": "dog"}'}}
    messages = [
        {"role": "user", "content": "jumps"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "lazy", "parameters": {}}}]
    output = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template, tools=tools)[0]
    wanted = "user jumpsassistant fox(dog)[lazy]"
    assert output.prompt_token_ids == llm.get_tokenizer()(wanted).input_ids
    call["function"]["arguments"] = "[1"
    with pytest.raises(RequestError, match="JSON object"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_an_engine_can_be_driven_by_hand(text_checkpoint):
    engine = LLMEngine.from_engine_args(EngineArgs(model=text_checkpoint, max_model_len=128))
    engine.add_request("mine", "the quick", GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished and len(tokens_of(outputs[-1])) == 6
    assert engine.get_num_unfinished_requests() == 0


def test_a_parser_of_scripts_has_every_engine_argument():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", "m", "--max_model_len", "64", "--enable-log-requests"]
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
    assert (args.model, args.max_model_len, args.enable_log_requests) == ("m", 64, True)


def test_the_registry_knows_what_is_served_and_refuses_other_engines_classes():
    assert "LlamaForCausalLM" in ModelRegistry.get_supported_archs()
    with pytest.raises(ConfigError, match="it takes an Architecture"):
        ModelRegistry.register_model("Mine", torch.nn.Module)


def brute_force(logprobs_after, params, eos):
    """Every sequence of a vocabulary of 4 with its score, the best first."""
    found = []
    for length in range(1, params.max_tokens + 1):
        for tokens in itertools.product(range(4), repeat=length):
            ends = tokens[-1] == eos
            if eos in tokens[:-1] or not (ends or length == params.max_tokens):
                continue
            total = sum(logprobs_after(tokens[:i])[tokens[i]] for i in range(length))
            size = max(length - ends, 1)
            found.append((total / size**params.length_penalty, list(tokens[: length - ends])))
    return sorted(found, key=lambda one: -one[0])


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_a_wide_beam_search_finds_the_best_sequences_there_are(penalty):
    generator = torch.Generator().manual_seed(7)
    table = {
        prefix: torch.log_softmax(2 * torch.randn(4, generator=generator), -1).tolist()
        for length in range(4)
        for prefix in itertools.product(range(4), repeat=length)
    }
    params = BeamSearchParams(beam_width=40, max_tokens=4, length_penalty=penalty)
    search = BeamSearch([9], params, eos_ids={3})
    while search.live:
        search.advance([
            {t: Logprob(lp) for t, lp in enumerate(table[tuple(beam.tokens[1:])])}
            for beam in search.live
        ])  # fmt: skip
    wanted = brute_force(table.__getitem__, params, 3)
    found = [beam.tokens[1:] for beam in search.best().sequences]
    assert found[:5] == [tokens for _, tokens in wanted[:5]]


def test_beams_have_the_log_probabilities_of_the_model(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    prompts = ["the quick brown", {"prompt_token_ids": [5, 6, 7]}]
    outputs = llm.beam_search(prompts, params)
    assert [len(output.sequences) for output in outputs] == [3, 3]
    for prompt, output in zip(prompts, outputs):
        num_prompt = len(llm.llm_engine.inputs.process("", prompt, GREEDY).prompt_token_ids)
        sums = [beam.cum_logprob for beam in output.sequences]
        assert sums == sorted(sums, reverse=True) and len(set(sums)) == 3
        for beam in output.sequences:
            scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
            given = {"prompt_token_ids": beam.tokens}
            places = llm.generate(given, scoring, use_tqdm=False)[0].prompt_logprobs
            own = [places[i][beam.tokens[i]].logprob for i in range(num_prompt, num_prompt + 5)]
            assert beam.cum_logprob == pytest.approx(sum(own), abs=1e-4)
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)
            assert len(beam.logprobs) == 5 and beam.finish_reason == "length"


def test_one_beam_is_the_greedy_text_and_no_context_is_too_long_for_it(llm):
    beam = llm.beam_search("the quick", BeamSearchParams(beam_width=1, max_tokens=6,
                           ignore_eos=True))[0].sequences[0]  # fmt: skip
    greedy = llm.generate("the quick", GREEDY, use_tqdm=False)[0]
    assert beam.tokens == greedy.prompt_token_ids + tokens_of(greedy)
    with pytest.raises(RequestError, match="exceed the context"):
        llm.beam_search("the quick", BeamSearchParams(beam_width=2, max_tokens=600))
    with pytest.raises(RequestError, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=4)
