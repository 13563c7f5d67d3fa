"""Result files of benchmarks: each says on what, when and by which command."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def write_results(folder: Path, name: str, **content: Any) -> None:
    """Writes `folder`/`name` with `content` after the machine, the date and the command."""
    header = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
    }
    folder.mkdir(parents=True, exist_ok=True)
    # A run that is cut leaves what it wrote last, whole.
    unfinished = folder / f"{name}.part"
    unfinished.write_text(json.dumps(header | content, indent=1) + "\n")
    unfinished.replace(folder / name)
