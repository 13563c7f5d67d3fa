"""Requests that wait to be admitted: a queue per client, and turns between the clients."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from vllm.core.request import Request


def _rank(request: Request) -> tuple[int, float]:
    return request.rank


class _Turn(NamedTuple):
    """When a client may admit its next request: lower ones come first. number: unique."""

    priority: int
    num_running: int
    number: int


class _ClientQueue:
    """requests: those that wait. turn: as it stands in the order of turns; None for none."""

    __slots__ = ("num_running", "number", "requests", "turn")

    def __init__(self, number: int):
        self.requests: deque[Request] = deque()
        self.num_running = 0
        self.number = number
        self.turn: _Turn | None = None


class WaitingQueue:
    """The client with the fewest running sequences is next; of equal ones, that whose last turn is
    longest ago. So clients that wait share the places equally, whatever each of them has queued.
    Within one client the order is first come, first served. With priorities, lower ones come first
    in all of this."""

    def __init__(self, by_priority: bool, max_running: int | None = None):
        """max_running: of one client; None for no limit."""
        self._by_priority = by_priority
        self._max_running = max_running
        self._clients: dict[str, _ClientQueue] = {}
        self._turns: list[tuple[_Turn, _ClientQueue]] = []
        self._numbers = count()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """In the order of admission, as long as each can be admitted. Not to go on with after a
        change of the queue."""
        again: list[tuple[_Turn, int, _ClientQueue]] = []  # clients that had a turn, and how many
        numbers = count(1 << 62)
        first = 0  # of those that had none
        while again or first < len(self._turns):
            if not again or (first < len(self._turns) and self._turns[first][0] < again[0][0]):
                place, client = 0, self._turns[first][1]
                first += 1
            else:
                _, place, client = heappop(again)
            yield client.requests[place]
            place += 1
            if place < len(client.requests) and self._may_run(client.num_running + place):
                turn = self._turn(client, place, next(numbers))
                heappush(again, (turn, place, client))

    def at(self, place: int) -> Request | None:
        """The request at this place of the order; None beyond its end."""
        for number, request in enumerate(self):
            if number == place:
                return request
        return None

    @property
    def num_clients(self) -> int:
        """Clients that have requests, waiting or running."""
        return len(self._clients)

    def num_running(self, client: str) -> int:
        known = self._clients.get(client)
        return known.num_running if known is not None else 0

    def add(self, request: Request, is_preempted: bool = False) -> None:
        client = self._client(request)
        if self._by_priority:
            insort(client.requests, request, key=_rank)
        elif is_preempted:
            client.requests.appendleft(request)
        else:
            client.requests.append(request)
        self._num_waiting += 1
        self._settle(request.client, client)

    def remove(self, request: Request) -> None:
        """Of one that waits."""
        client = self._clients[request.client]
        client.requests.remove(request)
        self._num_waiting -= 1
        self._settle(request.client, client)

    def start(self, request: Request) -> None:
        """One that waits runs now, and its client has had its turn."""
        client = self._clients[request.client]
        client.num_running += 1
        client.number = next(self._numbers)
        self.remove(request)

    def stop(self, request: Request) -> None:
        """One that ran does so no more."""
        client = self._clients[request.client]
        client.num_running -= 1
        self._settle(request.client, client)

    def _client(self, request: Request) -> _ClientQueue:
        client = self._clients.get(request.client)
        if client is None:
            client = self._clients[request.client] = _ClientQueue(next(self._numbers))
        return client

    def _may_run(self, num_running: int) -> bool:
        return self._max_running is None or num_running < self._max_running

    def _turn(self, client: _ClientQueue, place: int, number: int) -> _Turn:
        """For its request at `place`, when all before it run."""
        priority = client.requests[place].priority if self._by_priority else 0
        return _Turn(priority, client.num_running + place, number)

    def _settle(self, name: str, client: _ClientQueue) -> None:
        """Puts a client that changed in its place among the turns."""
        if client.turn is not None:
            del self._turns[bisect_left(self._turns, (client.turn,))]
        client.turn = None
        if client.requests and self._may_run(client.num_running):
            client.turn = self._turn(client, 0, client.number)
            insort(self._turns, (client.turn, client))
        elif not client.requests and not client.num_running:
            del self._clients[name]
