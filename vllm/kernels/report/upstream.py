"""Flags and variables that make upstream's current vLLM and SGLang take the kernels decided here.

The table holds what their documentation, or a thread of their repositories, says: each row with
the release that its source describes, and the source's address. A row whose source describes
another release than the current one is shown as inferred.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.kernels.report.layer_groups import by_decision
from vllm.kernels.report.text_report import NO_KERNEL, columns
from vllm.kernels.select.decision import Decision, Record
from vllm.kernels.select.reason import Why


class Release(NamedTuple):
    """The current release of an engine, and what starts its server."""

    name: str
    version: str
    command: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Source(NamedTuple):
    """version: the release that the page or thread describes; `latest`: an undated page."""

    url: str
    version: str


RELEASES = {
    "vllm": Release("vLLM", "0.33.0", "vllm serve MODEL"),
    "sglang": Release("SGLang", "0.5.23", "python -m sglang.launch_server --model-path MODEL"),
}

_VLLM, _SGLANG = "https://docs.vllm.ai/en", "https://docs.sglang.io/docs"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_LINEAR = Source(f"{_VLLM}/latest/features/quantization/kernels/", "latest")
_PER_QUANT = Source(f"{_VLLM}/latest/features/quantization/index.html", "latest")
_FP8 = Source(f"{_VLLM}/v0.32.0/features/quantization/llm_compressor/fp8/", "0.32.0")
_MOE = Source(f"{_VLLM}/latest/design/moe_kernel_features/", "latest")
_MOE_VALUES = Source(f"{_VLLM}/v0.18.0/api/vllm/config/kernel/", "0.18.0")
_MOE_FP8 = Source(f"{_ISSUES}/50332", "0.26.0")
_MOE_HOPPER = Source(f"{_ISSUES}/34249", "0.15.2rc1")
_ATTENTION = Source(f"{_VLLM}/v0.32.0/design/attention_backends/", "0.32.0")
_SG_GEMM = Source(f"{_SGLANG}/advanced_features/quantization", "latest")
_SG_MOE = Source(f"{_SGLANG}/advanced_features/expert_parallelism", "latest")
_SG_ARGUMENTS = Source(f"{_SGLANG}/advanced_features/server_arguments", "latest")
_SG_VARIABLES = Source("https://docs.sglang.io/references/environment_variables.html", "latest")

_FP8_SCALARS = ("fp8-tensor", "fp8-channel")
_FP8_ALL = ("fp8-block", *_FP8_SCALARS)
_HALF = ("bf16", "fp16")
_PLAIN = (*_HALF, "fp32")
_ANY: tuple[str, ...] = ()
_HOPPER, _BLACKWELL = ("sm_9x",), ("sm_10x", "sm_12x")


@dataclass(frozen=True, slots=True)
class Row:
    """What makes an engine serve layers of `family` in these formats by its kernel of our
    `backend`; () for every format or chip.

    name, value: of a flag (`--linear-backend`) or of a variable; value "": `note` says why there is
    none. chips: names or families that the source limits the value to. note: what the source says
    besides. inferred: what it does not say.
    """

    engine: str
    family: str
    formats: tuple[str, ...]
    backend: str
    name: str
    value: str
    source: Source
    chips: tuple[str, ...] = ()
    note: str = ""
    inferred: str = ""

    @property
    def setting(self) -> str:
        return self.name + (" " if self.name.startswith("-") else "=") + self.value

    @property
    def grade(self) -> str:
        """How far the source carries: the release it describes, and what is inferred from it."""
        release = RELEASES[self.engine]
        if self.source.version == release.version:
            return f"inferred: {self.inferred}" if self.inferred else "documented"
        known = "undated" if self.source.version == "latest" else f"of {self.source.version}"
        text = f"{known}; inferred for {release.version}"
        return f"{text}, and {self.inferred}" if self.inferred else text


def _rows(
    engine: str, family: str, name: str, source: Source, *values: tuple[str, tuple[str, ...], str]
) -> Iterator[Row]:
    """Rows of one flag from one source. values: (our backend, formats, the flag's value)."""
    for backend, formats, value in values:
        yield Row(engine, family, formats, backend, name, value, source)


_QUANTISED_ONLY = "--linear-backend is for quantised layers only"
_CUTLASS_EXPERTS = (
    "CUTLASS experts are documented for NVFP4 and for FP8 per tensor and per token, not for FP8 "
    "blocks"
)
_SG_BLOCKS_ONLY = "--fp8-gemm-backend is for FP8 blocks only"
_NO_FORMATS = "the page names no weight formats"

ROWS: tuple[Row, ...] = (
    # ------------------------------------------------------------ vLLM
    *_rows(
        "vllm", "linear", "--linear-backend", _LINEAR,
        ("deep_gemm", ("fp8-block",), "deep_gemm"),
        ("scaled_mm", _FP8_SCALARS, "torch"),
        ("cutlass", (*_FP8_ALL, "nvfp4"), "cutlass"),
        ("triton", ("fp8-block",), "triton"),
        ("flashinfer-cutlass", ("fp8-block", "nvfp4"), "flashinfer_cutlass"),
        ("flashinfer-trtllm", ("nvfp4",), "flashinfer_trtllm"),
        ("marlin", (*_FP8_ALL, "nvfp4", "int4-group"), "marlin"),
        ("humming", (*_FP8_ALL, "nvfp4", "int4-group"), "humming"),
    ),
    Row("vllm", "linear", _PLAIN, "torch", "--linear-backend", "", _FP8, note=_QUANTISED_ONLY),
    *_rows(
        "vllm", "moe", "--moe-backend", _MOE,
        ("deep_gemm", ("fp8-block",), "deep_gemm"),
        ("cutlass", ("nvfp4",), "cutlass"),
        ("triton", _FP8_ALL, "triton"),
        ("flashinfer-cutlass", ("nvfp4",), "flashinfer_cutlass"),
        ("marlin", (*_FP8_ALL, "nvfp4", "int4-group"), "marlin"),
    ),
    Row("vllm", "moe", ("fp8-block",), "cutlass", "--moe-backend", "", _MOE, note=_CUTLASS_EXPERTS),
    Row("vllm", "moe", _HALF, "triton", "--moe-backend", "triton", _MOE_VALUES,
        inferred="that page does not say that the flag reaches unquantised experts"),
    Row("vllm", "moe", ("fp8-block",), "flashinfer-cutlass", "--moe-backend", "flashinfer_cutlass",
        _MOE_HOPPER, chips=_HOPPER),
    Row("vllm", "moe", ("fp8-block",), "flashinfer-trtllm", "--moe-backend", "flashinfer_trtllm",
        _MOE_FP8, inferred="the thread names it among the FP8 candidates, not blocks"),
    *_rows(
        "vllm", "attention", "--attention-backend", _ATTENTION,
        ("triton", _ANY, "TRITON_ATTN"),
        ("flashinfer", _ANY, "FLASHINFER"),
        ("cpu", _ANY, "CPU_ATTN"),
    ),
    # ------------------------------------------------------------ SGLang
    Row("sglang", "linear", ("fp8-block",), "deep_gemm", "--fp8-gemm-backend", "deep_gemm",
        _SG_GEMM, chips=("sm_90", "sm_100")),
    Row("sglang", "linear", ("fp8-block",), "flashinfer-trtllm", "--fp8-gemm-backend",
        "flashinfer_trtllm", _SG_GEMM, chips=("sm_100",)),
    Row("sglang", "linear", ("fp8-block",), "flashinfer-cutlass", "--fp8-gemm-backend",
        "flashinfer_cutlass", _SG_GEMM, chips=("sm_100", "sm_120")),
    Row("sglang", "linear", ("fp8-block",), "flashinfer-deepgemm", "--fp8-gemm-backend",
        "flashinfer_deepgemm", _SG_GEMM, chips=("sm_90",)),
    Row("sglang", "linear", ("fp8-block",), "cutlass", "--fp8-gemm-backend", "cutlass", _SG_GEMM,
        chips=("sm_120",)),
    Row("sglang", "linear", ("fp8-block",), "triton", "--fp8-gemm-backend", "triton", _SG_GEMM),
    Row("sglang", "linear", ("fp8-channel",), "cutlass", "--quantization", "w8a8_fp8", _SG_GEMM,
        note="for activations per token; it ignores the quantisation config of the checkpoint"),
    Row("sglang", "linear", ("fp8-tensor",), "cutlass", "--fp8-gemm-backend", "", _SG_GEMM,
        note=_SG_BLOCKS_ONLY),
    Row("sglang", "linear", _FP8_SCALARS, "scaled_mm", "--fp8-gemm-backend", "", _SG_GEMM,
        note=_SG_BLOCKS_ONLY),
    Row("sglang", "linear", _FP8_ALL, "marlin", "SGLANG_FORCE_FP8_MARLIN", "1", _SG_VARIABLES),
    Row("sglang", "linear", ("nvfp4",), "flashinfer-cutlass", "--fp4-gemm-backend",
        "flashinfer_cutlass", _SG_GEMM, chips=("sm_100", "sm_120")),
    Row("sglang", "linear", ("nvfp4",), "flashinfer-trtllm", "--fp4-gemm-backend",
        "flashinfer_trtllm", _SG_GEMM, chips=("sm_100",)),
    Row("sglang", "linear", ("nvfp4",), "marlin", "--fp4-gemm-backend", "marlin", _SG_GEMM,
        chips=("sm_8x", "sm_89", "sm_90")),
    Row("sglang", "linear", _PLAIN, "torch", "--fp8-gemm-backend", "", _SG_GEMM,
        note="the flags for GEMMs are for FP8 blocks, MXFP8 and NVFP4 only"),
    Row("sglang", "moe", ("fp8-block",), "deep_gemm", "--moe-runner-backend", "deep_gemm", _SG_MOE),
    Row("sglang", "moe", (*_FP8_ALL, *_HALF), "triton", "--moe-runner-backend", "triton", _SG_MOE,
        inferred=_NO_FORMATS),
    Row("sglang", "moe", ("fp8-block",), "cutlass", "--moe-runner-backend", "cutlass",
        _SG_VARIABLES, chips=_BLACKWELL,
        inferred="the page says FP8 (SGLANG_CUTLASS_MOE, which the flag replaces), not blocks"),
    Row("sglang", "moe", ("nvfp4",), "flashinfer-cutlass", "--moe-runner-backend",
        "flashinfer_cutlass", _SG_MOE, chips=_BLACKWELL),
    Row("sglang", "moe", ("fp8-block",), "flashinfer-trtllm", "--moe-runner-backend",
        "flashinfer_trtllm", _SG_MOE, chips=_BLACKWELL, inferred=_NO_FORMATS),
    *_rows(
        "sglang", "attention", "--attention-backend", _SG_ARGUMENTS,
        ("triton", _ANY, "triton"),
        ("flashinfer", _ANY, "flashinfer"),
        ("torch", _ANY, "torch_native"),
    ),
)  # fmt: skip

# What keeps DeepGEMM from every layer.
EXCLUSIONS = {
    "vllm": Row(
        "vllm", "", ("fp8-block",), "deep_gemm", "VLLM_USE_DEEP_GEMM", "0", _FP8,
        note="vLLM's own model rule did not reach experts in 0.26 to 0.28 "
        f"({_MOE_FP8.url})",
    ),
    "sglang": Row(
        "sglang", "", ("fp8-block",), "deep_gemm", "SGLANG_ENABLE_JIT_DEEPGEMM", "0", _SG_VARIABLES,
    ),
}  # fmt: skip

# What separates weight formats under one flag.
_PER_FORMAT = {
    ("vllm", "linear"): (
        "--kernel-config '{\"linear_backend_per_quant\": {...}}' sets it per quantisation scheme "
        f"({_PER_QUANT.url}, undated, names the scheme nvfp4_w4a16 only)"
    )
}


# ---------------------------------------------------------------- what the table says of decisions


class Answer(NamedTuple):
    """What chooses `backend` for these layers: setting, "" for nothing, with the reason as `text`.
    row: what says so, None where nothing is documented. is_part: it serves some M of each of the
    layers, other kernels the rest."""

    family: str
    format: str
    backend: str
    is_part: bool
    setting: str
    text: str
    row: Row | None
    layers: list[str]


@dataclass(frozen=True)
class Advice:
    """answers: of distinct kernels. excluding: what keeps DeepGEMM away, as excluded_by does here.
    contradictions: settings that cannot hold together. overreach: settings that also decide what
    other kernels serve here. settings: those that do not contradict each other."""

    engine: str
    answers: list[Answer]
    excluding: Row | None
    excluded_by: list[str]
    contradictions: list[str]
    overreach: list[str]
    settings: list[str]


def advice(records: Iterable[Record], engine: str) -> Advice:
    """What makes `engine` (of RELEASES) take the kernels of these decisions, if anything does."""
    decisions = by_decision(records)
    answers: dict[tuple[Any, ...], Answer] = {}
    for decision, layers in decisions.items():
        for answer in _answers(decision, engine):
            answers.setdefault(answer[:-1], answer).layers.extend(layers)
    found = list(answers.values())
    excluded_by = _excluded_by(decisions)
    excluding = EXCLUSIONS[engine] if excluded_by else None
    contradictions, contradicting = _contradictions(found, engine)
    settings = dict.fromkeys(answer.setting for answer in found if answer.setting)
    if excluding and any(answer.backend == excluding.backend for answer in found):
        contradictions.append(
            f"{excluding.setting} excludes DeepGEMM from all layers, and here it serves some"
        )
    elif excluding:
        settings = {excluding.setting: None, **settings}
    kept = [setting for setting in settings if setting not in contradicting]
    overreach = _overreach(found, kept)
    return Advice(engine, found, excluding, excluded_by, contradictions, overreach, kept)


def _answers(decision: Decision, engine: str) -> Iterator[Answer]:
    """One of each kernel of the decision, without layers."""
    family, weight_format = decision.problem.family, decision.problem.format
    if decision.chosen is None:
        text = "no kernel serves these layers here"
        yield Answer(family, weight_format, NO_KERNEL, False, "", text, None, [])
        return
    names = list(dict.fromkeys(name for _, name in decision.winner.parts)) or [decision.chosen]
    is_part = len(names) > 1
    for name in names:
        row = None if decision.is_emulated else _row_of(engine, decision, name)
        missing = _missing(row, engine, decision, name)
        setting = "" if missing or row is None else row.setting
        shown = name if is_part else decision.kernel or name
        yield Answer(family, weight_format, shown, is_part, setting, missing or setting, row, [])


def _row_of(engine: str, decision: Decision, backend: str) -> Row | None:
    problem = decision.problem
    own = (
        row
        for row in ROWS
        if (row.engine, row.family, row.backend) == (engine, problem.family, backend)
        and (not row.formats or problem.format in row.formats)
    )
    return next(own, None)


def _missing(row: Row | None, engine: str, decision: Decision, backend: str) -> str:
    """That nothing chooses the backend for this decision, and why; "" where something does."""
    problem, device = decision.problem, decision.device
    text = f"no flag in {RELEASES[engine]} chooses {backend} for {problem.family} {problem.format}"
    if decision.is_emulated:
        return f"{text}: it is emulated here"
    if row is None:
        return f"{text}, as far as is documented"
    if not row.value:
        return f"{text}: {row.note}"
    if row.chips and device.family not in row.chips and device.arch not in row.chips:
        return f"{text} on {device}: {row.setting} is documented for {', '.join(row.chips)} only"
    return ""


def _excluded_by(decisions: Iterable[Decision]) -> list[str]:
    """The flags, variables and rules that alone keep DeepGEMM from layers; whether the library is
    installed here does not matter."""
    texts: dict[str, None] = {}
    for decision in decisions:
        for candidate in decision.candidates:
            reasons = candidate.reasons if candidate.backend == "deep_gemm" else ()
            if all(reason.origin or reason.why is Why.LIBRARY for reason in reasons):
                texts |= dict.fromkeys(reason.origin.text for reason in reasons if reason.origin)
    return list(texts)


def _contradictions(answers: list[Answer], engine: str) -> tuple[list[str], set[str]]:
    """A text per family with settings of which one would decide what another is to decide, and all
    such settings."""
    texts: list[str] = []
    contradicting: set[str] = set()
    for family in dict.fromkeys(answer.family for answer in answers):
        own = [answer for answer in answers if answer.family == family and answer.setting]
        meant = [
            one
            for one in own
            if any(
                one.setting != other.setting and (_covers(one, other) or _covers(other, one))
                for other in own
            )
        ]
        if not meant:
            continue
        settings = dict.fromkeys(answer.setting for answer in meant)
        contradicting |= settings.keys()
        differs_by_format = len({answer.format for answer in meant}) > 1
        by = ["weight format"] * differs_by_format
        by += ["number of tokens M"] * any(answer.is_part for answer in meant)
        text = (
            f"{' and '.join(settings)} contradict each other: {RELEASES[engine]} chooses one "
            f"backend per kind of layer, and here {family} layers differ by "
            f"{' and '.join(by) or 'size'}"
        )
        if differs_by_format and (engine, family) in _PER_FORMAT:
            text += f"; {_PER_FORMAT[engine, family]}"
        texts.append(text)
    return texts, contradicting


def _overreach(answers: list[Answer], settings: list[str]) -> list[str]:
    """A text per setting that also speaks of what kernels without a setting serve."""
    others: dict[str, dict[str, None]] = {}
    for one in answers:
        for other in answers:
            if one.setting in settings and not other.setting and _covers(one, other):
                some = " for some M" * other.is_part
                text = f"{other.backend} ({other.family} {other.format}{some})"
                others.setdefault(one.setting, {})[text] = None
    return [
        f"{setting} also decides where other kernels serve here: {', '.join(texts)}"
        for setting, texts in others.items()
    ]


def _covers(one: Answer, other: Answer) -> bool:
    """Whether the flag or variable of `one` speaks of the other's layers too."""
    row = one.row
    return row is not None and any(
        same.value and (not same.formats or other.format in same.formats)
        for same in ROWS
        if (same.engine, same.family, same.name) == (row.engine, other.family, row.name)
    )


# ---------------------------------------------------------------- shown


_SAME_CODE = (
    "A flag chooses upstream's kernel of the same provider: for deep_gemm, flashinfer, humming, "
    "scaled_mm and torch the library's, for others upstream's own code, not this engine's."
)


def page(found: Advice, width: int) -> str:
    """The flags as text: a table, contradictions, what to start with, and sources."""
    release = RELEASES[found.engine]
    rows = [*(a.row for a in found.answers), found.excluding]
    sources = list(dict.fromkeys((row.source.url, row.grade) for row in rows if row is not None))
    mark = {source: f" [{number}]" for number, source in enumerate(sources, 1)}
    paragraphs = [[f"Flags of {release} for these kernels"], _table(found, mark, width)]
    if (row := found.excluding) is not None:
        text = f"{row.setting} excludes DeepGEMM, as here: {'; '.join(found.excluded_by)}"
        text += f"; {row.note}" if row.note else ""
        paragraphs.append(columns([text + mark[row.source.url, row.grade]], [], width))
    remarks = (*found.contradictions, *found.overreach)
    paragraphs += [columns([text], [], width) for text in remarks]
    if found.settings:
        paragraphs.append(columns([f"Together: {command(found)}"], [], width))
    paragraphs.append(columns([_SAME_CODE], [], width))
    if sources:
        notes = [columns([f"[{n}]", f"{url} ({grade})"], [4], width)
                 for n, (url, grade) in enumerate(sources, 1)]  # fmt: skip
        paragraphs.append([line for lines in notes for line in lines])
    return "\n\n".join("\n".join(lines) for lines in paragraphs)


def _table(found: Advice, mark: dict[tuple[str, str], str], width: int) -> list[str]:
    head = ("kernel", "layers", "serves", "flag or variable")
    rows = []
    for answer in found.answers:
        text, row = answer.text, answer.row
        if row is not None:
            text += f" ({row.note})" * bool(row.note and answer.setting)
            text += mark[row.source.url, row.grade]
        serves = f"{answer.family} {answer.format}" + ", some M" * answer.is_part
        rows.append((answer.backend, f"{len(answer.layers):>6}", serves, text))
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(3)]
    return [line for row in (head, *rows) for line in columns(row, widths, width)]


def command(found: Advice) -> str:
    """How a server is started with all settings that do not contradict each other."""
    variables = [s for s in found.settings if not s.startswith("-")]
    flags = [s for s in found.settings if s.startswith("-")]
    return " ".join([*variables, RELEASES[found.engine].command, *flags])


def to_json(found: Advice) -> dict[str, Any]:
    """The field `upstream` of `vllm kernels explain --json --for ENGINE`."""
    release = RELEASES[found.engine]
    return {
        "engine": found.engine,
        "version": release.version,
        "answers": [
            {
                "family": answer.family,
                "format": answer.format,
                "backend": answer.backend,
                "is_part": answer.is_part,
                "layers": answer.layers,
                "text": answer.text,
                "setting": answer.setting or None,
                **_source_json(answer.row),
            }
            for answer in found.answers
        ],
        "deep_gemm_excluded_by": found.excluded_by,
        "excluding": (
            {"setting": found.excluding.setting, **_source_json(found.excluding)}
            if found.excluding
            else None
        ),
        "contradictions": found.contradictions,
        "overreach": found.overreach,
        "command": command(found),
    }


def _source_json(row: Row | None) -> dict[str, Any]:
    """version: the release that the source describes."""
    if row is None:
        return {"source": None}
    return {
        "source": row.source.url,
        "version": row.source.version,
        "grade": row.grade,
        "note": row.note,
    }
