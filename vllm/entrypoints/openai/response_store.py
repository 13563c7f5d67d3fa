"""Responses that were answered, for clients that come back to them while the server runs."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm.entrypoints.openai.errors import ApiError

Json = dict[str, Any]

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredResponse:
    """body: the JSON of the response. input: the items that it answers. turns: of the conversation
    up to and with its answer, as messages of chat; those of earlier responses are the same objects.
    items: of its output, by id. num_bytes: of all but the turns."""

    body: bytes
    input: list[Json]
    turns: list[Json]
    items: dict[str, Json]
    num_bytes: int


@dataclass
class _Turn:
    """A turn that `num_uses` of the stored responses have."""

    turn: Json
    num_bytes: int
    num_uses: int = 0


@dataclass
class ResponseStore:
    """Bounded by number and size: what was used last is kept."""

    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    num_bytes: int = field(default=0, init=False)
    _found: "OrderedDict[str, StoredResponse]" = field(default_factory=OrderedDict, init=False)
    _items: dict[str, Json] = field(default_factory=dict, init=False)
    _turns: dict[int, _Turn] = field(default_factory=dict, init=False)

    def add(
        self, response_id: str, body: bytes, given: list[Json], output: list[Json],
        turns: list[Json],
    ) -> None:  # fmt: skip
        """given, output: items. A response that is larger than the store is not kept."""
        num_bytes = len(body) + len(msgspec.json.encode(given))
        # Of the output alone: their ids are the server's own, and nobody else's.
        items = {item["id"]: item for item in output}
        self._found[response_id] = StoredResponse(body, given, turns, items, num_bytes)
        self._items |= items
        self.num_bytes += num_bytes
        for turn in turns:
            self._use(turn)
        while len(self._found) > self.max_responses or self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._found)))

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._found

    def get(self, response_id: str) -> StoredResponse:
        """ApiError 404 for one that is not here."""
        if response_id not in self._found:
            raise ApiError(404, self._absent(response_id), "response_id", "response_not_found")
        self._found.move_to_end(response_id)
        return self._found[response_id]

    def previous(self, response_id: str) -> list[Json]:
        """Turns of the conversation that goes on."""
        try:
            return self.get(response_id).turns
        except ApiError:
            raise ApiError(
                400, self._absent(response_id), "previous_response_id",
                "previous_response_not_found",
            ) from None  # fmt: skip

    def items(self, item_ids: Iterable[str]) -> dict[str, Json]:
        """Those of the items of answers that are here, by id."""
        return {name: self._items[name] for name in item_ids if name in self._items}

    def delete(self, response_id: str) -> None:
        self.get(response_id)
        self._drop(response_id)

    def _use(self, turn: Json) -> None:
        known = self._turns.get(id(turn))
        if known is None:
            known = self._turns[id(turn)] = _Turn(turn, len(msgspec.json.encode(turn)))
            self.num_bytes += known.num_bytes
        known.num_uses += 1

    def _drop(self, response_id: str) -> None:
        gone = self._found.pop(response_id)
        self.num_bytes -= gone.num_bytes
        for item_id in gone.items:
            del self._items[item_id]
        for turn in gone.turns:
            known = self._turns[id(turn)]
            known.num_uses -= 1
            if not known.num_uses:
                self.num_bytes -= known.num_bytes
                del self._turns[id(turn)]

    def _absent(self, response_id: str) -> str:
        return (
            f"response {response_id[:80]!r} is not stored: the server keeps the last "
            f"{self.max_responses} of those made without store: false, until it stops"
        )


class Responses:
    """What a server remembers of its responses; another process may have it."""

    def __init__(self) -> None:
        self.store = ResponseStore()

    async def add(
        self, response_id: str, body: bytes, given: list[Json], output: list[Json],
        turns: list[Json], previous_id: str | None,
    ) -> None:  # fmt: skip
        """previous_id: of the response whose turns are the first of `turns`."""
        self.store.add(response_id, body, given, output, turns)

    async def get(self, response_id: str) -> StoredResponse:
        return self.store.get(response_id)

    async def previous(self, response_id: str) -> list[Json]:
        return self.store.previous(response_id)

    async def items(self, item_ids: list[str]) -> dict[str, Json]:
        return self.store.items(item_ids)

    async def delete(self, response_id: str) -> None:
        self.store.delete(response_id)
