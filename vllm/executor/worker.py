"""Main loop of a rank in its own process: serves the engine's messages until `Stop`."""

import logging
import os
import select
import sys
import threading
import traceback
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from vllm.executor import messages, prefetch
from vllm.utils.heartbeat import PULSE, Activity, Page
from vllm.utils.processes import die_with_parent
from vllm.utils.startup import no_collections

if TYPE_CHECKING:
    from vllm.executor.base import PendingOutput
    from vllm.executor.uniproc import UniprocExecutor


def run_local(descriptor: int, watched: tuple[int, int, int] | None = None) -> None:
    """In a process that its engine started: the connection is an inherited socket. watched: page of
    heartbeats, as its descriptor and number of slots, and the slot of this rank."""
    messages.leave_signals_to_parent()
    if watched is not None:
        die_with_parent()  # a rank that is stopped cannot end itself
        page, num_slots, slot = watched
        PULSE.attach(Page(num_slots, page), slot)
    threading.Thread(target=_end_with_engine, args=(descriptor,), daemon=True).start()
    failure = run(Connection(descriptor))
    sys.stdout.flush()
    PULSE.end()
    # A regular interpreter exit takes seconds, and the engine waits.
    os._exit(failure is not None)


def _end_with_engine(descriptor: int) -> None:
    """Ends this process when the engine's end of the socket is closed, even while it loads weights
    or waits for a peer."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups and errors are always reported
    poll.poll()
    PULSE.end()
    os._exit(1)


def run(connection: Connection) -> messages.Failure | None:
    """Serves until `Stop` or until the engine is gone; returns the failure, if any."""
    try:
        prefetch.begin_rank()
        with no_collections():  # while the engine still reads its configuration
            import vllm.executor.uniproc  # noqa: F401

        start = connection.recv()
        executor = _load(start)
        kind = executor.selection.device.kind
        connection.send(messages.Started(executor.num_blocks, executor.async_scheduling, kind))
        _serve(connection, executor, start.layout.is_output)
    except (EOFError, ConnectionError):
        return None
    except BaseException as error:
        failure = messages.failure_of(error, traceback.format_exc())
        try:
            connection.send(failure)
        except OSError:
            traceback.print_exc()
        return failure
    return None


def _load(start: messages.Start) -> "UniprocExecutor":
    # Only rank 0 logs.
    if start.layout.rank > 0:
        logging.getLogger("vllm").setLevel(logging.WARNING)
        _hide_progress()
    from vllm.executor.uniproc import UniprocExecutor, use_device

    use_device(start.device_index, start.num_neighbours)
    # Made again here: what depends on the GPU (the model rule) is decided where there is one.
    config = replace(start.config)
    return UniprocExecutor(config, start.rendezvous, start.layout)


def _hide_progress() -> None:
    from functools import partialmethod

    from tqdm import tqdm

    tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)


def _serve(connection: Connection, executor: "UniprocExecutor", is_output: bool) -> None:
    running: deque[PendingOutput] = deque()

    def take() -> None:
        result = running.popleft().result()
        if is_output:
            connection.send(result)

    while True:
        PULSE.enter(Activity.IDLE)
        message = connection.recv()
        PULSE.enter(Activity.STEP)
        PULSE.step()
        if isinstance(message, messages.ExecuteModel):
            running.append(executor.execute_model(message.scheduler_output, message.bitmasks))
            if not executor.async_scheduling:
                take()
        elif isinstance(message, messages.GetOutput):
            take()
        elif isinstance(message, messages.ShowKernels):
            connection.send(executor.selection.report())
        else:
            assert isinstance(message, messages.Stop)
            executor.shutdown()
            return
