"""The engine processes of a server: started together, watched, killed and started again."""

import asyncio
import math
import time

from vllm.engine import process
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.engine_process import EngineProcess, close, kill, start_engines
from vllm.engine.supervision import (
    TICK_SECONDS,
    RestartBudget,
    Supervision,
    Watch,
    Watched,
)
from vllm.errors import EngineDeadError, KernelFailedError, VllmError
from vllm.logger import get_logger

logger = get_logger(__name__)

# Starts after kernel failures. A fault makes the GPU unusable and hides the next one: a backend
# that always faults does so once for each problem size.
MAX_KERNEL_FAILURES = 12


class Engines:
    """all: the processes of this start. budget: restarts that are left. troubles: by the name of a
    process that is stopped or stuck, what is known of it."""

    def __init__(self, args: EngineArgs, supervision: Supervision):
        self._args = args
        self._supervision = supervision
        self.budget = RestartBudget(supervision.restarts)
        self.all = start_engines(args)
        self.troubles: dict[str, str] = {}
        self._was_ready = False
        self._began = time.monotonic()
        self._load_s = 0.0
        self._watches = self._new_watches()

    async def load(self) -> list[process.Ready]:
        """Returns when all have loaded the model. Starts them again after a kernel failure, since
        the failed kernel is in quarantine then, and, if they were ready before, after any end."""
        num_kernel_failures = 0
        while True:
            waits = [asyncio.ensure_future(self._wait_ready(engine)) for engine in self.all]
            try:
                ready = await asyncio.gather(*waits)
                break
            except KernelFailedError as error:
                num_kernel_failures += 1
                if num_kernel_failures > MAX_KERNEL_FAILURES:
                    raise
                logger.error("%s; starting again", error)
            except EngineDeadError as error:
                if not self._was_ready or not self.budget.take():
                    raise
                logger.error("%s; starting again", error)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            await self.start_again()
        self._was_ready, self._load_s = True, time.monotonic() - self._began
        for watch in self._watches:
            watch.is_gpu = ready[0].is_gpu
        return ready

    async def start_again(self) -> None:
        """Kills all processes and starts new ones."""
        await asyncio.to_thread(kill, self.all)
        close(self.all)
        self._began = time.monotonic()
        self.all = start_engines(self._args)
        self._watches, self.troubles = self._new_watches(), {}

    @property
    def seconds_to_ready(self) -> int:
        """An estimate for engines that load, at least 1: the last load took as long."""
        return max(1, math.ceil(self._load_s - (time.monotonic() - self._began)))

    @property
    def silent_s(self) -> dict[str, float]:
        """Seconds since the last sign of life, by the name of the process."""
        return {name: s for watch in self._watches for name, s in watch.silent_s.items()}

    def name_of(self, engine: EngineProcess) -> str:
        return f"data-parallel engine {engine.rank}: " if len(self.all) > 1 else ""

    async def watch(self) -> None:
        """Tells of processes that are stopped or stuck, and kills engines where that lasts. Their
        end is noticed as any other."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            self._tick(now - before)
            before = now

    def _tick(self, seconds: float) -> None:
        found: dict[str, str] = {}
        for watch in self._watches:
            watch.tick(seconds)
            troubles = watch.troubles()
            found |= troubles
            if troubles and watch.is_dead(self._supervision.dead_after_s):
                self._kill(watch, troubles)
        for name in found.keys() - self.troubles.keys():
            logger.error("%s", found[name])
        well = {p.name for watch in self._watches for p in watch.processes if p.is_well}
        for name in (self.troubles.keys() - found.keys()) & well:
            logger.info("%s is back", name)
        self.troubles = found

    def _kill(self, watch: Watch, troubles: dict[str, str]) -> None:
        text = f"{'; '.join(troubles.values())}; killed after {self._supervision.dead_after_s:g} s"
        pages = [process.page for process in watch.processes if process.name in troubles]
        for engine in self.all:
            if engine.page in pages and not engine.why_killed:
                engine.why_killed = f"{text} (--dead-after)"
                engine.process.kill()  # its ranks end with it

    def _new_watches(self) -> list[Watch]:
        """Of each engine by itself, or of all where they step together."""
        of_engines = [self._watched(engine) for engine in self.all]
        if self.all[0].is_lockstep:
            of_engines = [[process for processes in of_engines for process in processes]]
        sees_ranks = self._args.distributed_executor_backend != "ray"
        return [Watch(processes, sees_ranks) for processes in of_engines]

    def _watched(self, engine: EngineProcess) -> list[Watched]:
        page = engine.page
        num_ranks = page.num_slots - 1
        first = engine.rank * num_ranks
        names = ["the engine process", *(f"rank {first + i}" for i in range(num_ranks))]
        return [Watched(self.name_of(engine) + name, page, i) for i, name in enumerate(names)]

    async def _wait_ready(self, engine: EngineProcess) -> process.Ready:
        try:
            return await engine.wait_ready()
        except VllmError as error:
            raise type(error)(f"{self.name_of(engine)}{error}") from None
