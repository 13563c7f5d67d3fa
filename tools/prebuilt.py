"""The native library of a wheel, where a wheel was built from the same sources: `make serve` takes
it instead of compiling. Standard library only, under old versions of Python too."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import zipfile
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "VLLM_PRECOMPILED_WHEEL_LOCATION"
FILES = ("libvllm_kernels.so", "arch_manifest.json")
_SECONDS = 60


class Unusable(Exception):
    """The wheel cannot be used; the text says why."""


def find(root: Path) -> str | None:
    """The path or URL of a wheel: what VARIABLE names, else the newest of `make wheel`. None
    without one, and where CMAKE_ARGS asks for a build of its own."""
    if os.environ.get("CMAKE_ARGS"):
        return None
    made = sorted((root / "dist" / "cpu").glob("vllm-*.whl"), key=lambda file: file.stat().st_mtime)
    return os.environ.get(VARIABLE) or (str(made[-1]) if made else None)


def take(root: Path, folder: Path, tell: Callable[[str], None]) -> str | None:
    """Puts the FILES of the wheel into `folder` and returns the wheel's name; None, and a line that
    says why, where there is no wheel that fits."""
    location = find(root)
    if location is None:
        return None
    name = location.rpartition("/")[2]
    try:
        _extract(_local(location, folder), folder)
        _check(root, folder)
    except Unusable as error:
        tell(f"Wheel {name}: {error}; the kernels are compiled instead")
        return None
    return name


def _local(location: str, folder: Path) -> Path:
    if "://" not in location:
        return Path(location).expanduser()
    import urllib.request

    file = folder / "downloaded.whl"
    try:
        with urllib.request.urlopen(location, timeout=_SECONDS) as answer, file.open("wb") as out:
            shutil.copyfileobj(answer, out)
    except (OSError, ValueError) as error:
        raise Unusable(f"it cannot be downloaded ({error})") from None
    return file


def _extract(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(str(wheel)) as packed:
            for name in FILES:
                with packed.open(f"vllm/lib/{name}") as source, (folder / name).open("wb") as out:
                    shutil.copyfileobj(source, out)
    except KeyError:
        raise Unusable("it has no native library, so it is another package's") from None
    except OSError as error:
        raise Unusable(f"it cannot be read ({error.strerror or error})") from None
    except Exception as error:  # whatever damaged data makes zipfile raise
        raise Unusable(f"it is damaged ({error})") from None


def _check(root: Path, folder: Path) -> None:
    try:
        built = json.loads((folder / FILES[1]).read_text(encoding="utf-8"))
        sources, processor = built.get("sources"), built["processor"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Unusable("it is damaged (its manifest cannot be read)") from None
    if processor != platform.machine():
        raise Unusable(f"it is for {processor}, and this is {platform.machine()}")
    if sources != _sources_id(root):
        raise Unusable("it was built from other sources")


def _sources_id(root: Path) -> str:
    """As the build writes it into its manifest."""
    spec = importlib.util.spec_from_file_location("build_ids", str(root / "cmake" / "build_ids.py"))
    build_ids = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_ids)
    return build_ids.sources_id(root)
