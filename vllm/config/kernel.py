"""Which kernels the user asks for."""

from pathlib import Path

from vllm.config.emulate import Emulated
from vllm.config.model_rule import REQUANT
from vllm.config.policy import KernelPreferences
from vllm.errors import ConfigError, did_you_mean
from vllm.formats.readers.base import QuantizationConfig
from vllm.kernels import registry
from vllm.kernels.own_backend import OwnBackend
from vllm.kernels.registry import FLAGS
from vllm.kernels.select.grade import Grade
from vllm.utils.dataclasses import dataclass

ON_UNMET = ("error", "fallback")


@dataclass(frozen=True)
class KernelConfig:
    """kernel: `PATTERN=BACKEND` for layers whose name matches, or `PATTERN=path/to/file.py:Name`
    for a backend of a file; relative paths become absolute ones. linear_backend, moe_backend,
    attention_backend: for every layer of the kind; None lets the selector choose, `emulate:` is
    explained in vllm/config/emulate.py. on_unmet: what
    happens where a backend that was asked for cannot run. require_native: refuse weight-only and
    emulated kernels for weights with a native one. max_requant_error: most relative Frobenius
    error that re-quantising a weight at load may cause. requant: when weights may be re-quantised
    to UE8M0 scales, a value of REQUANT: but for models known to lose accuracy, only where nothing
    is rounded, or always. require_evidence: the least that must be known of a kernel on this
    chip, a Grade. dump_decisions: a file for the decisions.
    """

    kernel: tuple[str, ...] = ()
    linear_backend: str | None = None
    moe_backend: str | None = None
    attention_backend: str | None = None
    on_unmet: str = "error"
    require_native: bool = False
    max_requant_error: float | None = None
    requant: str = REQUANT[0]
    require_evidence: str = Grade.COMPILED
    dump_decisions: Path | None = None

    def __post_init__(self) -> None:
        texts = tuple(str(OwnBackend.parse(text) or text) for text in self.kernel)
        object.__setattr__(self, "kernel", texts)
        self.load_backends()
        for family, name in self._backends():
            if Emulated.parse(family, name) is None:
                registry.check_backend_name(family, name, FLAGS[family])
        if self.on_unmet not in ON_UNMET:
            raise ConfigError(
                f"--on-unmet {self.on_unmet!r}: it takes {', '.join(ON_UNMET)}"
                f"{did_you_mean(self.on_unmet, ON_UNMET)}"
            )
        if self.requant not in REQUANT:
            raise ConfigError(
                f"--requant {self.requant!r}: it takes {', '.join(REQUANT)}"
                f"{did_you_mean(self.requant, REQUANT)}"
            )
        if self.require_evidence not in tuple(Grade):
            raise ConfigError(
                f"--require-evidence {self.require_evidence!r}: it takes {', '.join(Grade)}"
                f"{did_you_mean(self.require_evidence, tuple(Grade))}"
            )
        error = self.max_requant_error
        if error is not None and not 0 <= error < float("inf"):
            raise ConfigError(
                f"--max-requant-error {error}: it takes a relative error from 0 up, such as 0.01"
            )
        dump = self.dump_decisions
        if dump is not None and (dump.is_dir() or not dump.parent.is_dir()):
            raise ConfigError(f"--dump-decisions {dump}: it takes a file in a folder that exists")

    def load_backends(self) -> None:
        """Those of files, in each process that uses this configuration; before libraries are
        looked at, which is when a build's kernels are listed."""
        for text in self.kernel:
            if (own := OwnBackend.parse(text)) is not None:
                own.load()

    def _backends(self) -> tuple[tuple[str, str], ...]:
        given = {
            "linear": self.linear_backend,
            "moe": self.moe_backend,
            "attention": self.attention_backend,
        }
        return tuple(
            (family, name)
            for family, name in given.items()
            if name is not None and not registry.is_automatic(family, name)
        )

    def preferences(self, quant_config: QuantizationConfig | None) -> KernelPreferences:
        """What was asked for, as `make_policy` takes it."""
        return KernelPreferences(
            kernels=self.kernel,
            backends=self._backends(),
            on_unmet=self.on_unmet,
            require_native=self.require_native,
            max_requant_error=self.max_requant_error,
            requant=self.requant,
            require_evidence=self.require_evidence,
            use_deep_gemm=quant_config.use_deep_gemm if quant_config is not None else None,
            model_rule=quant_config.model_rule if quant_config is not None else "",
            is_exact=quant_config is not None and bool(quant_config.exact_scales),
        )
