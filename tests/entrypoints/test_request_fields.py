"""Fields of requests that are obeyed, left out with a warning, or refused: over HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .serving import RunningServer, started_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "ban fick"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def warning(server: RunningServer, path: str = TEXT, **fields: Any) -> str:
    own = {"messages": [USER]} if path == CHAT else {"prompt": "ban"}
    answer = server.post(path, {"max_tokens": 2, "temperature": 0, **own, **fields})
    assert answer.status == 200, answer.body
    return answer.headers.get("warning", "")


def text_of(server: RunningServer, token: int) -> str:
    return str(server.post("/detokenize", {"tokens": [token]}).json["prompt"])


def test_fields_without_effect_are_named_in_a_header_and_counted(server: RunningServer) -> None:
    assert warning(server) == ""
    before = server.metric("vllm:ignored_request_fields_total")
    told = warning(server, user="x", guided_decoding_backend="auto", max_token=9, stream=True)
    assert told == (
        '299 vllm "user has no effect here: it says nothing about the text", '
        '299 vllm "guided_decoding_backend has no effect here: xgrammar holds every grammar", '
        '299 vllm "unknown field max_token; did you mean max_tokens? is ignored"'
    )
    assert server.metric("vllm:ignored_request_fields_total") == before + 3
    metrics = server.get("/metrics").body.decode()
    assert 'vllm:ignored_request_fields_total{field="user"}' in metrics
    assert 'max_token"' not in metrics  # clients choose the names of unknown fields


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [("kv_transfer_params", {"do_remote_decode": True}), ("vllm_xargs", {"a": 1}),
     ("ec_transfer_params", {"a": 1})],
)  # fmt: skip
def test_fields_that_would_change_the_answer_are_refused_by_name(
    server: RunningServer, path: str, field: str, value: Any
) -> None:
    body = {"prompt": "ban", "messages": [USER], "max_tokens": 2, field: value}
    answer = server.post(path, body)
    assert answer.status == 400
    assert answer.json["error"]["param"] == field
    assert answer.error.startswith(f"{field} is not supported: ")


def test_tools_that_the_template_does_not_know_get_a_plain_answer_with_a_warning(
    server: RunningServer,
) -> None:
    plain = server.chat()
    answer = server.post(CHAT, {"messages": [USER], "max_tokens": 8, "temperature": 0,
                                "tools": [TOOL]})  # fmt: skip
    assert answer.status == 200
    assert answer.json["choices"] == plain["choices"]
    assert "chat template does not tell the model of the tools" in answer.headers["warning"]
    events = server.events(CHAT, messages=[USER], max_tokens=8, tools=[TOOL])
    texts = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(texts) == plain["choices"][0]["message"]["content"]
    assert b"the chat template does not tell the model of tools" in server.log.read_bytes()
    forced = server.post(CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "required"})
    assert forced.status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "ban fick", "max_output_tokens": 16,
                           "tools": [{"type": "function", "name": "now", "parameters": {}}]}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 8, "model": "tiny",
                          "tools": [{"name": "now", "input_schema": {"type": "object"}}]}),
    ],
)  # fmt: skip
def test_what_chat_warns_of_is_told_by_the_other_apis_too(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    assert "chat template does not tell the model of the tools" in answer.headers["warning"]


def test_allowed_tokens_and_bad_words_hold_the_answer(server: RunningServer) -> None:
    fields = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    allowed = server.complete(**fields, allowed_token_ids=[40, 41])["choices"][0]
    assert set(allowed["token_ids"]) <= {40, 41}
    free = server.complete(**fields)["choices"][0]
    token, word = next(
        (token, text)
        for token in free["token_ids"]
        if server.post("/tokenize", {"prompt": (text := text_of(server, token))}).json["tokens"]
        == [token]
    )
    held = server.complete(**fields, bad_words=[word])["choices"][0]
    assert token not in held["token_ids"]


def test_a_prompt_is_cut_from_the_left(server: RunningServer) -> None:
    long = [5 + i % 200 for i in range(3000)]
    cut = server.complete(prompt=long, truncate_prompt_tokens=20, return_token_ids=True)
    assert cut["usage"]["prompt_tokens"] == 20
    assert cut["choices"][0]["prompt_token_ids"] == long[-20:]
    assert cut["choices"][0]["text"] == server.complete(prompt=long[-20:])["choices"][0]["text"]
    most = server.complete(prompt="ban " * 9000, truncate_prompt_tokens=-1, max_tokens=8)
    assert most["usage"]["total_tokens"] == 2048
    echoed = server.complete(prompt="ban fick dof", truncate_prompt_tokens=1, echo=True)
    assert not echoed["choices"][0]["text"].startswith("ban")
    chat = server.chat(truncate_prompt_tokens=5)
    assert chat["usage"]["prompt_tokens"] == 5


def test_a_salt_keeps_a_prefix_to_its_own_requests(server: RunningServer) -> None:
    prompt = [7 + i % 99 for i in range(200)]

    def cached(**fields: Any) -> int:
        usage = server.complete(prompt=prompt, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached() > 0


def test_the_body_may_name_the_request(server: RunningServer) -> None:
    body = {"prompt": "ban", "max_tokens": 1, "request_id": "mine-1"}
    answer = server.post(TEXT, body)
    assert (answer.json["id"], answer.headers["x-request-id"]) == ("cmpl-mine-1", "mine-1")
    answer = server.post(TEXT, body, **{"X-Request-Id": "theirs"})
    assert (answer.json["id"], answer.headers["x-request-id"]) == ("cmpl-theirs", "theirs")
    assert server.post(TEXT, {**body, "request_id": "a b\r\n"}).status == 400


def test_logprobs_name_tokens_by_id_and_those_asked_for(server: RunningServer) -> None:
    fields = {"logprobs": 1, "logprob_token_ids": [40], "return_tokens_as_token_ids": True}
    choice = server.complete(**fields, return_token_ids=True)["choices"][0]
    ids = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == ids
    assert all("token_id:40" in top for top in choice["logprobs"]["top_logprobs"])
    chat = server.chat(logprobs=True, top_logprobs=1, logprob_token_ids=[40])["choices"][0]
    for place in chat["logprobs"]["content"]:
        assert 1 <= len(place["top_logprobs"]) <= 2


def test_a_structural_tag_is_a_grammar(server: RunningServer) -> None:
    parts = [{"type": "const_string", "value": "<a>"}, {"type": "regex", "pattern": "[0-9]{3}"}]
    form = {"type": "sequence", "elements": parts}
    for fields in (
        {"structural_tag": {"type": "structural_tag", "format": form}},
        {"response_format": {"type": "structural_tag", "format": form}},
    ):
        text = server.chat(**fields, max_tokens=40)["choices"][0]["message"]["content"]
        assert text[:3] == "<a>"
        assert text[3:].isdigit()


def test_a_priority_needs_the_policy(server: RunningServer) -> None:
    answer = server.post(TEXT, {"prompt": "ban", "priority": 3})
    assert answer.status == 400
    assert "--scheduling-policy priority" in answer.error
    assert server.complete(priority=0)["choices"]


@pytest.fixture(scope="module")
def strict(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("strict") / "log"
    template = "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    flags = ("--strict-requests", "--scheduling-policy", "priority", "--chat-template", template)
    with started_server(tiny_model, log, *flags) as running:
        yield running


@pytest.mark.slow
def test_a_strict_server_refuses_what_it_would_leave_out(strict: RunningServer) -> None:
    for field in ("user", "nobodys"):
        answer = strict.post(TEXT, {"prompt": "ban", field: "x"})
        assert answer.status == 400
        assert field in answer.error
    assert strict.complete(priority=-3)["choices"]


@pytest.mark.slow
def test_documents_reach_the_template(strict: RunningServer) -> None:
    fields = {"messages": [USER], "documents": [{"title": "a", "text": "mick "}]}
    tokens = strict.post("/tokenize", fields).json["tokens"]
    assert strict.post("/detokenize", {"tokens": tokens}).json["prompt"] == "mick ban fick"
    assert strict.chat(documents=fields["documents"])["usage"]["prompt_tokens"] == len(tokens)
