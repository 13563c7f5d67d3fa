"""Cache folders of compiled kernels, and bundles that fill them.

Entries are keyed by a hash of their inputs, so one folder serves every model, version and chip. A
bundle (`vllm kernels precompile`) is such a folder with a manifest. It is only read: missing files
are copied from it after their hashes were compared with the manifest.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.errors import ConfigError
from vllm.kernels.jit.nvcc_cache import NvccCache, make_nvcc_cache
from vllm.logger import get_logger
from vllm.machine import Device, Libs
from vllm.platforms.libraries import FLASHINFER_CACHE
from vllm.utils.files import write_atomically

logger = get_logger(__name__)

MANIFEST = "manifest.json"
FORMAT = 2
# Folders below the root. DeepGEMM's own is keyed by its installation path and is filled from
# `nvcc`, so it is not bundled.
TRITON, NVCC, FLASHINFER = "triton", "nvcc", FLASHINFER_CACHE
# Libraries' own variables, and the folder for each.
OWN_VARIABLES = {
    "TRITON_CACHE_DIR": TRITON,
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer_workspace",
    "TRTLLM_DG_CACHE_DIR": "flashinfer_deep_gemm",  # of its FP8 block products for Hopper
}
BUNDLED = (TRITON, NVCC, FLASHINFER)
_LIBRARIES = ("deep_gemm", "flashinfer", "torch", "triton")
_NOT_BUNDLED = (".lock", ".partial")
_LEAST_BYTES = 1 << 20  # a few kernels


@cache
def use_caches() -> NvccCache | None:
    """Points the libraries at folders in VLLM_KERNEL_CACHE, unless their own variables are set, and
    fills the folders from VLLM_KERNEL_BUNDLE. Returns the cache of nvcc; None without nvcc.

    Call it before a library is loaded. ConfigError for an invalid bundle.
    """
    root, bundle = cache_root(), envs.VLLM_KERNEL_BUNDLE
    for name, folder in OWN_VARIABLES.items():
        if envs.foreign(name) is None:
            envs.set_for_children(name, str(root / folder))
    if bundle is not None:
        fill(root, bundle, {TRITON: Path(envs.foreign("TRITON_CACHE_DIR") or root / TRITON)})
    return make_nvcc_cache(root / NVCC)


@cache
def cache_root() -> Path:
    """VLLM_KERNEL_CACHE, or a temporary folder where that cannot be written."""
    root: Path = envs.VLLM_KERNEL_CACHE
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(bytes(_LEAST_BYTES))  # a disk that is full takes an empty file
        return root
    except OSError as error:
        instead = Path(tempfile.mkdtemp(prefix="vllm-compiled-"))
        logger.warning(
            "%s cannot be written (%s): kernels are kept in %s", root, error.strerror, instead
        )
        return instead


# ---------------------------------------------------------------- bundles


def made_for(device: Device, libs: Libs) -> dict[str, str]:
    """Device and library versions that a bundle is made for; elsewhere its kernels are ignored."""
    found = {lib.name: lib.version for lib in libs.libs if lib.name in _LIBRARIES}
    return {"device": str(device), **dict(sorted(found.items()))}


def warn_of_another_machine(device: Device, libs: Libs) -> None:
    """Warns if the bundle in use was made for another chip or other library versions."""
    bundle = envs.VLLM_KERNEL_BUNDLE
    if bundle is None:
        return
    theirs, ours = read_manifest(bundle)["made_for"], made_for(device, libs)
    differ = [name for name in sorted(theirs.keys() | ours) if theirs.get(name) != ours.get(name)]
    if differ:
        text = ", ".join(f"{name} {theirs.get(name)} and not {ours.get(name)}" for name in differ)
        logger.warning("VLLM_KERNEL_BUNDLE=%s was made for %s: kernels may compile", bundle, text)


def write_manifest(folder: Path, fit_for: dict[str, str]) -> int:
    """Writes the manifest of a bundle; returns the number of files in it."""
    files = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(_bundled(folder))
    }
    manifest = {"format": FORMAT, "made_for": fit_for, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return len(files)


def _bundled(folder: Path) -> Iterator[Path]:
    for name in BUNDLED:
        for path in (folder / name).rglob("*"):
            is_temporary = path.name == "lock" or path.suffix in _NOT_BUNDLED
            if path.is_file() and not is_temporary and not path.name.startswith("nvcc-front-"):
                yield path


def read_manifest(bundle: Path) -> dict[str, Any]:
    """ConfigError for a folder that is not a bundle of this format."""
    try:
        manifest = json.loads((bundle / MANIFEST).read_text())
        if manifest["format"] == FORMAT and isinstance(manifest["files"], dict):
            return dict(manifest)
        problem = f"has format {manifest['format']}, and this version reads {FORMAT}"
    except OSError as error:
        problem = f"has no readable {MANIFEST} ({error.strerror})"
    except (ValueError, KeyError, TypeError):
        problem = f"has a {MANIFEST} that is damaged"
    raise ConfigError(
        f"VLLM_KERNEL_BUNDLE={bundle} {problem}: it takes a folder that vllm kernels precompile "
        f"wrote here; make it again, or unset the variable"
    )


def fill(root: Path, bundle: Path, places: dict[str, Path]) -> int:
    """Copies missing files to `root` and returns their number. places: folders outside `root`.

    A file whose hash differs from the manifest is skipped with a warning: its kernel is compiled.
    """
    files: dict[str, str] = read_manifest(bundle)["files"]
    copied, damaged = 0, []
    for name, digest in files.items():
        first, *rest = Path(name).parts
        if first not in BUNDLED or ".." in rest:
            damaged.append(name)
            continue
        target = places.get(first, root / first).joinpath(*rest)
        if target.exists():
            continue
        try:
            content = (bundle / name).read_bytes()
        except OSError:
            content = b""
        if hashlib.sha256(content).hexdigest() != digest:
            damaged.append(name)
            continue
        try:
            write_atomically(target, content, mode=0o755 if target.suffix == ".so" else 0o644)
        except OSError as error:
            logger.warning("VLLM_KERNEL_BUNDLE=%s cannot be copied from on: %s", bundle, error)
            break
        copied += 1
    if damaged:
        logger.warning(
            "VLLM_KERNEL_BUNDLE=%s: %d of %d files are not what was written, such as %s; they are "
            "not used", bundle, len(damaged), len(files), damaged[0],
        )  # fmt: skip
    logger.info("%d of %d files taken from the bundle %s", copied, len(files), bundle)
    return copied
