"""Every name of upstream's in the tables means what its row says, by the code that runs."""

import argparse
import importlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from starlette.testclient import TestClient

from vllm import envs
from vllm.engine.metrics import Metrics
from vllm.entrypoints.cli.main import _subparser, make_parser
from vllm.entrypoints.compatibility import page
from vllm.entrypoints.compatibility.flags import translated
from vllm.entrypoints.compatibility.tables import KINDS, NO_EFFECT, OBEYED, REFUSED, TABLES, Row
from vllm.entrypoints.compatibility.tables import table as rows_of
from vllm.entrypoints.compatibility.variables import notice_of
from vllm.entrypoints.openai.api_server import validated
from vllm.entrypoints.openai.field_policy import IGNORED_FIELDS
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from vllm.errors import ConfigError

from .bare_app import bare_app
from .serving import REPOSITORY

# Values as people write them; a flag takes at least one of them.
VALUES = ("1", "32k", "-1", "auto", "text", "/path", '["*"]', "{}", '{"key": 1}', "0.5")
NOBODYS = "nobody's value"


def of_kind(table: str, kind: str) -> list[Row]:
    return [row for row in rows_of(table).rows if row.kind == kind]


def test_every_row_has_one_kind_and_says_what_that_needs() -> None:
    for name in TABLES:
        for row in rows_of(name).rows:
            assert row.kind in KINDS, row
            assert bool(row.why) >= (row.kind == NO_EFFECT), row
            assert bool(row.use) == (row.kind == REFUSED), row


def test_no_name_stands_twice() -> None:
    for name in TABLES:
        rows = rows_of(name).rows
        names = [(row.group if name == "fields" else "", n) for row in rows
                 for n in (row.name, *row.short)]  # fmt: skip
        assert len(names) == len(set(names))


# ---------------------------------------------------------------- flags


@pytest.fixture(scope="module")
def serve() -> argparse.ArgumentParser:
    return _subparser(make_parser(["serve"]), "serve")


def spellings(row: Row) -> Iterator[str]:
    yield from (row.name, *row.short)
    yield row.name.replace("-", "_").replace("__", "--", 1)


def written(row: Row, name: str, value: str | None) -> list[list[str]]:
    """The ways to write a flag with a value."""
    if value is None:
        return [[name]]
    if row.takes == "list":
        return [[name, value, "another"]]
    return [[name, value], [f"{name}={value}"]] if not name.startswith("-O") else [[f"-O{value}"]]


def dashed(words: list[str]) -> list[str]:
    from vllm.utils.argparse_utils import dashed

    return [dashed(word) for word in words]


@pytest.mark.parametrize("row", of_kind("flags", OBEYED), ids=lambda row: row.name)
def test_an_obeyed_flag_sets_what_ours_sets(row: Row, serve: argparse.ArgumentParser) -> None:
    options = {option: action for action in serve._actions for option in action.option_strings}
    ours = "--model" if row.name == "--model" else row.ours or row.name
    action = options[ours]
    if action.nargs == 0:
        values: tuple[str | None, ...] = (None,)
    else:
        values = tuple(map(str, action.choices or VALUES))
    for name in spellings(row):
        assert any(sets(action, serve, [name, *filter(None, [v])]) for v in values), name


def sets(action: argparse.Action, parser: argparse.ArgumentParser, words: list[str]) -> bool:
    own, notices = translated(dashed(words))
    is_list = isinstance(action, argparse._AppendAction)
    before: Any = [] if is_list else NOBODYS
    namespace = argparse.Namespace(**{action.dest: before})
    try:
        parsed, unknown = parser.parse_known_args(own, namespace)
    except SystemExit:  # not a value of this flag
        return False
    return not unknown and not notices and getattr(parsed, action.dest) != before


def test_a_flag_without_effect_is_told_once_whatever_its_value() -> None:
    for row in of_kind("flags", NO_EFFECT):
        values = (None,) if row.takes == "switch" else VALUES
        if row.takes == "optional":
            values = (None, "2", "3")
        for name, value in ((n, v) for n in spellings(row) for v in values):
            for words in written(row, name, value):
                own, notices = translated(["m", *dashed(words), "--port", "1"])
                assert own == ["m", "--port", "1"]
                assert len(notices) == 1 and row.why in notices[0] and row.name in notices[0]


def test_a_switch_without_effect_may_be_off() -> None:
    for row in of_kind("flags", NO_EFFECT):
        if row.takes == "switch":
            off = f"--no-{row.name[2:]}"
            own, notices = translated(["m", off])
            assert own == ["m"] and notices[0].startswith(f"{off} has no effect here")


def test_a_refused_flag_says_what_to_use_and_takes_its_neutral_values() -> None:
    for row in of_kind("flags", REFUSED):
        value = None if row.takes in ("switch", "optional") else "7"
        if row.takes == "json":
            value = '{"unheard": 7}'
        if row.neutral == ("<=100",):
            value = "101"
        if row.name == "--hf-token":
            value = "hf_x"
        for words in chain.from_iterable(written(row, name, value) for name in spellings(row)):
            with pytest.raises(ConfigError) as error:
                translated(["m", *dashed(words)])
            assert row.use in str(error.value) and row.name in str(error.value)
        for neutral in row.neutral:
            assert_neutral(row, neutral)
        if row.takes == "json":
            assert translated(["m", f"{row.name}={{}}"])[0] == ["m"]


def assert_neutral(row: Row, neutral: str) -> None:
    others: list[str] = []
    if neutral.startswith("= "):
        _, flag, *_ = neutral.split()
        others, neutral = [flag, "8"], "8"
    if row.takes == "switch":
        words = [f"--no-{row.name[2:]}"]
    elif row.takes == "optional":
        words = [row.name]
    else:
        words = [] if row.takes == "list" else [f"{row.name}={neutral.removeprefix('<=')}"]
    own, notices = translated(["m", *others, *words])
    assert own == ["m", *others] and len(notices) == bool(words)


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("-O3 -O 2 -O=1 --optimization-level 2", ""),
        ("-cc.mode=3 -cc.pass_config.fuse_norm true", ""),
        ("--compilation-config.cudagraph_mode FULL", ""),
        ("--attention-config.backend TRITON_ATTN", "--attention-backend=TRITON_ATTN"),
        ("-ac.backend=FLASHINFER", "--attention-backend=FLASHINFER"),
        ('--kernel-config={"moe_backend":"cutlass"}', "--moe-backend=cutlass"),
        ('--hf-overrides={"a":{"e":0}} --hf-overrides.a.b_c 1 --hf-overrides.d+ 2,x',
         '--hf-overrides={"a": {"e": 0, "b_c": 1}, "d": [2, "x"]}'),
        ("--enable-log-requests", "--no-disable-log-requests"),
        ("--no-enable-log-requests", "--disable-log-requests"),
        ("--device-memory-utilization 0.5", "--gpu-memory-utilization=0.5"),
        ("--load-format runai_streamer", "--load-format=auto"),
        ("--structured-outputs-config.reasoning_parser qwen3", "--reasoning-parser=qwen3"),
        ("--watermark -0.5 --port 1", "--port 1"),
        ("--api-server-count 2 -dp 2", "--api-server-count 2 -dp 2"),
        ("--data-parallel-size-local=1", ""),
        ("--limit-mm-per-prompt.image 2", ""),
    ],
)  # fmt: skip
def test_flags_become_our_own_words(words: str, own: str) -> None:
    assert " ".join(translated(words.split())[0]) == own


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--swap-space", "--swap-space takes a value"),
        ("--swap-space --port 1", "--swap-space takes a value"),
        ("--data-parallel-size-local 2 -dp 4", "--data-parallel-size-local 2 is not supported"),
        ("--structured-outputs-config.disable_any_whitespace true", "disable_any_whitespace"),
        ("--watermark-config.key x", '--watermark-config {"key": "x"}'),
        ("--hf-overrides=x --hf-overrides.a 1", "--hf-overrides has no keys"),
    ],
)
def test_what_no_flag_takes_is_refused(words: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        translated(words.split())
    assert says in str(error.value)


# ---------------------------------------------------------------- variables


def test_an_obeyed_variable_is_read() -> None:
    names = {row.name for row in of_kind("variables", OBEYED)}
    assert names <= set(envs.VARIABLES)


def test_every_other_variable_is_told_when_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = of_kind("variables", NO_EFFECT)
    names = sorted(row.name.replace("*", "X") for row in rows)
    assert not set(names) & set(envs.VARIABLES)
    for name in names:
        monkeypatch.setenv(name, "1")
    lines = envs.check_all(notice_of)
    assert [line.partition(" ")[0] for line in lines] == names
    assert all(" has no effect here: " in line for line in lines)
    assert of_kind("variables", REFUSED) == []


# ---------------------------------------------------------------- requests

REQUESTS: dict[str, tuple[type[GenerationRequest], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "a"}]},
    ),
}


def test_an_obeyed_field_is_one_of_the_request() -> None:
    for row in of_kind("fields", OBEYED):
        assert row.name in REQUESTS[row.group][0].model_fields, row


def test_a_field_without_effect_is_accepted() -> None:
    for row in of_kind("fields", NO_EFFECT):
        kind, body = REQUESTS[row.group]
        validated(kind, {**body, row.name: row.example}).check()
        assert row.name in IGNORED_FIELDS


def test_a_refused_field_is_named_in_the_error() -> None:
    for row in of_kind("fields", REFUSED):
        kind, body = REQUESTS[row.group]
        with pytest.raises(Exception) as error:
            validated(kind, {**body, row.name: row.example}).check()
        told = f"{getattr(error.value, 'param', '')} {error.value}"
        assert row.name in told, (row, told)


@pytest.fixture(scope="module")
def app() -> Any:
    """The whole application; no engine answers, because no request here needs one."""
    return bare_app()


def test_an_endpoint_that_is_served_has_a_route(app: Any) -> None:
    routes = {(method, route.path) for route in app.app.app.routes for method in route.methods}
    for row in of_kind("endpoints", OBEYED):
        assert tuple(row.name.split()) in routes, row


def test_an_endpoint_that_is_not_served_is_refused_in_openais_form(app: Any) -> None:
    client = TestClient(app)
    for row in of_kind("endpoints", REFUSED):
        method, path = row.name.split()
        answer = client.request(method, path.format(response_id="x"), json={})
        assert answer.status_code in (400, 404), row
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# ---------------------------------------------------------------- library and metrics


def is_there(name: str) -> bool:
    module, _, attribute = name.partition(":")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def test_a_library_name_can_be_imported_exactly_if_its_row_says_so() -> None:
    for row in rows_of("library").rows:
        assert is_there(row.name) == (row.kind != REFUSED), row


def test_a_metric_is_exported_exactly_if_its_row_says_so() -> None:
    exported = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name
        for metric in Metrics("model", max_model_len=64).registry.collect()
    }
    for row in rows_of("metrics").rows:
        assert (row.name in exported) == (row.kind == OBEYED), row


def test_the_committed_page_is_what_the_tables_say() -> None:
    committed = (REPOSITORY / "docs" / "compatibility.md").read_text()
    assert committed == page.document(), (
        "docs/compatibility.md is out of date: run `vllm kernels docs`"
    )
