"""docs/kernels.md, written from what the kernels declare: `vllm kernels docs`.

Every table comes from the specs, every example from running its command. A test asserts that the
committed file is what this writes.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.formats.scales import Scales, estimated
from vllm.kernels import registry
from vllm.kernels.default_order import DEVICE_ORDER
from vllm.kernels.report import catalog, upstream, upstream_report
from vllm.kernels.report.question import BLOCKS, PACKED
from vllm.kernels.report.text_report import GRADES, KINDS
from vllm.kernels.select.reason import (
    DEFAULT_ORDER,
    RANK_ACCURACY,
    RANK_CONFIG,
    RANK_FLAG,
    RANK_LAYER,
    RANK_MEASURED,
    RANK_VARIABLE,
)
from vllm.machine import CHIPS, Device

_FLAGS = ", ".join(f"`{flag}`" for flag in registry.FLAGS.values())
_RANKS = (
    (
        RANK_LAYER,
        "`--kernel 'PATTERN=BACKEND'` or `'PATTERN=path/to/file.py:Name'`",
        "layers whose name matches the pattern; a backend of a file serves no others "
        "([backends.md](backends.md))",
    ),
    (RANK_FLAG, _FLAGS, "every layer of that kind whose format the backend takes"),
    (RANK_VARIABLE, "an environment variable that is set", "see the table of variables"),
    (RANK_CONFIG, "`use_deep_gemm` of the quantisation config", "FP8 block layers of the model"),
    (
        RANK_ACCURACY,
        "accuracy: `--max-requant-error`, `--requant exact-only`, the model rule",
        "weights that a kernel would round a second time; the rule: those of models known to lose "
        "accuracy by it",
    ),
    (RANK_MEASURED, "a measurement", "a chip and sizes in a [table of measurements](tuning.md)"),
    (DEFAULT_ORDER.rank, "the default order", "the order of the tables below"),
)
_HAS_RUN = {"cpu", "sm_90", "sm_9x"}
_MARK = " †"
_NEVER_RUN = {("linear", "humming"), ("moe", "flashinfer-cutlass")}  # on any chip

_MODEL = "Qwen3.5-35B-A3B-FP8"
_EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        "A model on a chip, with every library that a kernel can use. The model rule applies.",
        f"vllm kernels explain {_MODEL} --device sm_100 --libs all",
    ),
    (
        "A column-parallel layer over 32 ranks with partial scale blocks, for 1 to 64 tokens.",
        f"vllm kernels explain --layer {BLOCKS}:18432/32x7168:1,64 --device sm_90 --libs deep_gemm",
    ),
    (
        "A library without code for the chip.",
        f"vllm kernels explain --layer {BLOCKS}:4096x7168 --device sm_121 --libs deep_gemm",
    ),
    (
        "A requested backend that cannot run is refused, with exit code 1.",
        f"vllm kernels explain --layer {PACKED}:4096x7168 --device sm_90 --libs none "
        "--linear-backend cutlass",
    ),
    (
        "The effect of one variable: two reports compared. The exit code is 1, as of `diff`.",
        f"vllm kernels explain {_MODEL} --device sm_100 --libs all --json > rule.json\n"
        f"vllm kernels explain {_MODEL} --device sm_100 --libs all --env VLLM_USE_DEEP_GEMM=1 "
        "--json > obeyed.json\n"
        "vllm kernels explain --diff rule.json obeyed.json",
    ),
    (
        "What makes upstream's vLLM take the same kernels.",
        f"vllm kernels explain {_MODEL} --device sm_100 --libs all --brief --for vllm",
    ),
)


def document() -> str:
    """The whole file."""
    sections = (
        _HEAD,
        _MODELS,
        _precedence(),
        _reasons(),
        _grades(),
        _kernels(),
        _chips(),
        _variables(),
        _numerics(),
        _REQUANT,
        _CUTS,
        _upstream(),
        _examples(),
    )
    return "\n\n".join(section.strip() for section in sections) + "\n"


_HEAD = """
# Kernel selection

This file is written by `vllm kernels docs` from the declared kernels; do not edit it.

The engine chooses a kernel for each layer once, when the model is loaded. A layer is described by a
*problem*: its sizes per rank, the weight format, the activation schemes that the checkpoint allows,
and dtypes. `select`, a pure function, maps the problem, the chip, the installed libraries, the
preferences and the declared kernels to a *decision*. The decision keeps every candidate in order of
preference with every reason against it. All reports show the same decisions:

- `vllm kernels explain MODEL --device sm_100 --libs all`: on any machine, without the chip and the
  weights. `--json` for programs, `--html FILE` for a browser, `--diff A.json B.json` for the effect
  of a change, with `--html FILE` as a page too; `--for vllm` or `--for sglang` for
  [upstream's flags](#flags-of-upstream-engines).
- `GET /kernels` of a running server: the decisions in force, as a page in a browser
  (`Accept: text/html` first), as JSON for all other clients, with the numbers of tokens that its
  steps had ([serving.md](serving.md#steps-and-measurements)).
- `vllm serve --dump-decisions FILE`: the same JSON.
- the log of the engine: one line per distinct decision.
- `vllm kernels list`: the declared kernels.

`explain` and the engine decide by one function of the same facts. `tests/select/test_one_truth.py`
asks both 2,000 random questions and compares every layer, candidate and reason, on the page too.

The page is one file that needs no network: layers down, candidates across, a split as ranges of M
(the number of tokens of a step) in one cell. The colour of a cell is the kind of its verdict, the
circle its evidence. Reasons, evidence and the estimated error stand beside the cell that the
pointer or the keyboard selects (Tab, arrow keys; Esc closes), and in full in print. Rows are
filtered by layer (`mlp.experts`, `*.5.mlp.*`) and by verdict. The element with the id `report` has
the JSON of `--json`.
"""

_MODELS = """
## Models that can be explained

`MODEL` is a folder, a config.json, the name of a built-in model, or a name on the Hugging Face hub
(`org/name`). Of a model on the hub, config.json, hf_quant_config.json and the headers of the
safetensors files are fetched, and nothing else; copies in the local cache come first.
`--quantization` and `--hf-overrides` mean what they mean to `vllm serve`:

```bash
vllm kernels explain Qwen3-8B-FP8 --hf-overrides '{"quantization_config": null}' --brief
```

Architectures that the engine does not serve are explained too. The report says "not served by this
engine" (`model.served` in JSON) and where the layers come from, in this order:

1. the description of the architecture, where this engine has one (of a class
   that it does not run);
2. the names and shapes of the tensors, where MODEL has safetensors files;
3. the fields of config.json, by the names that model families give them. Sizes are then those that
   the fields imply, not those of the weights.

Kinds of layers that are not known are left out, and the report counts them, as it names fields that
are not taken into account. Attention and experts that no kernel here computes (sparse MLA, other
activation functions than SiLU) are listed without a kernel, and the exit code is 1. Layers whose
quantisation is not read are named in a note with the name of their format.
"""

_REQUANT = """
## Re-quantisation at load: ledger and budget

Where the chosen kernel takes another form of scales than the checkpoint has, weights are
re-quantised at load. This cannot be undone. The *ledger* records every such transform: the layer,
the transform, the relative Frobenius error and the largest change of an element. A transform that
changes no value, such as that of scales which are powers of two already, is marked exact. The log
has one summary line; `GET /kernels` and `--dump-decisions` have the entries (`ledger`).

What a second rounding costs is known before anything is loaded where the checkpoint's scales are
powers of two: `scale_fmt` of its quantisation config is `ue8m0`, or its scale tensors say so (they
are read at the start, and by `explain` from a local folder). Then nothing is lost, and no rule or
budget applies. Elsewhere the loss is estimated from the format, and measured at load.

`--requant` says when weights may be rounded a second time: `model-rule` (default: not those of
models known to lose accuracy by it; for others a warning tells the estimated loss), `exact-only`
(never), `allow` (always). `--max-requant-error 0.01` sets a budget: a kernel whose re-quantisation
exceeds it for a layer, measured or estimated, is rejected (`numerics`), and the next one serves the
layer.

NVFP4 checkpoints have an input scale for each expert. TensorRT-LLM's experts (`flashinfer-trtllm`)
quantise a token once, by the largest of them; those between the products stay. The weights are as
stored. Where the scales differ the ledger says by how much (`of_inputs`), which is no error of a
weight: no budget counts it. The other kernels quantise for each expert.
"""

_CUTS = """
## Partial scale blocks of a shard

A shard of 576 rows of a weight with 128-row scale blocks begins inside a block on every second
rank. No checkpoint is refused for this, and the arithmetic stays the same. The decision names one
of two exact layouts and its cost in bytes per rank:

- **refined**: the scale grid is refined to the largest block that fits every shard, and scales are
  repeated. For kernels that take any block size.
- **padded**: each partial block is padded with zeros to a whole one. For kernels of fixed blocks.
"""


# ---------------------------------------------------------------- from the specs


def _precedence() -> str:
    rows = [(str(rank), who, what) for rank, who, what in _RANKS]
    return (
        "## Precedence\n\nThe lowest rank that applies to a layer decides. The decision names it "
        "(`origin`).\n\n" + _markdown(("rank", "source", "applies to"), rows) + "\n\n"
        "A requested backend (ranks 1 to 3) is used, or the start is refused with the explanation "
        "and a non-zero exit code. With `--on-unmet fallback` the next backend serves instead. "
        "`VLLM_USE_DEEP_GEMM=1` is a permission: it lifts the model rule and puts DeepGEMM before "
        "the default order, measurements still decide, and where DeepGEMM cannot run the next "
        "kernel serves; a warning says so where that is every layer. `--linear-backend deep_gemm` "
        "forces it.\n\n`--require-native` refuses weight-only and emulated kernels for quantised "
        "weights. `--require-evidence run` keeps out kernels that never ran on the chip's "
        "architecture, `measured` those that were not timed for the size.\n\n"
        "Three side effects of a decision on a GPU are reported in the log (a warning), in "
        "`explain` and in the JSON: weights that are rounded a second time, weights made for "
        "quantised activations that run weight-only, and attention for which the host waits "
        "(torch's: float32, heads over 256, or no Triton on the chip). The latter cannot be "
        "captured in a CUDA graph, so every step runs eagerly."
    )


def _reasons() -> str:
    return "## Verdicts\n\n" + _markdown(
        ("verdict", "meaning"), [(f"`{kind}`", text) for kind, text in KINDS.items()]
    )


def _grades() -> str:
    rows = [(f"`{grade}`", text) for grade, text in GRADES.items()]
    bad = [
        (f"{one.lib} {one.revision or f'{one.since} to before {one.until}'}",
         ", ".join(one.chips) or "all", ", ".join(f"{name} {a} to before {b}"
         for name, a, b in one.beside) or "-", one.what, one.source)
        for one in registry.every_known_bad()
    ]  # fmt: skip
    return (
        "## Evidence\n\nEvery candidate has a grade, the best first; a split has the least of its "
        "parts. `vllm/kernels/evidence/ran_on.json` lists the comparisons with the reference that "
        "passed, with machine, versions, date and command.\n\n"
        + _markdown(("grade", "meaning"), rows)
        + "\n\nVersions that are known to hang, or to compute what they should not, serve "
        "nothing (`vllm/kernels/evidence/known_bad.json`):\n\n"
        + _markdown(("library", "chips", "beside", "what", "source"), bad)
    )


def _kernels() -> str:
    head = ("backend", "formats", "chips", "types", "activations", "needs", "scale form", "sizes",
            "in this build")  # fmt: skip
    parts = [
        "## Kernels\n\nIn default order of preference; where chips have another one, it is below "
        "the table. *Declared only*: the limits are declared, so that choices can be explained, "
        f"but this build has no code and never runs it.{_MARK}: not run on hardware. Its limits "
        "come from the vendor's documents, and native code for it is compiled only. Experts of "
        "`flashinfer-cutlass` need a module that is built beforehand "
        "([cold-start.md](cold-start.md))."
    ]
    for family in registry.FAMILIES:
        rows = [_kernel_row(entry) for entry in catalog.entries(family)]
        parts += [f"### {family}", _markdown(head, rows), *_orders_of_devices(family)]
    return "\n\n".join(parts)


def _orders_of_devices(family: str) -> Iterator[str]:
    for own, device_family in DEVICE_ORDER:
        if own == family:
            chips = [Device.parse(chip) for chip in (*CHIPS, "cpu")]
            chip = next(chip for chip in chips if chip.family == device_family)
            mark = _MARK * (chip.arch not in _HAS_RUN and device_family != "cpu")
            names = dict.fromkeys(entry["backend"] for entry in catalog.entries(family, chip))
            order = ", ".join(f"`{name}`" for name in names)
            yield f"In default order of preference on `{device_family}`{mark}: {order}."


def _kernel_row(entry: dict[str, Any]) -> tuple[str, ...]:
    family, backend = entry["family"], entry["backend"]
    never_runs = (family, backend) in _NEVER_RUN
    cells = (
        [f"`{backend}`"],
        entry["formats"],
        [chip + _MARK * (never_runs or chip not in _HAS_RUN) for chip in entry["chips"]],
        entry["dtypes"],
        entry["activations"] if family in ("linear", "moe") else (),
        entry["needs"],
        entry["scales"],
        (*entry["limits"], *entry["guarantees"]),
        ["yes" if entry["is_built"] else catalog.DECLARED_ONLY],
    )
    return tuple(", ".join(cell) or "-" for cell in cells)


def _chips() -> str:
    rows = [
        (chip + _MARK * (chip not in _HAS_RUN), Device.parse(chip).family, gpus)
        for chip, gpus in CHIPS.items()
    ]
    return (
        "## Chips\n\nA family is the major version of the capability: 12.1 belongs to `sm_12x`, "
        "not to `sm_10x`. Code with the suffix `a` runs on its own chip only (`121a`), with `f` on "
        "later chips of its family too (`120f`).\n\n" + _markdown(("chip", "family", "GPUs"), rows)
    )


def _variables() -> str:
    rows = [
        (f"`{name}`", envs.VARIABLES[name].accepts, envs.VARIABLES[name].doc)
        for name in envs.KERNEL_VARIABLES
    ]
    return (
        "## Environment variables\n\nA variable counts only where it is set, and then takes "
        "precedence over the model rule. An invalid value is an error.\n\n"
        + _markdown(("variable", "takes", "means"), rows)
    )


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


# ---------------------------------------------------------------- numerics


def _numerics() -> str:
    rows = [
        (f"`{Scales.FLOAT32}`", "any float32 number", "nothing"),
        (
            f"`{Scales.FLOAT32_CEIL_UE8M0}`",
            "float32 numbers rounded up to powers of two",
            "what UE8M0 costs: the same arithmetic, on chips whose kernels take float32",
        ),
        (
            f"`{Scales.UE8M0}`",
            "an exponent byte, four packed in an int32",
            "a second rounding of every weight, unless its scales are powers of two already",
        ),
    ]
    return (
        "## NUMERICS: forms of FP8 block scales\n\nA checkpoint stores `w = q * s`: q in E4M3, one "
        "float32 s per block of 128x128. Kernels differ in the scales they take:\n\n"
        + _markdown(("form", "scales", "cost"), rows)
        + "\n\nA weight whose scales are rounded up to powers of two is rounded to E4M3 a second "
        "time. Where the weight is not at hand, the loss is taken to be "
        f"**{estimated(Scales.UE8M0, 'bf16').error:.2%}** (relative Frobenius error; upstream "
        "vLLM's pull request 58157 reports 2.58 to 2.72 % on layers of published models). "
        "Activations are quantised with such scales too. On `sm_9x` DeepGEMM "
        f"takes float32 scales, without loss. On `sm_10x`{_MARK} and `sm_12x`{_MARK} it takes "
        "UE8M0 only: the model rule exists for this, and `VLLM_USE_DEEP_GEMM_E8M0=0` excludes "
        "DeepGEMM there."
        f"\n\n`{Scales.ACTIVATION}` is for scales per row and per group: they are kept in bf16 or "
        "fp16, the dtype of the activations, which is exact where the checkpoint stores them so. "
        "Elsewhere the loss is measured at load and counts against the budget."
    )


# ---------------------------------------------------------------- upstream's flags


def _upstream() -> str:
    known = upstream.table()
    rows = [
        (
            known.engines[entry.engine].name,
            entry.family,
            f"`{entry.backend}`",
            ", ".join(
                [
                    *(f"`{one}`" for one in entry.formats),
                    *(f"{form} scales" for form in entry.scales),
                ]
            ),
            ", ".join(entry.chips) or "-",
            " with ".join(f"`{one}`" for one in entry.settings),
            "; ".join(upstream_report.facts(entry)) or "-",
            _links(entry.sources),
        )
        for entry in known.entries
        if entry.settings
    ]
    head = ("engine", "layers", "kernel", "formats", "chips", "flag or variable", "besides",
            "source")  # fmt: skip
    exclusions = [
        f"`{one.setting}` excludes `{one.backend}` from every layer of {known.engines[one.engine]}"
        f" ({_links(one.sources)})" + f"; {one.note}" * bool(one.note)
        for one in known.exclusions
    ]
    releases = " and ".join(map(str, known.engines.values()))
    return (
        "## Flags of upstream engines\n\n"
        "`vllm kernels explain MODEL --for vllm` (or `--for sglang`) also names the flags and "
        f"variables that make {releases} take the kernels that are chosen here. It says where no "
        "flag does, which flags contradict each other (upstream takes one backend per kind of "
        "layer, this engine one per layer and number of tokens), and which also decide where "
        "another kernel serves here. With `--json` this is the field `upstream`; a page of "
        "`--html` has it too. Each entry has its sources and the release that a source "
        "describes, `latest` for an undated page, or a month. Where that is not the current "
        "release, what it says is inferred for that one, and the output says so; what a source "
        "leaves open besides is marked as inferred below. Nothing of it was run here. A kernel "
        "that is not in the table has no documented flag; the output says what upstream does "
        "instead. All entries are in `vllm/kernels/report/upstream_flags.json`.\n\n"
        + "".join(f"- {text}\n" for text in exclusions)
        + "\n"
        + _markdown(head, rows)
    )


def _links(sources: tuple[upstream.Source, ...]) -> str:
    return ", ".join(f"[{source.version}]({source.url})" for source in sources)


# ---------------------------------------------------------------- examples


def _examples() -> str:
    parts = [
        "## Examples\n\nThe output of each command, as it runs. `--libs` names the assumed "
        "libraries, so that the output is the same on every machine."
    ]
    with tempfile.TemporaryDirectory() as folder:
        for text, script in _EXAMPLES:
            commands = "".join(f"$ {line}\n" for line in script.splitlines())
            output = "".join(_run(line, Path(folder)) for line in script.splitlines())
            parts.append(f"{text}\n\n```\n{commands}{output.rstrip()}\n```")
    return "\n\n".join(parts)


def _run(command: str, folder: Path) -> str:
    """What the command prints, errors too, with no variable of this process set."""
    words, _, file = command.partition(" > ")
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", *words.split()[1:]],
        cwd=folder,
        env={
            "COLUMNS": "100",
            "PYTHONPATH": root,
            "PYTHONIOENCODING": "utf-8",
            "VLLM_CACHE_ROOT": str(folder),  # no table of this machine's user
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if file:
        (folder / file).write_text(done.stdout)
        return done.stderr
    return done.stdout + done.stderr
