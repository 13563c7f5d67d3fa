"""A multimodal Qwen3.5 checkpoint, served over HTTP as the text model in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import build_model, make_tokenizer

from .serving import RunningServer, started_server

USER = {"role": "user", "content": "the quick brown fox"}


@pytest.fixture(scope="module")
def hybrid_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("hybrid")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    build_model("qwen3_5_moe-multimodal", vocab_size=len(tokenizer)).save_pretrained(folder)
    with started_server(folder, tmp_path_factory.mktemp("log") / "log") as running:
        yield running


def test_text_is_completed_alike_at_once_and_as_a_stream(hybrid_server: RunningServer) -> None:
    fields = {"messages": [USER], "max_tokens": 12, "ignore_eos": True}
    whole = hybrid_server.chat(**fields)
    events = hybrid_server.events("/v1/chat/completions", **fields)
    pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
    assert whole["usage"]["completion_tokens"] == 12
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


def test_images_are_refused_by_name(hybrid_server: RunningServer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]}]
    answer = hybrid_server.post("/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert answer.status == 400
    assert "'image_url' is not supported" in answer.error
    assert hybrid_server.chat()["usage"]["completion_tokens"] == 8
