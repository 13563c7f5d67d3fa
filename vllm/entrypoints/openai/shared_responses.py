"""Responses that all API processes of a server remember: the process that started them has them."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from vllm.entrypoints.openai.response_store import (
    Json,
    Responses,
    ResponseStore,
    StoredResponse,
)


class SharedResponses(Responses):
    """ask: calls a method of `StoreOfAll` in the other process."""

    def __init__(self, ask: Callable[..., Awaitable[Any]]):
        super().__init__()  # its store stays empty: it says what is said of what is not there
        self._ask = ask

    async def add(
        self, response_id: str, body: bytes, given: list[Json], output: list[Json],
        turns: list[Json], previous_id: str | None,
    ) -> None:  # fmt: skip
        parts = msgspec.json.encode([given, output, turns])
        await self._ask("add_response", response_id, body, parts, previous_id)

    async def get(self, response_id: str) -> StoredResponse:
        found = await self._find(response_id)
        return self.store.get(response_id) if found is None else found

    async def previous(self, response_id: str) -> list[Json]:
        found = await self._find(response_id)
        return self.store.previous(response_id) if found is None else found.turns

    async def _find(self, response_id: str) -> StoredResponse | None:
        found = await self._ask("get_response", response_id)
        if found is None:
            return None
        body, parts, num_bytes = found
        given, turns, items = msgspec.json.decode(parts)
        return StoredResponse(body, given, turns, items, num_bytes)

    async def items(self, item_ids: list[str]) -> dict[str, Json]:
        found: dict[str, Json] = msgspec.json.decode(await self._ask("response_items", item_ids))
        return found

    async def delete(self, response_id: str) -> None:
        if not await self._ask("delete_response", response_id):
            self.store.delete(response_id)


class StoreOfAll:
    """What `SharedResponses` ask for. Values are those that messages have: None and False for what
    is not there, and JSON, whose whole numbers have any size, as bytes."""

    def __init__(self) -> None:
        self._store = ResponseStore()

    def add_response(
        self, response_id: str, body: bytes, parts: bytes, previous_id: str | None
    ) -> None:
        given, output, turns = msgspec.json.decode(parts)
        if previous_id is not None and previous_id in self._store:
            known = self._store.get(previous_id).turns  # the same objects: they count once
            turns = [*known, *turns[len(known) :]]
        self._store.add(response_id, body, given, output, turns)

    def get_response(self, response_id: str) -> list[Any] | None:
        if response_id not in self._store:
            return None
        found = self._store.get(response_id)
        parts = msgspec.json.encode([found.input, found.turns, found.items])
        return [found.body, parts, found.num_bytes]

    def response_items(self, item_ids: list[str]) -> bytes:
        return msgspec.json.encode(self._store.items(item_ids))

    def delete_response(self, response_id: str) -> bool:
        is_there = response_id in self._store
        if is_there:
            self._store.delete(response_id)
        return is_there
