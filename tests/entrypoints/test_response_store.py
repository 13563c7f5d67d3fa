"""Responses are kept within bounds, and nothing of those that are gone."""

import pytest

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.response_store import Json, ResponseStore


def _add(store: ResponseStore, name: str, turns: list[Json], text: str = "") -> list[Json]:
    """Stores a response to one more message; the conversation with its answer."""
    whole = [*turns, {"role": "user", "content": text}, {"role": "assistant", "content": name}]
    output = [{"id": f"msg_{name}", "type": "message"}]
    store.add(name, b"{}", [{"role": "user", "content": text}], output, whole)
    return whole


def _stored(store: ResponseStore, names: str) -> str:
    found = ""
    for name in names:
        try:
            store.previous(name)
            found += name
        except ApiError as error:
            assert error.status == 400
    return found


def test_what_was_used_last_is_kept() -> None:
    store = ResponseStore(max_responses=3)
    for name in "abc":
        _add(store, name, [])
    store.get("a")
    _add(store, "d", [])
    assert _stored(store, "abcd") == "acd"
    assert store.items(["msg_a", "msg_b"]) == {"msg_a": {"id": "msg_a", "type": "message"}}


def test_bytes_are_bounded_and_shared_turns_count_once() -> None:
    store = ResponseStore(max_bytes=100_000)
    turns: list[Json] = []
    for name in "abcdefgh":
        turns = _add(store, name, turns, "x" * 3000)
    # 3000 of the input items and 3000 of the turns for each: all of them fit.
    assert _stored(store, "abcdefgh") == "abcdefgh"
    assert 48_000 < store.num_bytes < 56_000
    store.delete("c")
    before = store.num_bytes
    assert store.previous("h")[4]["content"] == "x" * 3000
    _add(store, "i", [], "y" * 40_000)
    assert before < store.num_bytes <= 100_000
    _add(store, "j", [], "z" * 60_000)  # larger than the store
    assert _stored(store, "abcdefghij") == ""
    assert store.num_bytes == 0


def test_nothing_is_left_of_responses_that_are_deleted() -> None:
    store = ResponseStore()
    first = _add(store, "a", [], "x")
    _add(store, "b", first, "y")
    _add(store, "c", first, "z")
    for name in "acb":
        store.delete(name)
    assert store == ResponseStore()
    with pytest.raises(ApiError, match="is not stored"):
        store.delete("a")


def test_the_ids_of_items_that_a_client_sends_name_nothing() -> None:
    store = ResponseStore()
    store.add("a", b"{}", [{"id": "msg_x", "role": "user", "content": "x"}], [], [])
    assert store.items(["msg_x"]) == {}
