"""A kernel's build id follows its code: sources, what they include, and flags."""

import importlib.util
import json
import shutil

import pytest
from build_tools import ROOT, Configured

spec = importlib.util.spec_from_file_location("build_ids", ROOT / "cmake" / "build_ids.py")
build_ids = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_ids)


@pytest.fixture
def tree(tmp_path):
    """a.cu includes inner/b.h, which includes ../c.h and itself; d.h belongs to nothing."""
    (tmp_path / "inner").mkdir()
    for name, text in {
        "a.cu": '#include <cuda.h>\n# include "inner/b.h"\n#include "absent.h"\nint a;\n',
        "inner/b.h": '#include "../c.h"\n#include "b.h"\nint b;\n',
        "c.h": "int c;\n",
        "d.h": "int d;\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def id_of(tree, flags: str = "-O3") -> str:
    return build_ids.build_id(flags, [tree / "a.cu"])


def test_every_file_that_is_included_counts_once(tree):
    names = [path.name for path in build_ids.with_includes([tree / "a.cu"])]
    assert sorted(names) == ["a.cu", "b.h", "c.h"]


@pytest.mark.parametrize("name", ["a.cu", "inner/b.h", "c.h"])
def test_a_change_anywhere_in_the_code_changes_the_id(tree, name):
    before = id_of(tree)
    (tree / name).write_text((tree / name).read_text() + "int more;")
    assert id_of(tree) != before


def test_comments_and_spaces_are_no_code(tree):
    before = id_of(tree)
    (tree / "c.h").write_text("// A number.\nint  /* of\n   // something */ c;\n\n")
    assert id_of(tree) == before


def test_what_a_kernel_does_not_include_and_where_the_tree_lies_change_nothing(tree):
    before = id_of(tree)
    (tree / "d.h").write_text("int other;")
    assert id_of(tree) == before
    assert id_of(shutil.copytree(tree, tree / "elsewhere")) == before


def test_flags_count(tree):
    assert id_of(tree, "-O3") != id_of(tree, "-O2")


def finish(configured: Configured) -> dict:
    """The manifest as it lies beside the library after a build."""
    folder = configured.folder
    (folder / "lib").mkdir(exist_ok=True)
    names = ("arch_manifest.json", "kernel_sources.txt", "lib")
    build_ids.main(*(folder / name for name in names))
    return json.loads((folder / "lib" / "arch_manifest.json").read_text())


@pytest.mark.slow
def test_each_kernel_of_the_manifest_has_an_id_whatever_it_is_compiled_for(nvcc, tmp_path):
    one, many = (
        Configured(tmp_path / name, TORCH_CUDA_ARCH_LIST=archs)
        for name, archs in (("one", "9.0a"), ("many", "8.0 9.0a 10.0f 12.0f"))
    )
    assert one.succeeded and many.succeeded
    first, second = finish(one), finish(many)
    assert set(first["builds"]) == set(first["kernels"]) > {"fp8_quant", "cpu_linear"}
    assert set(second["builds"]) == set(second["kernels"]) >= set(first["kernels"])
    assert first["builds"].items() <= second["builds"].items()
    assert len(set(second["builds"].values())) == len(second["builds"])
    assert {name: second[name] for name in many.manifest} == many.manifest


def test_the_manifest_is_not_written_again_where_nothing_changed(tmp_path):
    configured = Configured(tmp_path, "-DVLLM_TARGET_DEVICE=cpu")
    finish(configured)
    written = (tmp_path / "lib" / "arch_manifest.json").stat().st_mtime_ns
    finish(configured)
    assert (tmp_path / "lib" / "arch_manifest.json").stat().st_mtime_ns == written
