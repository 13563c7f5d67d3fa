"""Rendezvous of ranks: checks that they agree, and creates their process groups."""

import socket
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from vllm.distributed.agreement import check_same
from vllm.distributed.groups import PeerError
from vllm.distributed.layout import Layout
from vllm.distributed.parallel import Parallel, make_parallel
from vllm.errors import ConfigError

Address = tuple[str, int]
"""Host and port."""

# Ranks import torch and probe their devices first; a dead rank is noticed elsewhere.
_START = timedelta(minutes=15)
# Weight loading may differ by hours; a dead rank is noticed elsewhere.
_LONGEST = timedelta(days=1)
# NCCL's watchdog ends a process without naming the missing rank, so our own timeout comes first.
_NCCL_GRACE_SECONDS = 20.0


def listen(host: str = "127.0.0.1") -> socket.socket:
    """A socket on a free port, for the store."""
    return socket.create_server((host, 0))


def host_store(listener: socket.socket) -> dist.TCPStore:
    """The store server of all ranks. Takes over the socket."""
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=_START,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def find_store(address: Address) -> dist.TCPStore:
    return dist.TCPStore(*address, is_master=False, timeout=_START, wait_for_workers=False)


def join(
    layout: Layout,
    is_expert_parallel: bool,
    address: Address,
    device_kind: str,
    timeout_s: float,
    facts: Mapping[str, str],
) -> Parallel:
    """This rank's process groups, once all ranks have joined. facts: what must be equal on all
    ranks; ConfigError names the difference."""
    if device_kind == "cuda" and not dist.is_nccl_available():
        raise ConfigError(
            "several GPUs need NCCL, which this torch was built without; install torch for CUDA"
        )
    store = find_store(address)

    def gather(place: str, text: str, ranks: Iterable[int]) -> list[str]:
        store.set(f"{place}/{layout.rank}", text)
        keys = [f"{place}/{rank}" for rank in ranks]
        store.wait(keys, _LONGEST)
        return [store.get(key).decode() for key in keys]

    check_same(layout, gather, "facts", facts)
    # From here on, the timeout of a step applies.
    gather("start", "", range(layout.num_ranks))
    try:
        connect = _connect(layout, store, device_kind == "cuda", timeout_s)
        parallel = make_parallel(layout, is_expert_parallel, connect)
    except RuntimeError as error:
        raise PeerError(f"{layout} cannot connect to the other ranks: {error}") from error
    parallel.gather = gather
    parallel.timeout_s = timeout_s
    return parallel


def _connect(
    layout: Layout, store: dist.Store, is_cuda: bool, timeout_s: float
) -> Callable[[list[int]], "dist.ProcessGroup"]:
    """Connects all ranks; what it returns gives the process group of some of them.

    On GPUs it connects now, not at the first collective, which may be inside a CUDA graph. Groups
    with the same ranks share one process group, and so its buffers.
    """
    timeout = timedelta(seconds=timeout_s + (_NCCL_GRACE_SECONDS if is_cuda else 0.0))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=dist.PrefixStore("world", store),
        rank=layout.rank,
        world_size=layout.num_ranks,
        timeout=timeout,
        device_id=torch.device("cuda", torch.cuda.current_device()) if is_cuda else None,
    )
    world = dist.group.WORLD
    assert world is not None
    handles = {tuple(range(layout.num_ranks)): world}

    def connect(ranks: list[int]) -> dist.ProcessGroup:
        key = tuple(ranks)
        if key not in handles:
            handles[key] = dist.new_group(ranks, timeout=timeout)
        return handles[key]

    return connect


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
