"""Responses that all API processes of a server remember: the process that started them has them."""

from collections.abc import Awaitable, Callable
from typing import Any

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
        await self._ask("add_response", response_id, body, given, output, turns, previous_id)

    async def get(self, response_id: str) -> StoredResponse:
        found = await self._ask("get_response", response_id)
        return self.store.get(response_id) if found is None else StoredResponse(*found)

    async def previous(self, response_id: str) -> list[Json]:
        found = await self._ask("get_response", response_id)
        return self.store.previous(response_id) if found is None else StoredResponse(*found).turns

    async def items(self, item_ids: list[str]) -> dict[str, Json]:
        found: dict[str, Json] = await self._ask("response_items", item_ids)
        return found

    async def delete(self, response_id: str) -> None:
        if not await self._ask("delete_response", response_id):
            self.store.delete(response_id)


class StoreOfAll:
    """What `SharedResponses` ask for. Values are those that messages have: None and False for what
    is not there."""

    def __init__(self) -> None:
        self._store = ResponseStore()

    def add_response(
        self, response_id: str, body: bytes, given: list[Json], output: list[Json],
        turns: list[Json], previous_id: str | None,
    ) -> None:  # fmt: skip
        if previous_id is not None and previous_id in self._store:
            known = self._store.get(previous_id).turns  # the same objects: they count once
            turns = [*known, *turns[len(known) :]]
        self._store.add(response_id, body, given, output, turns)

    def get_response(self, response_id: str) -> list[Any] | None:
        if response_id not in self._store:
            return None
        found = self._store.get(response_id)
        return [found.body, found.input, found.turns, found.items, found.num_bytes]

    def response_items(self, item_ids: list[str]) -> dict[str, Json]:
        return self._store.items(item_ids)

    def delete_response(self, response_id: str) -> bool:
        is_there = response_id in self._store
        if is_there:
            self._store.delete(response_id)
        return is_there
