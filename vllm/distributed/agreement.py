"""Ranks of one engine agree before they compute: on facts, and on what was decided from them."""

import json
from collections.abc import Mapping

from vllm.distributed.layout import Layout
from vllm.distributed.parallel import Gather
from vllm.errors import ConfigError


def check_same(
    layout: Layout, gather: Gather, place: str, own: Mapping[str, str], first: int = 0
) -> None:
    """ConfigError where an entry of this rank differs from that of rank `first`.

    own: texts by name; both ranks have the same names. Of texts that list several things, separated
    by semicolons, only what differs is told. gather, place: as of Parallel.
    """
    theirs = json.loads(gather(place, json.dumps(dict(own)), [first])[0])
    for name, text in own.items():
        if text != theirs.get(name):
            ours, others = (set(entries.split("; ")) for entries in (text, theirs.get(name, "")))
            raise ConfigError(
                f"{layout} has {_listed(ours - others)}, rank {first} has "
                f"{_listed(others - ours)} ({name}): start all ranks with the same versions, "
                f"libraries, checkpoint, flags, variables and tables of measured kernels"
            )


def _listed(entries: set[str]) -> str:
    return "; ".join(sorted(filter(None, entries))) or "none"
