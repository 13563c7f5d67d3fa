"""`explain` and an engine that is built for the same machine say the same, layer by layer.

The engine is built as at a start, but on torch's `meta` device, which takes neither memory nor the
chip, and stops where weights would be laid out for their kernels.
"""

import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from machines import Cpu, Gpu, machine
from questions import FP8_TOKEN, FP8_WEIGHTS, Question, compressed, question
from slow import quick

from vllm import LLM, envs
from vllm.config.selection import Facts
from vllm.distributed.parallel import planned
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli import kernels_explain
from vllm.entrypoints.cli.main import Parser
from vllm.errors import VllmError
from vllm.executor.uniproc import engine_layout, make_selection
from vllm.kernels import registry
from vllm.kernels.evidence.quarantine import Failure, add_failure
from vllm.kernels.evidence.tables import Entry, Table, write_table
from vllm.kernels.evidence.versions import version_of
from vllm.kernels.report import json_report
from vllm.kernels.report.html_report import html_page
from vllm.kernels.report.json_report import parse_report
from vllm.kernels.report.question import chip_of, device_of, libs_of
from vllm.kernels.report.report import Report
from vllm.kernels.select.decision import NoKernelError
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.reason import Why
from vllm.model_executor.model_loader import build_model
from vllm.model_executor.model_loader.checkpoint import Checkpoint
from vllm.platforms.probe import installed_kernel_libs, probe_chip, probe_libs

# Of 2000 questions: from the number of one to that of another. Those of `make test` are the fewest
# that have every kind.
SHARES = [*pairwise((0, 125, *range(500, 2001, 250)))]


class Answer(NamedTuple):
    """shown: the JSON; None where nothing was decided. refusal: why no engine starts; "" where one
    does. page: the JSON in the page."""

    shown: dict[str, Any] | None
    refusal: str = ""
    page: dict[str, Any] | None = None

    @property
    def is_served(self) -> bool:
        """As far as `explain` tells."""
        facts = (self.shown or {}).get("model", {"served": True})
        return facts["served"] and not self.refusal


def _parser(add: Callable[[Any], object]) -> Parser:
    parser = Parser()
    add(parser)
    return parser


EXPLAIN = _parser(kernels_explain.add_explain)
SERVE = _parser(EngineArgs.add_cli_args)


def explained(asked: Question, folder: Path) -> Answer:
    """What `vllm kernels explain --json` prints, and --html writes."""
    page = folder / "page.html"
    words = [str(folder), "--json", "--html", str(page), "--device", asked.device]
    words += ["--dtype", asked.dtype]
    words += ["--kv-cache-dtype", asked.kv_cache_dtype, "--tp", str(asked.tp), *asked.flags]
    words += ["--ep", str(asked.tp * asked.dp)] if asked.is_ep else []
    words += ["--libs", asked.libs] if asked.libs is not None else []
    words += [word for pair in asked.variables.items() for word in ("--env", "=".join(pair))]
    args = EXPLAIN.parse_args(words)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = args.run(args)
    except VllmError as error:
        return Answer(None, str(error))
    finally:
        for name in asked.variables:
            envs.set_for_children(name, None)
    said = err.getvalue().rpartition("vllm: error: ")[2] if code else ""
    return Answer(json.loads(out.getvalue()), said, page_data(page.read_text()))


def built(asked: Question, folder: Path) -> Answer:
    """What /kernels shows of an engine."""
    device, reports, refusal = device_of(asked.device), [], ""
    with machine(Gpu(device.capability.to_int()) if device.capability else Cpu()) as patch:
        for name, value in asked.variables.items():
            patch.setenv(name, value)
        try:
            config = engine_args(asked, folder).create_engine_config(device)
            libs = libs_of(asked.libs, device) if asked.libs else installed_kernel_libs(device)
            facts = Facts.of(chip_of(asked.device, device), libs)
            checkpoint = Checkpoint(folder) if asked.stored else None
            for stage in range(asked.pp):
                selection = make_selection(config, facts)
                reports.append(selection.report())
                layout = engine_layout(config, stage * asked.tp + asked.rank)
                with torch.device("meta"):
                    build_model(config, selection, checkpoint, planned(layout, asked.is_ep))
        except VllmError as error:
            is_for_want = isinstance(error, NoKernelError)
            refusal = f"no kernel: {error}" if is_for_want else str(error)
    if not reports:
        return Answer(None, refusal)
    shown = json.loads(json.dumps(json_report.report(*Report.of_stages(reports))))
    # As the server makes it of what an engine sent.
    return Answer(shown, refusal, page_data(html_page(parse_report(shown), "model")))


def page_data(page: str) -> dict[str, Any]:
    """The JSON in a page."""
    match = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.S)
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    return data


def engine_args(asked: Question, folder: Path) -> EngineArgs:
    words = ["--tensor-parallel-size", str(asked.tp), "--data-parallel-size", str(asked.dp)]
    words += ["--pipeline-parallel-size", str(asked.pp)]
    words += ["--enable-expert-parallel"] if asked.is_ep else []
    words += ["--dtype", asked.dtype, "--kv-cache-dtype", asked.kv_cache_dtype, *asked.flags]
    words += ["--load-format", "auto" if asked.stored else "dummy", "--skip-tokenizer-init"]
    return EngineArgs.from_cli_args(SERVE.parse_args(words), str(folder))


# ---------------------------------------------------------------- comparing


def differences(said: Answer, done: Answer) -> Iterator[str]:
    """Between what `explain` said and what the engine did, and of each to its page."""
    for name, answer in (("explain", said), ("the engine", done)):
        if answer.page != answer.shown:
            yield f"the page of {name} has other JSON"
    if said.is_served != (not done.refusal):
        yield f"refusal: {said.refusal!r} against {done.refusal!r}"
    if done.shown is None:
        return
    if said.shown is None:
        # What is refused once all layers have asked.
        if said.refusal != done.refusal and not is_refused_earlier(done):
            yield f"refusal: {said.refusal!r} against {done.refusal!r}"
        return
    for name in ("device", "libs", "env"):
        if said.shown[name] != done.shown[name]:
            yield f"{name}: {said.shown[name]} against {done.shown[name]}"
    ours, theirs = by_layer(said.shown), by_layer(done.shown)
    # One that stops at a layer has asked for those before it.
    if not (theirs.keys() <= ours.keys() if done.refusal else list(theirs) == list(ours)):
        yield f"layers: {list(ours)} against {list(theirs)}"
    for layer in ours.keys() & theirs.keys():
        mine, its = ours[layer], theirs[layer]
        if wrong := [name for name in {**mine, **its} if mine.get(name) != its.get(name)]:
            shown = ", ".join(f"{name} {mine.get(name)} against {its.get(name)}" for name in wrong)
            yield f"{layer}: {shown}"


def is_refused_earlier(done: Answer) -> bool:
    """Whether the engine stopped at a layer, before it looked at what all layers asked for."""
    return done.refusal.startswith(("no kernel", "model.layers.", "lm_head"))


def by_layer(shown: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By layer and family the decision: problem, chosen, origin, candidates, reasons."""
    return {
        f"{layer} ({entry['problem']['family']})": {**entry, "layers": None}
        for entry in shown["decisions"]
        for layer in entry["layers"]
    }


# ---------------------------------------------------------------- the property


def kinds(answer: Answer) -> set[str]:
    """What decided, what spoke against kernels, and of which families problems were."""
    found = set() if answer.is_served else {"refused"}
    for entry in (answer.shown or {"decisions": []})["decisions"]:
        found |= {f"rank {entry['origin']['rank']}", entry["problem"]["family"]}
        found |= {r["why"] for c in entry["candidates"] for r in c["reasons"]}
        found |= {name for name in ("emulated", "event", "timings") if name in entry}
    return found


# Every origin, kind of reason and family of problems.
KINDS = {f"rank {rank}" for rank in range(1, 8)} | {*Why, *registry.FAMILIES}
KINDS |= {"refused", "emulated", "event", "timings"}
# A requested backend that is passed over, and a budget that decides: none or few in a share.
RARE = {"rank 4", "rank 5"}


@pytest.mark.parametrize("share", quick(SHARES, SHARES[:1]), ids=str)
def test_explain_and_the_engine_give_the_same_answer(share, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    folder, seen = tmp_path / "model", Counter()
    folder.mkdir()
    for number in range(*share):
        asked = question(number)
        asked.write(folder)
        said, done = explained(asked, folder), built(asked, folder)
        found = "\n".join(differences(said, done))
        assert not found, f"explain against the engine, for question {number}, {asked}:\n{found}"
        seen.update(kinds(said))
    assert not KINDS - RARE - seen.keys(), "too few questions of a kind"
    assert 0.2 < seen["refused"] / len(range(*share)) < 0.6


# ---------------------------------------------------------------- single questions

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
TEXT = {k: v for k, v in LLAMA.items() if k != "architectures"} | {"model_type": "mistral"}
MISTRAL3 = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": TEXT,
}
CHANNELS = compressed("float-quantized", FP8_WEIGHTS | {"strategy": "channel"}, FP8_TOKEN)
TIED = LLAMA | {"tie_word_embeddings": True, "quantization_config": CHANNELS}
HEAD = {"lm_head.weight": ("F32", bytes(8))}


@pytest.mark.parametrize(
    ("asked", "field", "value"),
    [
        (Question(LLAMA | {"dtype": "float32"}, "sm_100", "all"), "dtype", "bf16"),
        (Question(LLAMA | {"dtype": "float16"}, "sm_100", "all"), "dtype", "fp16"),
        (Question(MISTRAL3 | {"dtype": "float16"}, "sm_100", "all"), "dtype", "fp16"),
        (Question(TIED, "sm_100", "all"), "weight", "bf16"),
        (Question(TIED, "sm_100", "all", stored=HEAD), "weight", "fp8-channel"),
        (Question(LLAMA | {"dtype": "bfloat16"}, "cpu", "all"), "weight", "bf16"),
        (Question(LLAMA | {"dtype": "bfloat16"}, "cpu", "all", stored=HEAD), "weight", "fp32"),
    ],
    ids=["float32", "float16", "beside text_config", "tied", "tied in name", "config", "file"],
)
def test_the_output_projection_is_the_one_that_the_engine_loads(asked, field, value, tmp_path):
    asked.write(tmp_path)
    said, done = explained(asked, tmp_path), built(asked, tmp_path)
    assert not [*differences(said, done)]
    assert by_layer(said.shown)["lm_head (linear)"]["problem"][field] == value


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            {"tp": 4, "config": {"intermediate_size": 544}},
            r"down_proj.*: 136 columns are not whole groups of 16",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
            {"config": {"intermediate_size": 644, "hidden_size": 256}},
            r"gate_up_proj.*: 644 rows cannot be packed by 8",
        ),
        ({}, {"tp": 2, "is_ep": True}, "this model has no experts"),
    ],
)
def test_what_the_engine_refuses_is_refused_with_the_same_words(changes, options, words, tmp_path):
    config = LLAMA | changes | options.pop("config", {})
    asked = Question(config, "sm_100", "all", **options)
    asked.write(tmp_path)
    for answer in (explained(asked, tmp_path), built(asked, tmp_path)):
        assert re.search(words, answer.refusal)


# ---------------------------------------------------------------- this machine


def write_evidence(folder: Path, problem: LinearProblem) -> None:
    """For this problem here: a kernel in quarantine, and measurements of it and of another."""
    chip, libs = probe_chip(), probe_libs()
    versions = {
        spec.backend: version_of(spec, libs, chip.device)
        for spec in registry.specs("linear")
        if spec.backend in ("cpu", "torch")
    }
    day, key, device = "2026-11-24", problem.size_key, str(chip.device)
    add_failure(Failure("cpu", versions["cpu"], device, key, "numerics", "is wrong", day))
    times = {"cpu": ((1, 5.0),), "torch": ((1, 9.0),)}
    entries = {name: Entry(versions[name], day, us) for name, us in times.items()}
    write_table(folder / chip.file_name, Table(chip, "a CPU", {key: entries}))


def test_explain_without_a_device_and_an_engine_that_serves_here(
    checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    folder = str(checkpoint("qwen3_moe"))
    options = {"kv_cache_dtype": "fp8", "kernel": ["*.o_proj=torch"]}
    words = [folder, "--json", "--kv-cache-dtype", "fp8", "--kernel", "*.o_proj=torch"]
    (tmp_path / "kernel_tables").mkdir()
    for has_evidence in (False, True):
        args = EXPLAIN.parse_args(words)
        assert args.run(args) == 0
        said = json.loads(capsys.readouterr().out)
        llm = LLM(folder, skip_tokenizer_init=True, max_num_seqs=4, **options)
        done = json.loads(json.dumps(llm.llm_engine.core.executor.kernels()))
        assert said.pop("model")["served"] and done.pop("ledger")
        assert said == done
        first = llm.llm_engine.core.selection.records[0][1]
        assert first.chosen == ("torch" if has_evidence else "cpu")
        assert (first.timings is not None) == has_evidence
        write_evidence(tmp_path / "kernel_tables", first.problem)
