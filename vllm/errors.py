"""Errors a user can act on. Every message names what was given, what is accepted and the fix."""

import errno
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean X?"` for the closest of `known`, or nothing when none is close."""
    import difflib

    names = list(known)
    ends = {_without_prefix(other): other for other in names}
    close = difflib.get_close_matches(_without_prefix(name), ends, n=1, cutoff=0.6)
    near = [ends[end] for end in close]
    longer = [other for other in names if other.lower().startswith(name.lower())]
    if not near and len(name) > 2 and len(longer) == 1:  # the beginning of one, and of no other
        near = longer
    return f"; did you mean {near[0]}?" if near else ""


def nearest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The layers whose names are most like a glob pattern that matches none, one of each kind: with
    the stars of the pattern, if it has any."""
    import difflib

    bare = pattern.replace("*", "").strip(".")
    depth = bare.count(".") + 1
    ends = {".".join(name.split(".")[-depth:]): name for name in reversed(list(names))}
    close = difflib.get_close_matches(bare, ends, n=2, cutoff=0.5)
    return [f"*.{end}" if pattern.startswith("*") else ends[end] for end in close]


def _without_prefix(name: str) -> str:
    """Without what all flags, or all variables, have in common, which makes none of them close."""
    return name.removeprefix("--").removeprefix("VLLM_")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether no memory was left, of the machine or of a GPU: the same comes from torch, cuBLAS,
    Triton and the driver, as errors of many types."""
    text = str(error)
    signs = ("out of memory", "out_of_memory", "allocate memory", "not enough memory",
             "alloc_failed")  # fmt: skip
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return any(sign in text.lower() for sign in signs)


def is_of_machine(error: BaseException) -> bool:
    """Whether it speaks against the machine, or the state it is in, and not against the kernel that
    was called: no memory, no room or right to write, no compiler, broken hardware, a GPU that
    others hold. What it was raised from counts too."""
    from subprocess import SubprocessError

    signs = ("uncorrectable", "hardware error", "devices unavailable", "busy or unavailable",
             "cuda error: unknown error", "not_initialized", "no space left on device",
             "disk quota", "killed signal", "c compiler")  # fmt: skip
    is_own = isinstance(error, OSError | ImportError | SubprocessError)
    says_so = any(sign in str(error).lower() for sign in signs)
    return is_own or says_so or is_out_of_memory(error) or _comes_of_machine(error.__cause__)


def _comes_of_machine(cause: BaseException | None) -> bool:
    """A compiler that ends by itself speaks against what it was given; one that was ended does
    not, nor one that is not there."""
    from subprocess import CalledProcessError

    if isinstance(cause, CalledProcessError):
        return cause.returncode < 0 or cause.returncode in (126, 127)
    return cause is not None and (isinstance(cause, OSError) or is_out_of_memory(cause))


class VllmError(Exception):
    """Base of all errors that are the user's to fix; the CLI prints them and exits with 2."""


class ConfigError(VllmError, ValueError):
    """A flag, environment variable or configuration file is wrong."""


class CheckpointError(VllmError, ValueError):
    """A model folder is incomplete, corrupt or of a kind that is not supported."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled or that no text matches."""


class KernelFailedError(VllmError):
    """Chosen kernels failed at their first call and are in quarantine: another start chooses
    others."""


class RequestError(VllmError, ValueError):
    """One request is malformed; it alone is refused. `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class NumericsError(RequestError):
    """The numbers of one request went wrong, which is no fault of who sent it; it alone failed."""


class NoMemoryError(RequestError):
    """Memory ran out for one request; it alone failed, and may be sent again."""


class EngineDeadError(VllmError, RuntimeError):
    """The engine process is gone; nothing can be generated any more. is_of_peer: by the fault of
    another one, which knows more."""

    is_of_peer = False


class StoppingError(EngineDeadError):
    """The engine was told to end before this request was finished; another may take it."""


class RestartingError(EngineDeadError):
    """The engine is being started again; the caller may try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(VllmError):
    """Too many requests wait already; the caller may try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s
