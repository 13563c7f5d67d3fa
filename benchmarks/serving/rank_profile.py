"""Steps of an engine over several GPUs, whose kernels torch's profiler does not see from where the
engine is: its ranks are processes of their own. The first of them records itself.

The engine's process says when, by a file that the rank looks for at each step; a request of one
token makes it look.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SERVING = Path(__file__).resolve().parent
_CODE = (
    "import sys; sys.path[:0] = [{{root!r}}, {serving!r}]; "
    "import rank_profile; rank_profile.run({{descriptor}}, {folder!r})"
)
_RECORD, _SUMMARISE, _DONE = "record", "summarise", "done"
_SECONDS = 60.0


# ---------------------------------------------------------------- in the engine's process


@contextmanager
def recording_ranks() -> Iterator[Path]:
    """Within it engines with several ranks start such that `profile_rank` can be called, with the
    folder that it gives."""
    from vllm.executor import local_ranks

    plain = local_ranks._CODE
    with tempfile.TemporaryDirectory() as folder:
        local_ranks._CODE = _CODE.format(serving=str(_SERVING), folder=folder)
        try:
            yield Path(folder)
        finally:
            local_ranks._CODE = plain


def profile_rank(
    folder: Path, run: Callable[[], object], num_steps: int, any_step: Callable[[], object]
) -> dict[str, Any]:
    """What `gpu_profile.profile_steps` gives, of the first rank's kernels. any_step: makes a step
    or several."""
    (folder / _RECORD).touch()
    any_step()
    begin = time.time_ns()
    run()
    end = time.time_ns()
    (folder / _RECORD).unlink()
    _write(folder / _SUMMARISE, {"num_steps": num_steps, "begin": begin, "end": end})
    any_step()
    deadline = time.monotonic() + _SECONDS
    while not (folder / _DONE).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first rank has no profile after {_SECONDS:g} s")
        time.sleep(0.01)
    found: dict[str, Any] = json.loads((folder / _DONE).read_text())
    (folder / _DONE).unlink()
    return found


def _write(file: Path, content: Any) -> None:
    """At once: the other process may look any time."""
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(content))
    partial.replace(file)


# ---------------------------------------------------------------- in a rank's


def run(descriptor: int, folder: str) -> None:
    """Does what vllm.executor.worker.run_local does, and records."""
    from vllm.executor import worker

    serve = worker._serve

    def recording_serve(connection: Any, executor: Any, is_output: bool) -> None:
        recorder = _Recorder(executor.execute_model, Path(folder))
        executor.execute_model = recorder.execute_model
        serve(connection, executor, is_output)

    if sys.argv[-1] == "vllm-rank-0":
        worker._serve = recording_serve
    worker.run_local(descriptor)


class _Recorder:
    def __init__(self, execute_model: Callable[..., Any], folder: Path):
        self._execute_model, self._folder = execute_model, folder
        self._recording: Any = None

    def execute_model(self, *arguments: Any) -> Any:
        if self._recording is None and (self._folder / _RECORD).exists():
            from vllm.worker.kernel_spans import recording

            self._recording = recording().__enter__()
        elif self._recording is not None and (self._folder / _SUMMARISE).exists():
            self._summarise()
        return self._execute_model(*arguments)

    def _summarise(self) -> None:
        from gpu_profile import breakdown

        from vllm.worker.kernel_spans import spans_of

        self._recording.__exit__(None, None, None)
        asked = json.loads((self._folder / _SUMMARISE).read_text())
        (self._folder / _SUMMARISE).unlink()
        spans = spans_of(self._recording)
        begin, end = asked["begin"], asked["end"]
        own = [span for span in spans if begin <= span.begin <= end]
        _write(self._folder / _DONE, breakdown(own, asked["num_steps"], begin, end))
        self._recording = None
