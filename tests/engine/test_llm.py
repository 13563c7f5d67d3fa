"""`LLM`: what users of the Python interface see."""

import numpy as np
import pytest
import torch
from tiny_models import make_tokenizer

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError, RequestError
from vllm.sampling_params import StructuredOutputsParams


@pytest.fixture(scope="module")
def llm(text_checkpoint):
    return LLM(text_checkpoint, max_num_seqs=8, max_model_len=512)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    assert not llm.llm_engine.core.has_work and not llm.llm_engine.has_unfinished
    llm.llm_engine.core.check_idle()


def one(llm, prompt="the quick brown", **params):
    params = {"temperature": 0, "max_tokens": 12} | params
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["the", "quick brown fox", "lazy dog jumps over"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    tokenizer = make_tokenizer()
    assert [output.prompt_token_ids for output in outputs] == [
        tokenizer(prompt).input_ids for prompt in prompts
    ]


def test_text_is_the_decoding_of_the_tokens(llm):
    output = one(llm, max_tokens=40, ignore_eos=True).outputs[0]
    assert output.text == llm.get_tokenizer().decode(output.token_ids, skip_special_tokens=True)
    assert len(output.token_ids) == 40 and output.finish_reason == "length"


def test_the_same_seed_gives_the_same_text_whatever_else_is_in_the_batch(llm):
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=30, ignore_eos=True)
    alone = llm.generate("the quick", params, use_tqdm=False)[0].outputs[0].token_ids
    noise = [
        SamplingParams(temperature=1.3, max_tokens=n, ignore_eos=True) for n in (3, 9, 27, 40, 5, 8)
    ]
    for position in (0, 3, 6):
        prompts = [f"lazy dog {i}" * (i + 1) for i in range(6)]
        settings = list(noise)
        prompts.insert(position, "the quick")
        settings.insert(position, params)
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        assert outputs[position].outputs[0].token_ids == alone


def test_without_a_seed_texts_differ(llm):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    texts = {llm.generate("x", params, use_tqdm=False)[0].outputs[0].text for _ in range(4)}
    assert len(texts) > 1


def test_n_choices_differ_are_numbered_and_repeat_with_the_seed(llm):
    first = one(llm, n=4, temperature=1.0, seed=5)
    again = one(llm, n=4, temperature=1.0, seed=5)
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    texts = [choice.token_ids for choice in first.outputs]
    assert len(set(map(tuple, texts))) == 4
    assert texts == [choice.token_ids for choice in again.outputs]


def test_a_stop_text_that_spans_tokens_ends_the_output_before_it(llm):
    full = one(llm, max_tokens=40, ignore_eos=True).outputs[0].text
    stop = full[11:16]
    output = one(llm, max_tokens=40, ignore_eos=True, stop=[stop]).outputs[0]
    assert output.text == full[: full.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    kept = one(llm, max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert kept.outputs[0].text == full[: full.index(stop)] + stop


def test_a_stop_token_ends_the_output_and_shows_in_the_tokens_only(llm):
    full = one(llm, ignore_eos=True).outputs[0].token_ids
    stop = full[4]
    output = one(llm, ignore_eos=True, stop_token_ids=[stop]).outputs[0]
    first = full.index(stop)
    assert output.token_ids == full[: first + 1]
    assert output.text == llm.get_tokenizer().decode(full[:first])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_min_tokens_holds_back_the_end(llm):
    eos = llm.get_tokenizer().eos_token_id
    bias = {"logit_bias": {eos: 100.0}}
    ended = one(llm, **bias).outputs[0]
    assert ended.token_ids == [eos] and ended.text == "" and ended.stop_reason is None
    held = one(llm, min_tokens=5, **bias).outputs[0]
    assert len(held.token_ids) == 6 and held.token_ids[-1] == eos
    ignored = one(llm, ignore_eos=True, **bias).outputs[0]
    assert ignored.token_ids == [eos] * 12 and ignored.finish_reason == "length"


def test_logprobs_hold_the_token_taken_and_the_likeliest(llm):
    output = one(llm, logprobs=2, max_tokens=5, ignore_eos=True).outputs[0]
    assert len(output.logprobs) == 5
    for token, entry in zip(output.token_ids, output.logprobs):
        assert entry[token].rank == 1 and len(entry) == 2
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token])
    total = sum(entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs))
    assert output.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_equal_the_logprobs_of_generating_the_same_tokens(llm):
    generated = one(llm, max_tokens=8, ignore_eos=True, logprobs=0)
    tokens = generated.prompt_token_ids + generated.outputs[0].token_ids
    scored = one(llm, {"prompt_token_ids": tokens}, max_tokens=0, prompt_logprobs=0)
    assert scored.outputs[0].token_ids == [] and scored.prompt_logprobs[0] is None
    ours = [entry[token].logprob for entry, token in zip(scored.prompt_logprobs[-8:], tokens[-8:])]
    theirs = [
        entry[token].logprob
        for entry, token in zip(generated.outputs[0].logprobs, generated.outputs[0].token_ids)
    ]
    assert ours == theirs


def test_min_tokens_alone_holds_back_a_stop_token(llm):
    first = one(llm, ignore_eos=True).outputs[0].token_ids[0]
    assert one(llm, stop_token_ids=[first]).outputs[0].finish_reason == "stop"
    held = one(llm, stop_token_ids=[first], min_tokens=4).outputs[0]
    assert len(held.token_ids) >= 4 and first not in held.token_ids[:4]


def test_penalties_prevent_repetition(llm):
    plain = one(llm, max_tokens=60, ignore_eos=True).outputs[0].token_ids
    penalised = one(
        llm, max_tokens=60, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0
    )
    assert len(set(penalised.outputs[0].token_ids)) > len(set(plain))


def test_chat_applies_the_models_template(llm):
    output = llm.chat(
        [{"role": "user", "content": "fox"}],
        SamplingParams(temperature=0, max_tokens=2),
        use_tqdm=False,
    )[0]
    text = llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|user|>fox<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("structured", "matches"),
    [
        ({"regex": r"[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"choice": ["red", 'gre"en', "b\\lue"]}, r'red|gre"en|b\\lue'),
        ({"grammar": 'root ::= "x" [yz] "!"'}, r"x[yz]!"),
        ({"choice": ["日本", "\U0001f600", "a\nb\u2028"]}, "日本|\U0001f600|a\nb\u2028"),
        ({"json": {"enum": ["\U0001f600"]}}, '"\U0001f600"'),
        ({"json": {"type": "boolean", "x-limit": 10**30}}, "true|false"),
    ],
)
def test_structured_output_matches_its_grammar(llm, structured, matches):
    import re

    for seed in range(3):
        output = one(
            llm,
            temperature=1.0,
            seed=seed,
            max_tokens=40,
            structured_outputs=StructuredOutputsParams(**structured),
        ).outputs[0]
        assert re.fullmatch(matches, output.text), output.text
        assert output.finish_reason == "stop"


def test_a_json_schema_gives_json_of_that_schema(llm):
    import json

    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    plain = one(llm, ignore_eos=True).outputs[0].token_ids
    prompts = ["the quick brown", "the quick brown"]
    params = [
        SamplingParams(
            temperature=0, max_tokens=200, structured_outputs=StructuredOutputsParams(json=schema)
        ),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    value = json.loads(outputs[0].outputs[0].text)
    assert set(value) == {"ok", "kind"} and value["kind"] in ("a", "b")
    assert outputs[1].outputs[0].token_ids == plain, "a grammar must not touch its neighbours"


@pytest.mark.parametrize(
    "structured",
    [
        {"json": {"type": "no such type"}},
        {"json": "{not json"},
        {"regex": "(unclosed"},
        {"choice": []},
        {"grammar": "root ::= undefined_rule"},
        {"json": {"type": "integer", "minimum": 5, "maximum": 1}},
        {"json": {"type": "integer", "minimum": 10**30}},
        {"json": {"type": object}},
        {"json": False},
    ],
)
def test_an_impossible_grammar_is_refused(llm, structured):
    with pytest.raises(RequestError) as refused:
        one(llm, structured_outputs=StructuredOutputsParams(**structured))
    assert "project/cpp" not in str(refused.value)


def test_json_object_gives_an_object_and_no_other_value(llm):
    for seed in range(3):
        asked = StructuredOutputsParams(json_object=True)
        text = one(llm, temperature=1.0, seed=seed, structured_outputs=asked).outputs[0].text
        assert text.startswith("{")


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ("", {}, "empty"),
        ({"prompt_token_ids": []}, {}, "empty"),
        ({"prompt_token_ids": [1, 10**6]}, {}, "token id 1000000"),
        ({"prompt_token_ids": [1, -1]}, {}, "token id -1"),
        ({"prompt_token_ids": [1, "2"]}, {}, "token id '2'"),
        ({"prompt_token_ids": [1, True]}, {}, "token id True"),
        ({"prompt_token_ids": [1, 2.0]}, {}, "token id 2.0"),
        ({"prompt_token_ids": [1, 2**70]}, {}, "token id 1180591620717411303424"),
        ({"text": "x"}, {}, "prompt or prompt_token_ids"),
        (5.5, {}, "text or a list"),
        ({"prompt_token_ids": [3] * 513}, {}, "at most 512"),
        ({"prompt_token_ids": [3] * 512}, {"max_tokens": None}, "no room"),
        ("x", {"max_tokens": 10**6}, "at most"),
        ("x", {"logit_bias": {10**6: 1.0}}, "logit_bias names token id 1000000"),
        ("x", {"logit_bias": {3: 1e9}}, "-100 to 100"),
        ("x", {"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_a_malformed_request_is_refused_with_the_reason(llm, prompt, params, says):
    with pytest.raises(RequestError, match=says):
        llm.generate(prompt, SamplingParams(**params), use_tqdm=False)


def test_one_malformed_prompt_of_several_starts_nothing(llm):
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["good", ""], SamplingParams(), use_tqdm=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 10**6),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", 17),
        ("seed", "7"),
        ("seed", 2**70),
        ("logprobs", 10**4),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["x"] * 65),
    ],
)
def test_sampling_params_out_of_range_name_the_field(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_an_unknown_engine_argument_is_refused_with_a_suggestion(text_checkpoint):
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        LLM(text_checkpoint, max_num_seq=3)


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("max_model_len", "x", "a whole number"),
        ("max_num_seqs", True, "a whole number"),
        ("seed", 1.5, "a whole number"),
        ("gpu_memory_utilization", "0.9", "a number"),
        ("hf_overrides", "x", "a dict"),
        ("enforce_eager", "no", "True or False"),
        ("quantization", 8, "a text"),
        ("kernel", [3], "a text or a list of texts"),
        ("served_model_name", {"a": 1}, "a text or a list of texts"),
        ("dump_decisions", 3, "a path"),
        ("tokenizer", "", "is empty: leave it out"),
        ("model", None, "a text"),
    ],
)
def test_an_engine_argument_of_another_type_is_refused_by_name(
    text_checkpoint, argument, value, says
):
    with pytest.raises(ConfigError, match=f"{argument}.*{says}"):
        LLM(**{"model": text_checkpoint, argument: value})


def test_engine_arguments_may_be_numbers_of_numpy_types_of_torch_paths_and_none(text_checkpoint):
    args = EngineArgs.from_keywords(
        model=text_checkpoint, max_num_seqs=np.int64(3), gpu_memory_utilization=1,
        dtype=torch.bfloat16, seed=None,
    )  # fmt: skip
    taken = (args.model, args.max_num_seqs, args.gpu_memory_utilization, args.dtype, args.seed)
    assert taken == (str(text_checkpoint), 3, 1.0, "bfloat16", 0)
    assert type(args.max_num_seqs) is int


def test_a_grammar_that_is_complete_ends_a_request_even_before_min_tokens(llm):
    grammar = StructuredOutputsParams(regex="[a-c]{3}")
    output = one(llm, max_tokens=20, min_tokens=15, structured_outputs=grammar).outputs[0]
    assert len(output.text) == 3 and set(output.text) <= set("abc")
    assert output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (b"abc", "not bytes"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids takes token ids, not 'abc'"),
        ("\ud800", "no valid Unicode"),
        ([[1.5]], "token id 1.5"),
        ({"prompt": "abc", "multi_modal_data": {"image": 1}}, "not .*multi_modal_data"),
    ],
)
def test_a_prompt_of_another_kind_is_refused(llm, prompt, says):
    with pytest.raises(RequestError, match=says):
        one(llm, prompt)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"stop": 5}, "stop must be a text or a list of texts, not 5"),
        ({"stop": "a", "detokenize": False}, "stop texts need detokenize"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, not 5"),
        ({"stop_token_ids": [7, True]}, r"must be a list of token ids, not \[7, True\]"),
        ({"stop_token_ids": ["7"]}, r"must be a list of token ids, not \['7'\]"),
        ({"n": None}, "n must be an integer, not None"),
        ({"n": True}, "n must be an integer, not True"),
        ({"top_k": None}, "top_k must be an integer, not None"),
        ({"min_tokens": None}, "min_tokens must be an integer, not None"),
        ({"temperature": None}, "temperature must be a number, not None"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"max_tokens": "5"}, "max_tokens must be an integer or None, not '5'"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False, not 1"),
        ({"logit_bias": [1]}, "numbers by token id"),
        ({"logit_bias": {5: "x"}}, "numbers by token id"),
        ({"logit_bias": {True: 1.0}}, "numbers by token id"),
        ({"logit_bias": {5: True}}, "numbers by token id"),
        ({"structured_outputs": {"regex": "a"}}, "must be a StructuredOutputsParams"),
    ],
)
def test_sampling_params_of_another_kind_are_refused(params, says):
    with pytest.raises(RequestError, match=says):
        SamplingParams(**params)


@pytest.mark.parametrize("field", ["max_tokens", "seed", "logprobs", "prompt_logprobs"])
def test_what_may_be_left_out_may_be_none(field):
    assert getattr(SamplingParams(**{field: None}), field) is None


def test_stop_token_ids_may_come_as_a_set():
    assert SamplingParams(stop_token_ids={7}).stop_token_ids == [7]


def test_stop_texts_may_come_as_a_tuple():
    assert SamplingParams(stop=("a", "b")).stop_strings == ["a", "b"]


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", [None]])
def test_sampling_params_that_are_none_are_refused(llm, params):
    with pytest.raises(RequestError, match="takes a SamplingParams"):
        llm.generate("the", params, use_tqdm=False)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        {"role": "user", "content": "x"},
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [[]],
        [5],
        None,
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
def test_a_chat_that_is_none_is_refused(llm, messages):
    with pytest.raises(RequestError, match="message"):
        llm.chat(messages, use_tqdm=False)


def test_parts_of_a_message_are_one_text(llm):
    parts = [{"type": "text", "text": "fox"}, {"type": "text", "text": "dog"}]
    params = SamplingParams(temperature=0, max_tokens=2)
    prompts = [
        llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)[0].prompt_token_ids
        for content in (parts, "fox\ndog")
    ]
    assert prompts[0] == prompts[1]


def test_an_aborted_request_leaves_no_grammar_to_wait_for(llm):
    engine = llm.llm_engine
    asked = StructuredOutputsParams(regex="a+")
    engine.add_request("gone", "ban", SamplingParams(structured_outputs=asked))
    engine.abort("gone")
    assert not engine.core.has_work


def test_counts_are_of_what_came_since_they_were_told(llm):
    core = llm.llm_engine.core
    core.stats()
    one(llm, {"prompt_token_ids": [5, 6, 7]})
    assert [core.stats().prefix_cache_queries for _ in range(2)] == [3, 0]


def test_torch_has_its_threads_again_after_a_step(llm):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        one(llm)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_ranks_are_those_of_the_likeliest(llm):
    output = one(llm, logprobs=3, max_tokens=5, ignore_eos=True, temperature=1.0, seed=1).outputs[0]
    for entry in output.logprobs:
        by_rank = sorted(entry.values(), key=lambda logprob: -logprob.logprob)
        assert [logprob.rank for logprob in by_rank[:3]] == [1, 2, 3]


def test_a_stop_token_is_part_of_the_text_where_asked(llm):
    full = one(llm, ignore_eos=True).outputs[0].token_ids
    options = {"stop_token_ids": [full[4]], "include_stop_str_in_output": True}
    output = one(llm, ignore_eos=True, **options).outputs[0]
    assert output.text == llm.get_tokenizer().decode(full[: full.index(full[4]) + 1])
