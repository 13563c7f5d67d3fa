"""`--kernel 'PATTERN=path/to/file.py:Name'`: one's own backend for the layers whose name matches.

`Name` in the file is what an entry point of the group `vllm.kernel_backends` loads
(`vllm/kernels/registry.py`): an object with SPECS and a maker for each of their families.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm.errors import ConfigError, did_you_mean
from vllm.formats.act_scheme import ActScheme
from vllm.formats.registry import formats
from vllm.kernels import registry
from vllm.kernels.select.spec import KernelSpec
from vllm.utils.dataclasses import dataclass
from vllm.utils.files import is_regular, kind_of

SYNTAX = "PATTERN=path/to/file.py:Name"
# Those whose results are compared with a reference before they serve.
FAMILIES = ("linear", "moe")
_COMPILES = ("", "triton")
_DTYPES = ("bf16", "fp16", "fp32")
_TEXT = r"(?P<pattern>[^=]+)=(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)"
_BACKEND = r"[a-z]\w*(-[a-z0-9-]+)?"
_DEVICE = r"cpu|sm_\d+x?"


@dataclass(frozen=True)
class OwnBackend:
    """The text of one `--kernel`."""

    pattern: str
    path: Path
    name: str

    @classmethod
    def parse(cls, text: str) -> "OwnBackend | None":
        """None for a text that names no file; ConfigError for one that names it wrongly."""
        if match := re.fullmatch(_TEXT, text):
            return cls(match["pattern"], Path(match["path"]).expanduser().absolute(), match["name"])
        value = text.partition("=")[2]
        if "/" in value or value.endswith(".py") or ".py:" in value:
            raise ConfigError(f"--kernel {text!r}: a backend of a file is written {SYNTAX}")
        return None

    def __str__(self) -> str:
        return f"{self.pattern}={self.path}:{self.name}"

    def load(self) -> dict[str, str]:
        """Its backend's name by family, registered in this process. ConfigError, and nothing is
        loaded, for a file that raises, lacks `Name` or declares what no kernel can be."""
        import hashlib

        if self.path.exists() and not is_regular(self.path):
            raise self.wrong(f"is {kind_of(self.path)}, not a file")
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise self.wrong(f"cannot be read: {error.strerror}") from error
        digest = hashlib.sha256(content).hexdigest()[:8]
        loaded = _loaded.get((self.path, self.name))
        if loaded is None or loaded[0] != digest:
            title = f"vllm_kernel_{re.sub(r'[^a-zA-Z0-9]', '_', self.path.stem)}_{digest}"
            try:
                backend = self._import(title, content)
                provider = self._provider_of(backend, loaded[1] if loaded else "")
            except ConfigError:
                sys.modules.pop(title, None)
                raise
            registry.register(provider, backend, f"{self.path.name} {digest}")
            loaded = _loaded[self.path, self.name] = digest, provider
        specs = registry.backend(loaded[1]).SPECS
        return {spec.family: spec.backend for spec in specs}

    def _import(self, title: str, content: bytes) -> Any:
        """`Name` of the file, loaded as module `title`; of this content, whatever is compiled
        beside the file."""
        module = ModuleType(title)
        module.__file__ = str(self.path)
        sys.modules[title] = module  # dataclasses look their module up
        try:
            exec(compile(content, str(self.path), "exec"), vars(module))
        except (Exception, SystemExit) as error:  # whatever a foreign file raises
            text = " ".join(str(error).split())
            raise self.wrong(f"the file raises {type(error).__name__}: {text}") from error
        found = getattr(module, self.name, None)
        if found is None:
            names = [name for name in vars(module) if not name.startswith("_")]
            raise self.wrong(
                f"the file has no {self.name}: it takes the name of an object with SPECS and a "
                f"maker{did_you_mean(self.name, names)}"
            )
        return found

    def _provider_of(self, backend: Any, replaced: str) -> str:
        """What all of its names begin with. replaced: of an earlier content of the file."""
        specs = getattr(backend, "SPECS", None)
        if not isinstance(specs, tuple | list) or not specs:
            raise self.wrong(f"SPECS is {specs!r}; it takes a tuple of KernelSpec")
        for field in ("BEFORE", "MAKES"):
            if hasattr(backend, field):
                raise self.wrong(f"{field} is for backends of packages; leave it out")
        for spec in specs:
            if problem := _spec_problem(spec):
                raise self.wrong(problem)
            _check_maker(backend, spec.family, self)
        by_family = {(spec.family, spec.backend) for spec in specs}
        providers: set[str] = {spec.backend.partition("-")[0] for spec in specs}
        if len(providers) > 1 or len(by_family) > len({family for family, _ in by_family}):
            names = ", ".join(sorted({spec.backend for spec in specs}))
            raise self.wrong(f"SPECS name {names}; it takes one backend, and one for each family")
        (provider,) = providers
        known = {n.partition("-")[0] for f in registry.FAMILIES for n in registry.backend_names(f)}
        if provider in known - {replaced}:
            raise self.wrong(f"a backend {provider!r} exists already; give it another name")
        return provider

    def wrong(self, text: str) -> ConfigError:
        return ConfigError(f"--kernel {self}: {text}")


_loaded: dict[tuple[Path, str], tuple[str, str]] = {}  # digest of the file and provider


def _spec_problem(spec: Any) -> str:
    """What is wrong with an entry of SPECS; "" for nothing."""
    if not isinstance(spec, KernelSpec):
        return f"SPECS has {spec!r}; it takes KernelSpec"
    if spec.family not in FAMILIES:
        return f"family {spec.family!r}; it takes {' or '.join(FAMILIES)}"
    if not isinstance(spec.backend, str) or not re.fullmatch(_BACKEND, spec.backend, re.ASCII):
        return f"backend {spec.backend!r}; it takes a name such as mine or mine-fast"
    accepted: dict[str, Callable[[str], object]] = {
        "devices": partial(re.fullmatch, _DEVICE),
        "formats": formats().__contains__,
        "dtypes": _DTYPES.__contains__,
        "act": list(ActScheme).__contains__,
    }
    examples = {
        "devices": "cpu, sm_9x, sm_90",
        "formats": ", ".join(formats()),
        "dtypes": ", ".join(_DTYPES),
        "act": ", ".join(ActScheme),
    }
    for field, takes in accepted.items():
        values = getattr(spec, field)
        is_set = isinstance(values, frozenset) and bool(values)
        if not is_set or not all(isinstance(value, str) and takes(value) for value in values):
            return f"{field} = {values!r}; it takes a frozenset of {examples[field]}"
    for field in ("n_align", "k_align"):
        value = getattr(spec, field)
        if type(value) is not int or value < 1:
            return f"{field} = {value!r}; it takes a whole number from 1 up"
    if spec.compiles not in _COMPILES:
        return f"compiles = {spec.compiles!r}; it takes {' or '.join(map(repr, _COMPILES))}"
    return ""


def _check_maker(backend: Any, family: str, own: OwnBackend) -> None:
    import inspect

    maker = getattr(backend, family, None)
    wanted = f"{family}(problem, tensors, candidate)"
    if not callable(maker):
        raise own.wrong(f"SPECS has a kernel of family {family}, and there is no {wanted}")
    try:
        inspect.signature(maker).bind(None, None, None)
    except TypeError as error:
        raise own.wrong(f"its maker does not take {wanted}: {error}") from error
    except ValueError:  # no signature, as of a built-in
        return
