"""The facts that decisions depend on: found out on each rank, and equal on all ranks."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vllm import envs
from vllm.config import VllmConfig
from vllm.config.selection import Facts
from vllm.distributed.parallel import Parallel
from vllm.kernels import registry
from vllm.kernels.evidence.tables import missing_note
from vllm.logger import get_logger
from vllm.machine import Quarantined
from vllm.platforms.probe import probe_chip, probe_libs
from vllm.version import __version__

logger = get_logger(__name__)

# Variables that do not affect what is computed.
_OWN_VARIABLES = frozenset(
    {
        "VLLM_API_KEY",
        "VLLM_CACHE_ROOT",
        "VLLM_KERNEL_BUNDLE",
        "VLLM_KERNEL_CACHE",
        "VLLM_KERNEL_COMPILE_SECONDS",
        "VLLM_LOGGING_LEVEL",
        "VLLM_TARGET_DEVICE",
    }
)
# Fields that differ between ranks.
_OWN_FIELDS = frozenset({"data_parallel_rank", "dump_decisions"})


def probed_facts() -> Facts:
    """Of this machine; tries its libraries."""
    chip = probe_chip()
    if note := missing_note(chip):
        logger.warning("%s; vllm kernels tune measures here", note)
    return Facts.of(chip, probe_libs())


def facts_of(config: VllmConfig, facts: Facts) -> dict[str, str]:
    """What must be equal on all ranks, by name, causes before their consequences. A text that
    lists several things separates them by semicolons.

    Not the quarantine: `with_failures_of_all` makes that equal.
    """
    names = (name for name in envs.VARIABLES if envs.is_set(name) and name not in _OWN_VARIABLES)
    return {
        "versions": f"vllm {__version__}; torch {torch.__version__}",
        "device": str(facts.device),
        "variables": _listed(f"{name}={envs.texts()[name]}" for name in names),
        "libraries": _listed(str(lib).replace("=", " ", 1) for lib in facts.libs.libs),
        "tables of measured kernels": "; ".join(facts.known.digests()),
        "backends of other packages and of files": _listed(
            filter(None, (registry.code_version(spec.backend) for spec in registry.all_specs()))
        ),
        "checkpoint": "; ".join(map(_checkpoint, _folders(config))),
        "configuration": _digest(json.dumps(_plain(config), sort_keys=True)),
    }


def with_failures_of_all(facts: Facts, parallel: Parallel) -> Facts:
    """With the quarantine of every rank, in which a kernel that failed on one counts for all."""
    own = [dataclasses.astuple(failure) for failure in facts.libs.quarantined]
    texts = parallel.gather("quarantine", json.dumps(own), range(parallel.layout.num_ranks))
    found: dict[tuple[str, str], Quarantined] = {}
    for rank, text in enumerate(texts):
        for failure in itertools.starmap(Quarantined, json.loads(text)):
            if rank > 0:
                failure = dataclasses.replace(failure, text=f"{failure.text}, on rank {rank}")
            found.setdefault((failure.backend, failure.size_key), failure)
    libs = dataclasses.replace(facts.libs, quarantined=frozenset(found.values()))
    return dataclasses.replace(facts, libs=libs)


def _listed(entries: Iterable[str]) -> str:
    return "; ".join(sorted(set(entries)))


def _folders(config: VllmConfig) -> list[Path]:
    """Of the model, and of one that drafts for it."""
    drafts = config.speculative_config
    draft = drafts.draft_model_config if drafts is not None else None
    return [config.model_config.path, *([draft.path] if draft is not None else [])]


def _checkpoint(folder: Path) -> str:
    """Names and sizes of its files."""
    files = sorted(p for p in folder.glob("*") if p.suffix in (".safetensors", ".json"))
    sizes = [(file.name, file.stat().st_size) for file in files]
    total = sum(size for _, size in sizes)
    return f"{len(sizes)} files of {total} bytes, {_digest(json.dumps(sizes))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """As JSON takes it."""
    if dataclasses.is_dataclass(value):
        return {
            f.name: _plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.name not in _OWN_FIELDS
        }
    if hasattr(value, "to_json_string"):
        return value.to_json_string()
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "from_checkpoint"):
        public = {key: entry for key, entry in vars(value).items() if not key.startswith("_")}
        return {"class": type(value).__name__, **_plain(public)}
    return str(value)
