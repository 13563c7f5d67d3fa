"""Processes that tests start, which import what the test does."""

import os
import sys
from pathlib import Path

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """folders: where modules are looked for first."""
    path = os.pathsep.join([*map(str, folders), *sys.path])
    return {**os.environ, "PYTHONPATH": path, **variables}
