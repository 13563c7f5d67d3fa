"""What a request may say, and what is answered when it says something else."""

import re
from copy import deepcopy
from typing import Any

import pytest

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.field_policy import (
    IGNORED_FIELDS,
    REFUSED_FIELDS,
    read_request,
    validated,
    warning_header,
)
from vllm.entrypoints.openai.protocol import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from vllm.errors import RequestError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionRequest:
    return validated(CompletionRequest, {"prompt": "a", **fields})


def chat(**fields: Any) -> ChatCompletionRequest:
    return validated(ChatCompletionRequest, {"messages": [USER], **fields})


def refusal(make: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", 'temperature should be a valid number, not "hot"'),
        ({"max_tokens": "16"}, "max_tokens", 'max_tokens should be a valid integer, not "16"'),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens should be a valid integer, not 1.5"),
        ({"n": True}, "n", "n should be a valid integer, not true"),
        ({"stream": 1}, "stream", "stream should be a valid boolean, not 1"),
        ({"stop": 5}, "stop", "stop takes a text or a list of texts, not 5"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "logit_bias.5 should be a valid number"),
        ({"max_token": 3, "n": "1"}, "n", "n should be a valid integer"),
    ],
)
def test_a_wrong_field_is_named_with_what_it_takes_and_what_was_given(
    fields: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(completion, **fields)
    assert error.param == param
    assert error.message.startswith(message)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError, match="messages is missing"):
        validated(ChatCompletionRequest, {})


def test_every_wrong_field_is_reported_up_to_a_limit() -> None:
    error = refusal(completion, n="1", seed="2")
    assert "n should be" in error.message
    assert "seed should be" in error.message
    names = ("n", "seed", "top_p", "top_k", "min_p", "max_tokens", "min_tokens")
    many = refusal(completion, **dict.fromkeys(names, "x"))
    assert many.message.endswith("and 2 more")


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(refusal(completion, temperature="x" * 10_000).message) < 200


def test_fields_without_effect_are_left_out_and_named_with_the_reason() -> None:
    fields = dict.fromkeys(IGNORED_FIELDS, "anything")
    for kind, own in ((CompletionRequest, {"prompt": "a"}),
                      (ChatCompletionRequest, {"messages": [USER]})):  # fmt: skip
        body, left_out = read_request(kind, {**own, **fields})
        assert body == validated(kind, own)
        assert [*left_out] == [*fields]
        assert all(IGNORED_FIELDS[name] in text for name, text in left_out.items())


@pytest.mark.parametrize(
    ("fields", "name", "text"),
    [
        ({"max_token": 3}, "max_token", "unknown field max_token; did you mean max_tokens?"),
        ({"xyz": 3}, "xyz", "unknown field xyz"),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            "stream_options.include_usag",
            "unknown field stream_options.include_usag; did you mean include_usage?",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schma": {}}}},
            "response_format.json_schema.schma",
            "unknown field response_format.json_schema.schma; did you mean schema?",
        ),
    ],
)
def test_a_field_that_nobody_knows_is_left_out_and_refused_by_strict_servers(
    fields: dict[str, Any], name: str, text: str
) -> None:
    body, left_out = read_request(CompletionRequest, {"prompt": "a", **deepcopy(fields)})
    assert {*left_out} == {name}
    assert left_out[name].startswith(text)
    assert not body.model_extra
    with pytest.raises(ApiError, match=re.escape(text)):
        read_request(CompletionRequest, {"prompt": "a", **deepcopy(fields)}, is_strict=True)


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_a_field_that_would_change_the_answer_is_refused_by_name(name: str) -> None:
    for make in (completion, chat):
        error = refusal(make, **{name: "x"})
        assert error.param == name
        assert error.message.startswith(f"{name} is not supported: ")
        assert make(**{name: None}) == make()
        assert make(**{name: False}) == make()


def test_a_strict_server_refuses_fields_without_effect() -> None:
    with pytest.raises(ApiError, match=r"user has no effect here.*leave it out") as caught:
        read_request(CompletionRequest, {"prompt": "a", "user": "x"}, is_strict=True)
    assert caught.value.param == "user"


def test_a_warning_header_holds_any_name() -> None:
    header = warning_header(['a "b" \\ c\r\nX: 1 é', "x" * 10_000, *map(str, range(9))])
    assert header.isascii()
    assert header.isprintable()
    assert header.startswith('299 vllm "a \\"b\\" \\\\ c??X: 1 ?", 299 vllm "xxx')
    assert header.endswith('299 vllm "and 3 more"')
    assert len(header) < 1000


def test_a_prompt_is_cut_to_its_last_tokens() -> None:
    ids = [*range(10)]
    assert completion().truncated(ids, 12) == ids
    assert completion(truncate_prompt_tokens=3).truncated(ids, 12) == [7, 8, 9]
    assert completion(truncate_prompt_tokens=30).truncated(ids, 12) == ids
    assert completion(truncate_prompt_tokens=-1, max_tokens=4).truncated(ids, 12) == ids[2:]
    assert chat(truncate_prompt_tokens=-1).truncated(ids, 8) == ids[3:]
    with pytest.raises(RequestError, match="truncate_prompt_tokens 0 leaves no prompt"):
        completion(truncate_prompt_tokens=0).check()


def test_logprob_token_ids_need_logprobs() -> None:
    completion(logprobs=0, logprob_token_ids=[5]).check()
    chat(logprobs=True, logprob_token_ids=[5]).check()
    for request in (completion(logprob_token_ids=[5]), chat(logprob_token_ids=[5])):
        with pytest.raises(RequestError, match="logprob_token_ids needs logprobs"):
            request.check()


def test_both_shapes_of_a_structural_tag_become_one() -> None:
    schema = {"type": "object"}
    tag = {"begin": "<f>", "schema": schema, "end": "</f>"}
    older = {"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}
    content = {"type": "json_schema", "json_schema": schema}
    parts = [{"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}]
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": parts}
    whole = {"type": "structural_tag", "format": form}
    for fields in ({"response_format": older}, {"response_format": whole},
                   {"structural_tag": whole}):  # fmt: skip
        assert chat(**fields).asked_grammar() == {"structural_tag": whole}
    with pytest.raises(RequestError, match="needs format, or structures and triggers"):
        chat(response_format={"type": "structural_tag"}).asked_grammar()


def test_null_counts_as_not_given() -> None:
    names = [n for n in CompletionRequest.model_fields if n != "prompt"]
    assert completion(**dict.fromkeys(names)) == completion()
    names = [n for n in ChatCompletionRequest.model_fields if n != "messages"]
    assert chat(**dict.fromkeys(names)) == chat()


def test_null_in_a_field_that_is_not_known_or_within_another_counts_as_not_given() -> None:
    assert completion(nobodys=None, stream_options={"xyz": None}, stream=True) == completion(
        stream_options={}, stream=True
    )


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_prompts_come_in_four_kinds(given: Any, prompts: Any) -> None:
    assert completion(prompt=given).prompt == prompts


@pytest.mark.parametrize(
    "given",
    [None, 5, {}, [], [1, "a"], ["a", [1]], [[1], ["a"]], [1.0], [True], [-1], [2**31], [[2**70]],
     [[[1]]], ["a"] * (MAX_PROMPTS + 1)],
)  # fmt: skip
def test_other_kinds_of_prompts_are_refused(given: Any) -> None:
    assert refusal(completion, prompt=given).param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
    ],
)
def test_completions_refuse_what_no_field_alone_can_tell(fields: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields).check()
    assert caught.value.param == param


TOOL = {"type": "function", "function": {"name": "now"}}
OTHER = {"type": "function", "function": {"name": "then"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": OTHER}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_chat_refuses_what_no_field_alone_can_tell(fields: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields).check()
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]},
     {"tool_choice": "auto"}, {"modalities": ["text"]}, {"logprobs": True, "top_logprobs": 0},
     {"continue_final_message": True}],
)  # fmt: skip
def test_chat_accepts_tools_and_their_absence(fields: Any) -> None:
    chat(**fields).check()


def test_parts_of_type_text_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "one\ntwo"


def test_an_image_is_refused_by_name() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9999}}]
    error = refusal(chat, messages=[{"role": "user", "content": parts}])
    assert "'image_url' is not supported" in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "message",
    [{"role": "tool"}, {"role": "user"}, {"role": "user", "content": None},
     {"role": "user", "content": []}, {"role": "user", "content": 5}, {"content": "x"}, "x",
     {"role": "assistant", "content": "x", "tool_calls": [{}]},
     {"role": "assistant", "content": None, "tool_calls": []}],
)  # fmt: skip
def test_a_malformed_message_is_refused(message: Any) -> None:
    assert refusal(chat, messages=[message]).param == "messages"


def test_an_answer_can_be_sent_back_as_a_message() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None,
              "function_call": None, "audio": None, "annotations": None}  # fmt: skip
    assert chat(messages=[USER, answer, USER]).messages[1].for_template() == {
        "role": "assistant",
        "content": "x",
    }


def test_developer_messages_are_system_messages() -> None:
    message = chat(messages=[{"role": "developer", "content": "x"}]).messages[0]
    assert message.for_template()["role"] == "system"


def test_a_request_wins_over_the_models_defaults_and_those_over_openais() -> None:
    defaults = {"temperature": 0.7, "top_k": 40}
    params = completion(temperature=0.5).sampling_params(defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 40, 1.0)
    assert completion().sampling_params({}).temperature == 1.0


def test_defaults_for_the_number_of_tokens_are_openais() -> None:
    assert completion().sampling_params({}).max_tokens == 16
    assert chat().sampling_params({}).max_tokens is None
    assert chat(max_tokens=5).sampling_params({}).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).sampling_params({}).max_tokens == 7


def test_streams_ask_the_engine_for_deltas_and_answers_for_the_end() -> None:
    assert completion(stream=True).sampling_params({}).output_kind == RequestOutputKind.DELTA
    assert completion().sampling_params({}).output_kind == RequestOutputKind.FINAL_ONLY


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    assert completion(echo=True, logprobs=3).sampling_params({}).prompt_logprobs == 3
    assert completion(echo=True).sampling_params({}).prompt_logprobs is None
    params = completion(echo=True, logprobs=3, prompt_logprobs=5).sampling_params({})
    assert params.prompt_logprobs == 5


def test_chat_logprobs_are_a_switch_and_a_count() -> None:
    assert chat(logprobs=True, top_logprobs=4).sampling_params({}).logprobs == 4
    assert chat(logprobs=True).sampling_params({}).logprobs == 0
    assert chat().sampling_params({}).logprobs is None


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            StructuredOutputsParams(json=SCHEMA),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        ({"guided_json": SCHEMA}, StructuredOutputsParams(json=SCHEMA)),
        ({"guided_regex": "a+"}, StructuredOutputsParams(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputsParams(choice=["a", "b"])),
        ({"guided_grammar": "root ::= x"}, StructuredOutputsParams(grammar="root ::= x")),
    ],
)
def test_a_grammar_has_several_spellings(fields: Any, expected: Any) -> None:
    assert completion(**fields).sampling_params({}).structured_outputs == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    ],
)
def test_a_request_has_one_grammar(fields: Any) -> None:
    with pytest.raises(RequestError):
        completion(**fields).sampling_params({})


def test_logit_bias_has_token_ids_as_keys() -> None:
    assert completion(logit_bias={"5": 1}).sampling_params({}).logit_bias == {5: 1.0}
    for key in ("a", "-1", "1.0", "", "٣", "9" * 5000):
        with pytest.raises(RequestError, match="logit_bias takes token ids"):
            completion(logit_bias={key: 1}).sampling_params({})


def test_tokens_to_detokenize_are_token_ids() -> None:
    for tokens in ([-1], ["a"], [2**40], "ab", [True]):
        with pytest.raises(ApiError):
            validated(DetokenizeRequest, {"tokens": tokens})
