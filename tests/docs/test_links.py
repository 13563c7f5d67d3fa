"""What the pages refer to exists: pages, headings, files, flags, variables, metrics."""

import argparse
import re

import pytest
from doc_pages import PAGES, REPOSITORY, anchors, blocks, inline_codes, links, text_of

from vllm import envs
from vllm.architectures.registry import known
from vllm.engine.metrics import Metrics
from vllm.entrypoints.cli import serve
from vllm.entrypoints.compatibility.tables import table
from vllm.kernels.report import upstream

_BUILT = ("vllm/lib", "vllm/lib/libvllm_kernels.so")
_FOLDERS = ("vllm/", "tests/", "benchmarks/", "csrc/", "cmake/", "docs/", "deploy/", ".github/")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_and_headings_that_exist(page):
    for link in links(page):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (REPOSITORY / page).parent / file if file else REPOSITORY / page
        assert target.exists(), f"{page} links to {link}"
        if anchor:
            name = target.resolve().relative_to(REPOSITORY).as_posix()
            assert anchor in anchors(name), f"{page} links to {link}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    named = [code for code in inline_codes(page) if code.startswith(_FOLDERS) and " " not in code]
    for code in named:
        path = code.partition(":")[0]
        if not re.search(r"[<{*]", path) and path not in (
            "vllm/lib",
            "vllm/lib/libvllm_kernels.so",
        ):
            assert (REPOSITORY / path).exists(), f"{page} names {code}"


def test_every_page_is_reached_from_the_index():
    linked = {link.partition("#")[0].removeprefix("../") for link in links("docs/index.md")}
    pages = {page.removeprefix("docs/") for page in PAGES} - {"index.md", "README.md"}
    assert pages <= linked


def test_every_flag_of_vllm_serve_is_on_the_page_of_flags():
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    actions = parser._subparsers._group_actions[0].choices["serve"]._actions
    written = set(inline_codes("docs/deployment.md"))
    missing = [
        action.option_strings
        for action in actions
        if action.dest != "help" and action.option_strings
        if written.isdisjoint(action.option_strings)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_variables_that_are_named_exist(page):
    build = {"VLLM_STRICT_ARCHS", "VLLM_OUTPUT_DIR", "VLLM_RACECHECK", "VLLM_BUILT_"}
    settings = {setting for entry in upstream.table().entries for setting in entry.settings}
    others = build | set(map(upstream.name_of, settings))
    others |= {row.name.rstrip("*") for row in table("variables").rows}
    for name in set(re.findall(r"\bVLLM_[A-Z0-9_]+", text_of(page))) - others:
        assert name in envs.VARIABLES, f"{page} names {name}"


def test_every_variable_is_on_a_page_of_variables():
    written = text_of("docs/deployment.md") + text_of("docs/kernels.md")
    assert [name for name in envs.VARIABLES if f"| `{name}` |" not in written] == []


def test_the_table_of_metrics_is_what_the_server_exports():
    exported = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name
        for metric in Metrics("model", max_model_len=64).registry.collect()
        if metric.name.startswith("vllm:")
    }
    written = {code for code in inline_codes("docs/deployment.md") if code.startswith("vllm:")}
    assert written == exported


def test_the_table_of_architectures_is_what_the_engine_serves():
    served = (one for one in known().values() if getattr(one, "is_served", True))
    written = [code for code in inline_codes("docs/models.md") if re.search(r"For[A-Z]", code)]
    assert sorted(written) == sorted(name for one in served for name in one.hf_architectures)


@pytest.mark.parametrize("page", PAGES)
def test_commands_stand_in_blocks_of_the_shell(page):
    """Where test_commands.py finds them; docs/kernels.md shows what `vllm kernels docs` ran."""
    if page == "docs/kernels.md":
        return
    for block in blocks(page):
        if not block.language:
            assert not re.search(r"^(\$ )?(vllm|make|pip|python|curl) ", block.text, re.MULTILINE)
    assert not re.search(r"^    (vllm|make|pip|python|curl) ", text_of(page), re.MULTILINE)
