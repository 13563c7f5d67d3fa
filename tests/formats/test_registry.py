"""Every weight format is one file: what it declares is what quantisers, readers and kernels do."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.errors import ConfigError
from vllm.formats.act_scheme import ActScheme
from vllm.formats.registry import description, formats, kinds, quantizable
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.numerics import random_tensors
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.select import select
from vllm.machine import NATIVE, Device, Lib, Libs
from vllm.model_executor.checkpoint_formats import FORMATS

ROOT = Path(__file__).parents[2] / "vllm"
QUANTISED = [known for known in formats().values() if known.is_quantized]
KINDS = list(formats())
# Where a format may be named besides its own file: its readers, its kernels, its arithmetic, and
# the registries that list formats.
ROOMS = ("formats/readers/", "kernels/backends/", "kernels/triton/", "kernels/flashinfer/", "ops/")
REGISTRIES = {
    "formats/registry.py",
    "model_executor/layers/quantization/methods.py",
    "model_executor/checkpoint_formats.py",
    # What others call the kernels and formats that they measured.
    "kernels/evidence/importing/kernels.py",
}
ARITHMETIC = {
    "_custom_ops.py",
    "model_executor/layers/quantization/mx.py",
    "model_executor/layers/quantization/nvfp4.py",
    "model_executor/layers/quantization/int4.py",
    "model_executor/layers/quantization/int8.py",
    "model_executor/layers/quantization/fp8.py",
    "model_executor/layers/quantization/utils/fp8_utils.py",
    "model_executor/layers/quantization/utils/nvfp4_utils.py",
}


def sized(known) -> WeightFormat:
    return WeightFormat.parse(known.example)


# ---------------------------------------------------------------- who names it


@cache
def said(source: str) -> tuple[list[str], list[ast.ImportFrom]]:
    """The texts of code that are no docstrings, and what it imports names from."""
    nodes = [*ast.walk(ast.parse(source))]
    docstrings = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    texts = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]
    return texts, [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]


def names_format(source: str, kind: str, module: str) -> bool:
    """Whether code names the format: its kind in a text that is no docstring, or its module."""
    texts, imports = said(source)
    pattern = re.compile(rf"(?<![\w-]){re.escape(kind)}(?![\w-])")
    return any(map(pattern.search, texts)) or any(
        node.module == f"vllm.formats.{module}"
        or (node.module == "vllm.formats" and module in [name.name for name in node.names])
        for node in imports
    )


def module_of(kind: str) -> str:
    own = [
        file.stem
        for file in sorted((ROOT / "formats").glob("*.py"))
        if file.stem in (kind.replace("-", "_"), kind.partition("-")[0])
    ]
    return own[0]


@pytest.mark.parametrize("kind", [known.kind for known in QUANTISED])
def test_only_registries_name_a_format_outside_its_own_files(kind):
    found = {
        file.relative_to(ROOT).as_posix()
        for file in ROOT.rglob("*.py")
        if names_format(file.read_text(), kind, module_of(kind))
    }
    assert f"formats/{module_of(kind)}.py" in found or "-" in kind
    others = {name for name in found if not name.startswith(ROOMS)}
    # A format may say what its merged weights are.
    own = {f"formats/{module_of(known.kind)}.py" for known in QUANTISED}
    assert others - REGISTRIES - ARITHMETIC - own == set()


def test_the_search_finds_names_and_modules_but_not_docstrings():
    assert names_format("x = 'nvfp4'", "nvfp4", "nvfp4")
    assert names_format("from vllm.formats.nvfp4 import GROUP", "nvfp4", "nvfp4")
    assert names_format("from vllm.formats import int4, nvfp4", "nvfp4", "nvfp4")
    assert not names_format('"""Of nvfp4."""\nx = "nvfp4-group16"', "nvfp4", "nvfp4")


# ---------------------------------------------------------------- texts and shapes


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=st.tuples(st.integers(1, 999999), st.integers(1, 999999)))
def test_a_format_is_read_from_its_text(kind, sizes):
    known = description(kind)
    given_sizes = "x".join(map(str, sizes[: known.num_sizes]))
    text = f"{kind}[{given_sizes}]" if given_sizes else kind
    assert str(WeightFormat.parse(text)) == text
    assert WeightFormat.parse(text).kind == kind


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_sizes_are_refused_with_every_format(kind):
    known = description(kind)
    wrong = [f"{kind}[1x2x3]", f"{kind}[0]", f"{kind}[x]"]
    wrong += [f"{kind}[128]"] if known.num_sizes != 1 else []
    for text in wrong:
        with pytest.raises(ConfigError, match="unknown weight format") as caught:
            WeightFormat.parse(text)
        assert all(other.example in str(caught.value) for other in formats().values())


@pytest.mark.parametrize("kind", ["int4-group", "int8-group"])
def test_a_format_without_its_size_is_refused_with_one(kind):
    with pytest.raises(ConfigError, match=rf"{kind} needs a size, such as {kind}\[128\]$"):
        WeightFormat.parse(kind)


@pytest.mark.parametrize("known", formats().values(), ids=KINDS)
@pytest.mark.parametrize("rows", [(256,), (320, 64, 64)])
def test_random_weights_have_the_tensors_that_the_format_declares(known, rows):
    problem = LinearProblem(sum(rows), 512, sized(known), known.act)
    tensors = random_tensors(problem, torch.device("cpu"))
    shapes = sized(known).shapes((sum(rows),), 512)
    for stored in known.tensors:
        tensor = getattr(tensors, stored.name)
        if tensor is None:
            assert stored.is_optional
            continue
        assert tuple(tensor.shape) == shapes[stored.name], stored
        assert tensor.dtype == getattr(torch, stored.dtype), stored
    assert sized(known).shapes(rows, 512)["weight"] == shapes["weight"]


@pytest.mark.parametrize("name", FORMATS)
def test_what_vllm_quantize_writes_has_the_sizes_that_the_format_declares(name):
    known = quantizable()[name]
    chosen = FORMATS[name]({"w": 512})
    pieces = chosen.quantise("w", torch.randn(256, 512))
    size = known.quantize.sizes[0]
    shapes = WeightFormat.of(known.kind, size).shapes((256,), 512)
    numbers = {
        "weight": shapes["weight"][0] * shapes["weight"][1],
        "scales": shapes["scales"][0] * shapes["scales"][1],
    }
    codes = pieces.get("w", pieces.get("w_packed"))
    scales = pieces.get("w_scale", pieces.get("w_scale_inv"))
    assert codes.nbytes == numbers["weight"] and scales.numel() == numbers["scales"]


def test_every_format_that_vllm_quantize_claims_can_be_written():
    assert set(FORMATS) == set(quantizable())


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize("known", formats().values(), ids=KINDS)
@pytest.mark.parametrize("chip", ["cpu", "sm_90"])
def test_every_format_has_a_kernel(known, chip):
    device = Device.parse(chip)
    dtype = "bf16" if chip != "cpu" else "fp32"
    problem = LinearProblem(256, 512, sized(known), known.act, dtype=dtype)
    libs = Libs.of([Lib("torch"), Lib("triton", "3.4"), Lib(NATIVE), registry.built()])
    decision = select(problem, device, libs, Policy(), registry.specs("linear"))
    assert decision.chosen is not None


@pytest.mark.parametrize("known", QUANTISED, ids=lambda known: known.kind)
def test_a_format_declares_what_follows_from_its_tensors(known):
    assert known.act[-1] is ActScheme.NONE
    assert known.rounded_scales is not None
    assert (known.codes_per_byte > 1) == (known.tensors[0].dtype == "uint8")
    assert not known.merged_kind or known.merged_kind in formats()
    assert known.kind in kinds(known.element)
    assert all(rows >= 1 and columns >= 1 for rows, columns in known.sizes)
