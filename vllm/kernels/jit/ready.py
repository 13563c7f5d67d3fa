"""Compiles kernels in parallel before they are needed, and chooses fallbacks until then."""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from vllm.kernels import registry
from vllm.kernels.jit.compiled_call import CompiledCall
from vllm.kernels.jit.monitor import Compilation
from vllm.kernels.jit.nvcc_cache import NvccCache
from vllm.kernels.select.decision import Candidate, Decision
from vllm.kernels.select.problem import LinearProblem
from vllm.logger import get_logger
from vllm.platforms.cpu import memory_limit, num_cores

logger = get_logger(__name__)

NVCC = "nvcc"
"""`KernelSpec.compiles` of backends whose module has `compiled_calls`."""


class ReadySizes:
    """Sizes of a `CompiledCall` whose kernels are compiled. Callable with a size.

    Every size is ready where nothing was planned: then the first call compiles.
    """

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] | None = None
        self._ready: frozenset[int] = frozenset()

    def __call__(self, size: int) -> bool:
        if self._sizes is None:
            return True
        place = bisect_left(self._sizes, size)
        return place < len(self._sizes) and self._sizes[place] in self._ready

    def set(self, sizes: Iterable[int], ready: Iterable[int]) -> None:
        self._sizes, self._ready = tuple(sizes), frozenset(ready)


_ready: dict[str, ReadySizes] = {}


def ready_sizes(name: str) -> ReadySizes:
    """Of the calls of that name, in this process. It changes between steps only: within a step the
    input is laid out for the kernel that will be called."""
    return _ready.setdefault(name, ReadySizes())


# ---------------------------------------------------------------- fallbacks


def stand_in(decision: Decision, name: str) -> Candidate | None:
    """The first kernel built ahead of time that can serve until the kernels of `name` are compiled.

    None where none is needed, where `name` is an override (every other candidate then has a reason
    against it, so the compiler is waited for), and where it would need a second copy of the weight,
    re-quantised or widened.
    """
    problem = decision.problem
    own = next(c for c in decision.candidates if c.backend == name)
    if not isinstance(problem, LinearProblem) or own.rescales:
        return None
    if decision.is_emulated or compiler_of(decision, name) != NVCC:
        return None
    for other in decision.candidates:
        can_serve = not other.reasons and not other.parts and other.act is own.act
        if not can_serve or other.rescales:
            continue
        spec = registry.spec_of(decision, other.backend)
        if spec is not None and not spec.compiles and not spec.is_emulation:
            return other
    return None


def running(decision: Decision, num_tokens: int) -> str:
    """The backend that computes `num_tokens` now: the part of a split, or its fallback."""
    name = decision.backend_for(num_tokens)
    other = stand_in(decision, name)
    if other is None or is_ready(decision, name)(num_tokens):
        return name
    return other.backend


def compiler_of(decision: Decision, name: str) -> str:
    """The compiler of backend `name` for this problem; "" for a kernel built ahead of time."""
    spec = registry.spec_of(decision, name)
    return spec.compiles if spec is not None else ""


def is_ready(decision: Decision, name: str) -> Callable[[int], bool]:
    """Whether the kernel of backend `name` is compiled, as a function of M."""
    (call,) = _calls_of(decision, name, (1, 1))
    return ready_sizes(call.name)


# ---------------------------------------------------------------- calls to compile


@dataclass(frozen=True, slots=True)
class Needed:
    """must_wait: it has no fallback."""

    call: CompiledCall
    must_wait: bool


def needed_calls(decisions: Iterable[Decision], max_tokens: int) -> list[Needed]:
    """The calls of the chosen kernels with up to `max_tokens` tokens, without duplicates."""
    found: dict[tuple[str, tuple[int, ...]], Needed] = {}
    for decision in decisions:
        if decision.chosen is None or decision.is_emulated:
            continue
        low = 1
        for limit, name in decision.parts:
            high = max_tokens if limit is None else min(limit, max_tokens)
            if low <= high and compiler_of(decision, name) == NVCC:
                must_wait = stand_in(decision, name) is None
                for call in _calls_of(decision, name, (low, high)):
                    known = found.setdefault((call.name, call.sizes), Needed(call, must_wait))
                    if must_wait and not known.must_wait:  # layers of one size, one asked for
                        found[call.name, call.sizes] = Needed(call, must_wait)
            low = high + 1
    return list(found.values())


def _calls_of(decision: Decision, name: str, m_range: tuple[int, int]) -> list[CompiledCall]:
    candidate = next(c for c in decision.candidates if c.backend == name)
    calls: list[CompiledCall] = registry.backend(name).compiled_calls(
        decision.problem, candidate, m_range
    )
    return calls


# ---------------------------------------------------------------- compiling


@dataclass
class WarmUp:
    """Compiles in threads that each run one compiler.

    library: version and chip, which the plans depend on. compiled: compilations so far.
    """

    nvcc_cache: NvccCache
    library: str
    compiled: list[Compilation] = field(default_factory=list)
    _calls: list[tuple[Needed, dict[int, str]]] = field(default_factory=list)
    _late: list[tuple[Needed, dict[int, str]]] = field(default_factory=list)
    _plans: list[tuple[str, dict[int, str]]] = field(default_factory=list)
    _queue: "SimpleQueue[str]" = field(default_factory=SimpleQueue)
    _keys: set[str] = field(default_factory=set)
    _ended: dict[str, bool] = field(default_factory=dict)  # whether it is compiled
    _loaded: set[tuple[str, str]] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, needed: Iterable[Needed]) -> None:
        """Plans, and starts to compile; no call is ready until `finish`. Raises what the library
        raises for a call without a fallback."""
        # Calls without a fallback come first, then small sizes: CUDA graphs are captured of those.
        needed = sorted(needed, key=lambda one: not one.must_wait)
        self._calls = [(one, self._plan(one)) for one in needed]
        self._plans = [(one.call.name, plan) for one, plan in self._calls]
        order = sorted(
            (not one.must_wait, size, key)
            for one, plan in self._calls
            for size, key in plan.items()
            if key
        )
        self._keys = {key for _, _, key in order}
        for key in dict.fromkeys(key for _, _, key in order):
            if self.nvcc_cache.has(key):
                self._ended[key] = True
            else:
                self._queue.put(key)
        for name, _ in self._plans:
            ready_sizes(name).set((), ())
        for _ in range(min(self._queue.qsize(), num_compilers(num_cores(), memory_limit()))):
            threading.Thread(target=self._compile_queued, name="nvcc", daemon=True).start()

    def _plan(self, one: Needed) -> dict[int, str]:
        try:
            return self.nvcc_cache.plan(one.call, self.library)
        except Exception as error:  # whatever a library raises
            if one.must_wait:
                raise
            logger.warning("%s is served by its fallback: %s", one.call.name, error)
            return {}

    def finish(self, seconds: float) -> None:
        """Loads what was compiled; waits at most `seconds` for kernels with a fallback.

        RuntimeError of the library for a kernel without a fallback that does not compile.
        """
        deadline = time.monotonic() + seconds
        must = {key for one, plan in self._calls if one.must_wait for key in plan.values()}
        self._wait(must, None)
        self._wait(self._keys, deadline)
        for one, plan in self._calls:
            for size, key in plan.items():
                if not key or self._ended.get(key) or one.must_wait:
                    self._load(one, size, key)
        self._late = [(one, plan) for one, plan in self._calls if not one.must_wait]
        self._calls = []  # those that are waited for hold memory of the GPU
        self._let_serve()
        if left := len(self._keys) - len(self._ended):
            logger.warning(
                "%d of %d kernels are not compiled after %.0f s (VLLM_KERNEL_COMPILE_SECONDS): "
                "fallbacks serve until then, and in captured graphs until the next start",
                left, len(self._keys), seconds,
            )  # fmt: skip

    def promote(self) -> None:
        """Loads at most one kernel that was compiled since the start, and lets it serve.

        Call it between steps: the next step waits for the load.
        """
        missing = [
            (one, size, key)
            for one, plan in self._late
            for size, key in plan.items()
            if self._ended.get(key, True) and not self._is_loaded(one.call.name, key)
        ]
        if not missing:
            self._late = []
            return
        compiled = next((found for found in missing if self._ended.get(found[2])), None)
        if compiled is not None:
            self._load(*compiled)
            self._let_serve()

    def _is_loaded(self, name: str, key: str) -> bool:
        return not key or (name, key) in self._loaded

    def _let_serve(self) -> None:
        ready: dict[str, dict[int, bool]] = {}
        for name, plan in self._plans:
            for size, key in plan.items():
                ready.setdefault(name, {})[size] = self._is_loaded(name, key)
        for name, sizes in ready.items():
            ready_sizes(name).set(sorted(sizes), (size for size in sizes if sizes[size]))

    def _compile_queued(self) -> None:
        while True:
            try:
                key = self._queue.get_nowait()
            except Empty:
                return
            made, is_compiled = [], True
            try:
                if spent := self.nvcc_cache.compile(key):
                    made = [Compilation(NVCC, self.nvcc_cache.name(key), spent)]
            except Exception as error:  # whatever it is: the start waits for this thread
                is_compiled = False
                text = str(error)[-500:] or type(error).__name__
                logger.warning("a kernel does not compile: %s", text)
            with self._changed:
                self.compiled += made
                self._ended[key] = is_compiled
                self._changed.notify_all()

    def _wait(self, keys: set[str], deadline: float | None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: keys <= self._ended.keys() | {""},
                None if deadline is None else max(0.0, deadline - time.monotonic()),
            )

    def _load(self, one: Needed, size: int, key: str) -> None:
        """Makes a call of each kernel once, by which the library loads it.

        Raises for a kernel without a fallback that does not compile.
        """
        name = one.call.name
        has_failed = self._ended.get(key) is False
        if (name, key) in self._loaded or (has_failed and not one.must_wait):
            return
        try:
            one.call.run(size)
            self._loaded.add((name, key))
        except Exception as error:  # whatever a library raises
            if one.must_wait or not key:
                raise
            logger.warning("%s of size %d is served by its fallback: %s", name, size, error)
            with self._changed:
                self._ended[key] = False


# cicc takes 0.47 GB for one of DeepGEMM's kernels (CUDA 13.0); the rest is a reserve, since a
# container may have all cores of a machine and little of its memory.
_COMPILER_BYTES = 1 << 30


def num_compilers(num_cores: int, memory: int) -> int:
    """Half of the logical cores, as two usually share a physical one: the first kernels are done
    sooner. memory: bytes of this container."""
    return max(1, min(num_cores // 2, memory // _COMPILER_BYTES))
