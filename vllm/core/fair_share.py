"""Which running request gives up its place or blocks, so that clients hold equal shares."""

from collections import Counter
from collections.abc import Callable, Sequence

from vllm.core.request import Request

Size = Callable[[Request], int]
"""What a running request holds of something that is short."""


def places(request: Request) -> int:
    return 1


def blocks(request: Request) -> int:
    return request.num_blocks


def last_of_richest(running: Sequence[Request], size: Size, by_priority: bool) -> Request:
    """The request admitted last of the client that holds most; with priorities, among those of the
    least one. running: in order of admission, or of priority."""
    newest: dict[str, Request] = {}
    held: Counter[str] = Counter()
    for request in reversed(running):
        if by_priority and request.priority != running[-1].priority:
            break
        newest.setdefault(request.client, request)
        held[request.client] += size(request)
    return newest[max(held, key=held.__getitem__)]


def yields_to(
    request: Request, need: int, running: Sequence[Request], size: Size, by_priority: bool
) -> Request | None:
    """The running request to preempt for one that waits, whose client is to hold `need` more; None
    where no client would keep as much as that one gets."""
    if not running:
        return None
    victim = last_of_richest(running, size, by_priority)
    if by_priority and victim.priority < request.priority:
        return None
    held: Counter[str] = Counter()
    for other in running:
        held[other.client] += size(other)
    keeps = held[victim.client] - size(victim)
    return victim if keeps >= held[request.client] + need else None
