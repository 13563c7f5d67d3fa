"""`vllm kernels explain`: which kernel would serve each layer of a model on a chip, and why."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm import envs
from vllm.config.eagle3 import head_of
from vllm.config.hf_overrides import blaming
from vllm.config.kernel import KernelConfig
from vllm.config.model import with_hf_overrides
from vllm.config.selection import Facts, selection_for
from vllm.config.speculative import DRAFT_PREFIX, EAGLE3, MTP, SpeculativeConfig
from vllm.errors import CheckpointError, ConfigError, did_you_mean
from vllm.kernels.evidence.tables import missing_note
from vllm.kernels.report import diff, json_report, question, text_report, upstream, upstream_report
from vllm.kernels.report.columns import text_width
from vllm.kernels.report.report import ModelFacts, Report
from vllm.kernels.select.decision import NoKernelError
from vllm.kernels.select.problem import Problem
from vllm.kernels.selection import Selection
from vllm.machine import Device
from vllm.platforms.installed import installed_chip, installed_device
from vllm.platforms.probe import installed_kernel_libs
from vllm.utils.dataclasses import fields, replace
from vllm.utils.hub import read_json_object
from vllm.utils.terminal import takes_styles

if TYPE_CHECKING:
    from vllm.architectures.explained import Layers
    from vllm.formats.readers.base import QuantizationConfig
    from vllm.formats.readers.unread import UnreadConfig
    from vllm.kernels.report.model_files import ModelFiles
    from vllm.utils.safetensors_files import TensorShape

    SlotName = Callable[[str], str | None]

_OF_MODEL = ["quantization", "hf_overrides"]
_DRAFTS = "speculative_config"
_PREFERENCES = [f.name for f in fields(KernelConfig) if f.name != "dump_decisions"]


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """How a model is read, as `vllm serve` reads it: what `asked_model` takes."""
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs.add_cli_args(parser, "model, the flags of vllm serve", _OF_MODEL)


def check_model_flags(args: argparse.Namespace) -> None:
    """ConfigError where they are given for single layers."""
    if getattr(args, _DRAFTS, None) is not None:
        raise ConfigError("--speculative-config is for MODEL, not for --layer")
    if args.quantization is not None or args.hf_overrides is not None:
        raise ConfigError("--quantization and --hf-overrides say how MODEL is read, not --layer")


def add_explain(parser: argparse.ArgumentParser) -> None:
    from vllm.engine.arg_utils import EngineArgs

    parser.description = (
        "Show which kernel would serve each layer of MODEL on a chip, what decided, and every "
        "reason against the other kernels. Needs neither the chip nor the weights. The exit code "
        "is 1 if a layer has no kernel."
    )
    text = parser.add_argument
    text("model", nargs="?", metavar="MODEL", help="Folder, config.json, built-in name, or name on "
         "the Hugging Face hub (org/name), of any architecture.")  # fmt: skip
    text("--layer", action="append",
         help=f"One layer of size N x K instead of a model: {question.LAYER_SYNTAX}.")  # fmt: skip
    text("--diff", nargs=2, metavar=("A.json", "B.json"),
         help="Compare two files of --json or --dump-decisions; the exit code is 1 if a layer "
         "differs.")  # fmt: skip
    where = parser.add_argument_group("assumptions")
    text = where.add_argument
    text("--device", metavar="CHIP", help="sm_100, b200, 'RTX PRO 6000', cpu:avx2, ...; "
         "default: this machine's.")  # fmt: skip
    text("--libs", metavar="LIST", help="Libraries besides torch, triton and our native kernels: "
         "deep_gemm,flashinfer==0.6.13,...; all; none; default: those installed.")  # fmt: skip
    text("--tp", "--tensor-parallel-size", type=int, default=1, help="Tensor-parallel ranks.")
    text("--ep", "--expert-parallel-size", type=int, default=1, help="Expert-parallel ranks.")
    text("--dtype", default="auto", help="Dtype of activations; default: fp32 on the CPU, else "
         "the model's.")  # fmt: skip
    text("--kv-cache-dtype", default="auto", help="Dtype of the KV cache; default: as activations.")
    text("--model-type", metavar="TYPE", help="Apply the rules for this model_type.")
    text("--env", action="append", default=[], metavar="NAME=VALUE",
         help="Assume this variable, such as VLLM_USE_DEEP_GEMM=0; repeatable.")  # fmt: skip
    add_model_flags(parser)
    EngineArgs.add_cli_args(parser, "drafts, the flag of vllm serve", [_DRAFTS])
    EngineArgs.add_cli_args(parser, "preferences, the flags of vllm serve", _PREFERENCES)
    shown = parser.add_argument_group("output")
    shown.add_argument("--brief", action="store_true", help="Only the chosen kernels with "
                       "their number of layers, what decided, and notes.")  # fmt: skip
    shown.add_argument("--json", action="store_true", help="The JSON of GET /kernels.")
    shown.add_argument("--for", dest="engine", choices=upstream.ENGINES, help="Also the flags "
                       "and variables that make the current release of this engine, upstream's, "
                       "take the same kernels.")  # fmt: skip
    shown.add_argument("--html", type=Path, metavar="FILE",
                       help="Also write a page for a browser, of --diff too.")  # fmt: skip
    parser.set_defaults(run=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    if sum((args.model is not None, bool(args.layer), args.diff is not None)) != 1:
        raise ConfigError("give one of MODEL, --layer and --diff; see vllm kernels explain --help")
    if args.diff and args.engine:
        raise ConfigError("--for goes with MODEL or --layer: --diff compares what was decided")
    if args.diff:
        return _compare(Path(args.diff[0]), Path(args.diff[1]), args.json, args.html)
    selection, asked = _select(args)
    refusal = asked.refusal or _refusal(selection)
    variables, records = json_report.variable_texts(selection.variables), selection.records
    report = Report(selection.device, selection.libs, variables, records, None, asked.facts)
    found = upstream.advice(records, args.engine) if args.engine else None
    if args.json:
        print(json.dumps(upstream_report.content(report, found), indent=1))
    else:
        if args.device and args.libs is None:
            note = "note: with the libraries installed here; --libs all assumes all of them"
            print(note, file=sys.stderr)
        print(text_report.page(report, text_width(), takes_styles(sys.stdout), args.brief))
        if found is not None:
            print(f"\n{upstream_report.page(found, text_width())}")
    if args.html:
        from vllm.kernels.report.html_report import html_page

        write_text(args.html, html_page(report, args.model or ", ".join(args.layer), found))
    if refusal:
        print(f"vllm: error: {refusal}", file=sys.stderr)
    return 1 if refusal else 0


class Asked(NamedTuple):
    """(layer, problem) pairs, the model_type that rules are asked with, the quantisation config.
    facts: of a model. refusal: what makes the engine refuse it whatever kernels there are. layers:
    of a model."""

    problems: list[tuple[str, Problem]]
    model_type: str
    quant_config: Any = None
    facts: ModelFacts | None = None
    refusal: str = ""
    layers: "Layers | None" = None


def _select(args: argparse.Namespace) -> tuple[Selection, Asked]:
    """The selection after every layer has asked."""
    for text in args.env:
        _set_variable(text)
    given = {name: getattr(args, name) for name in _PREFERENCES}
    config = KernelConfig(**{**given, "kernel": tuple(args.kernel or ())})
    device = question.device_of(args.device) if args.device else installed_device()
    libs = question.libs_of(args.libs, device) if args.libs else installed_kernel_libs(device)
    asked = _problems(args, device)
    chip = question.chip_of(args.device, device) if args.device else installed_chip(device)
    if note := missing_note(chip):
        print(f"note: {note}", file=sys.stderr)
    facts = Facts.of(chip, libs)

    def selection_of(asked: Asked) -> Selection:
        preferences = config.preferences(asked.quant_config)
        return selection_for(facts, preferences, asked.model_type)

    selection = selection_of(asked)
    if (draft := _draft_model(args, device)) is not None:
        draft_selection = selection_of(draft).beside(selection, DRAFT_PREFIX)
        for name, problem in draft.problems:
            draft_selection.decide(name, problem)
    for name, problem in asked.problems:
        selection.decide(name, problem)
    return selection, asked


def _draft_model(args: argparse.Namespace, device: Device) -> Asked | None:
    """What the model asks for that drafts for MODEL; None for no such model."""
    drafts = SpeculativeConfig.of(args.speculative_config) if args.speculative_config else None
    if drafts is None or not drafts.model:
        return None
    own = argparse.Namespace(**vars(args) | dict.fromkeys([*_OF_MODEL, _DRAFTS]))
    if drafts.method != EAGLE3:
        return asked_model(drafts.model, own, device)
    with blaming(args.hf_overrides or {}):
        files, layers, slot_name, dtype = _head(drafts.model, args, device)
    return _asked(files, layers, files.local_tensors(), dtype, own, slot_name)


def _head(
    name: str, args: argparse.Namespace, device: Device
) -> "tuple[ModelFiles, Layers, SlotName, str]":
    """Of an EAGLE-3 head that drafts for MODEL, and the dtype of both."""
    from vllm.architectures import eagle3
    from vllm.architectures.explained import Layers
    from vllm.architectures.registry import describe, is_described, is_served, text_config
    from vllm.kernels.report.model_files import find_model

    model, files = find_model(args.model), find_model(name)
    if overrides := args.hf_overrides or {}:
        model.config = with_hf_overrides(model.config, overrides, args.model)
    if not (is_described(model.config) and is_served(model.config)):
        raise ConfigError(
            f"--speculative-config: method {EAGLE3} reads hidden states of a model that this "
            f"engine serves, and {args.model} is not served"
        )
    try:
        config, decoder, _ = head_of(
            files.config, describe(model.config), files.tensors(), f"{name}/config.json"
        )
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"--speculative-config: model {name}: {error}") from error
    dtype = question.dtype_of(args.dtype, text_config(model.config), device)
    layers = Layers(config.to_dict(), tuple(decoder.items()))
    return files, layers, eagle3.ARCHITECTURE.slot_name, dtype


def _set_variable(text: str) -> None:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--env {text!r}: it takes NAME=VALUE, as VLLM_USE_DEEP_GEMM=0")
    if name not in envs.KERNEL_VARIABLES:
        raise ConfigError(
            f"--env {text!r}: {name} decides nothing about kernels; it takes "
            f"{', '.join(envs.KERNEL_VARIABLES)}{did_you_mean(name, envs.KERNEL_VARIABLES)}"
        )
    envs.set_for_children(name, value)


def _problems(args: argparse.Namespace, device: Device) -> Asked:
    from vllm.architectures.registry import model_types

    asked_type = args.model_type
    if asked_type is not None and asked_type not in model_types():
        raise ConfigError(
            f"--model-type {asked_type!r}: it takes {', '.join(model_types())}"
            f"{did_you_mean(asked_type, model_types())}"
        )
    if args.layer:
        if args.tp != 1 or args.ep != 1:
            raise ConfigError(
                f"--tp and --ep cut models; write a cut layer as {question.BLOCKS}:18432/32xK"
            )
        check_model_flags(args)
        dtype = question.dtype_of(args.dtype, {}, device)
        return Asked([question.layer_of(text, dtype) for text in args.layer], asked_type or "")
    found = asked_model(args.model, args, device)
    return found._replace(model_type=asked_type) if asked_type else found


def asked_model(model: str, args: argparse.Namespace, device: Device) -> Asked:
    """args: dtype, tp, ep and, where the command has them, kv_cache_dtype, quantization and
    hf_overrides."""
    overrides = getattr(args, "hf_overrides", None) or {}
    with blaming(overrides):
        return _asked_model(model, args, device, overrides)


def _asked_model(
    model: str, args: argparse.Namespace, device: Device, overrides: "dict[str, Any]"
) -> Asked:
    from vllm.architectures.decoder import ExpertsSpec
    from vllm.architectures.explained import layers_of
    from vllm.architectures.registry import describe, known
    from vllm.kernels.report.model_files import find_model

    files = find_model(model)
    if overrides:
        files.config = with_hf_overrides(files.config, overrides, model)
    stored = files.local_tensors()
    layers = layers_of(files.config, files.tensors, stored)
    if _drafts_itself(args) and layers.is_served:
        mtp = describe(files.config, with_mtp=True).mtp
        layers = replace(layers, items=(*layers.items, *(mtp.items() if mtp else ())))
    if args.ep > 1 and not any(isinstance(item, ExpertsSpec) for _, item in layers.items):
        raise ConfigError(f"--ep {args.ep}: this model has no experts; leave it out")
    dtype = question.dtype_of(args.dtype, layers.text, device)
    slot_name = None
    if layers.is_served:
        num_layers, whole = (
            layers.text.get("num_hidden_layers"),
            known()[files.config["model_type"]],
        )
        slot_name = partial(whole.slot_name, num_layers=num_layers, drafts=_drafts_itself(args))
    return _asked(files, layers, stored, dtype, args, slot_name)


def _asked(
    files: "ModelFiles",
    layers: "Layers",
    stored: "dict[str, TensorShape]",
    dtype: str,
    args: argparse.Namespace,
    slot_name: "SlotName | None",
) -> Asked:
    """stored: tensors that are on this machine. slot_name: as of a served architecture."""
    from vllm.formats.stored_scales import with_stored_scales
    from vllm.kernels.problems import layer_problems
    from vllm.kernels.report.model_files import taken_apart, without_unread
    from vllm.utils.safetensors_files import float_weight_dtype

    quant_config, unread, refusal = *_quantization(files, getattr(args, "quantization", None)), ""
    quant_config = with_stored_scales(quant_config, files.local_folder)
    notes = [*layers.notes, *files.notes]
    if quant_config is not None and not layers.is_served:
        layers = replace(layers, items=taken_apart(layers.items, quant_config))
    if unread is not None:
        items, refusal, which = without_unread(layers.items, unread)
        layers = replace(layers, items=items, is_served=False)
        notes.append(f"{refusal}: {which}")
    problems = layer_problems(
        files.config,
        quant_config,
        dtype=dtype,
        kv_format=question.kv_format_of(getattr(args, "kv_cache_dtype", "auto"), dtype),
        tp=args.tp,
        ep=args.ep,
        layers=layers,
        stored_dtype=float_weight_dtype(stored.items()) or dtype if stored else None,
    )
    if quant_config and (text := _misfit(layers, slot_name, quant_config, args)):
        refusal = refusal or text
        layers = replace(layers, is_served=False)
        notes.append(f"the engine refuses this checkpoint: {text}")
    facts = ModelFacts(layers.is_served, tuple(notes))
    return Asked(problems, layers.text["model_type"], quant_config, facts, refusal, layers)


def _drafts_itself(args: argparse.Namespace) -> bool:
    """Whether a layer of the model's own drafts."""
    drafts = getattr(args, _DRAFTS, None)
    return drafts is not None and SpeculativeConfig.of(drafts).method == MTP


def _misfit(
    layers: "Layers", slot_name: "SlotName | None", quant_config: Any, args: argparse.Namespace
) -> str:
    """Why the engine refuses to load layers so; "" where it does not."""
    from vllm.kernels.problems import first_misfit, named_wrongly

    text = ""
    if layers.is_served and slot_name is not None:
        text = named_wrongly(layers.items, quant_config, slot_name)
    return text or first_misfit(layers.items, quant_config, args.tp, args.ep)


def _quantization(
    files: "ModelFiles", asked: str | None
) -> "tuple[QuantizationConfig | None, UnreadConfig | None]":
    """What a reader says, or what is known where none can say anything. asked: --quantization."""
    from vllm.formats.readers.registry import resolve_quantization

    stored = files.quantization()
    try:
        return resolve_quantization(stored, asked, files.name), None
    except CheckpointError as error:
        from vllm.formats.readers.unread import UnreadConfig

        assert stored is not None
        return None, UnreadConfig(stored, str(error))


def _refusal(selection: Selection) -> str:
    """What makes the engine refuse to start: a layer without a kernel, or an override that no layer
    can take; "" for nothing. ConfigError for an override that matches no layer."""
    if any(decision.chosen is None for _, decision in selection.records):
        return 'there are layers without a kernel: NO KERNEL above, "chosen": null in JSON'
    try:
        selection.check_overrides()
    except NoKernelError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------- diff


def _compare(before: Path, after: Path, as_json: bool, page: Path | None) -> int:
    old, new = _read(before), _read(after)
    names = str(before), str(after)
    found = diff.changes(old, new, names)
    if as_json:
        print(json.dumps([change.to_json() for change in found], indent=1))
    elif text := diff.page(old, new, found, text_width()):
        print(text)
    if page:
        from vllm.kernels.report.html_diff import html_diff

        write_text(page, html_diff(old, new, found, names))
    return 1 if found else 0


def _read(path: Path) -> Report:
    if not path.exists():
        raise ConfigError(f"{path} is not readable JSON: there is no such file")
    return json_report.parse_report(read_json_object(path, ConfigError), str(path))


# ---------------------------------------------------------------- output


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    print(f"wrote {path}", file=sys.stderr)
