"""Traces of the kernels of this process, by torch's profiler."""

import os
from pathlib import Path

import torch

from vllm import envs
from vllm.errors import ConfigError
from vllm.logger import get_logger

logger = get_logger(__name__)


class Profiler:
    """From `start` to `stop`; the trace is a file for chrome://tracing or Perfetto."""

    def __init__(self) -> None:
        folder = envs.VLLM_TORCH_PROFILER_DIR
        if folder is None:
            raise ConfigError(
                "a profile needs a folder for its trace: set VLLM_TORCH_PROFILER_DIR before the "
                "engine starts"
            )
        self._folder = Path(folder)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=kinds)
        self._profile.start()

    def stop(self) -> Path:
        """Ends the profile and writes it; returns the file."""
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = range(10**6)
        names = (self._folder / f"trace-{os.getpid()}-{number}.json.gz" for number in numbers)
        file = next(name for name in names if not name.exists())
        self._profile.export_chrome_trace(str(file))
        logger.info("profile written to %s", file)
        return file
