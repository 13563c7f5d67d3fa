"""`vllm kernels plot`: points are those of the tables, and what the decision takes is marked."""

import argparse
import re
import sys
from dataclasses import replace
from math import exp, log
from xml.etree import ElementTree

import pytest
from selection_cases import ask, linear, timed

from vllm.entrypoints.cli.kernels_explain import asked_model
from vllm.entrypoints.cli.main import main
from vllm.kernels.evidence.tables import find_tables, timings_of
from vllm.kernels.report.curves import PALETTE, colours, curves_of
from vllm.kernels.report.plot import Panel, picture
from vllm.kernels.report.question import GPUS
from vllm.kernels.select.grade import Grade

pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"
MODEL = "Qwen3-8B-FP8", "--device", "h100", "--libs", "all"
TIMED = timed(skinny=(1, 8), deep_gemm=(64, 4096))
Points = list[tuple[int, float]]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> int:
    return main(["kernels", "plot", *words])


def scale(ticks: list[tuple[float, float]]):
    """From (place, value) pairs of an axis that is logarithmic, from any place to its value."""
    (a, low), *_, (b, high) = sorted(ticks)
    assert b > a
    return lambda at: exp(log(low) + (at - a) / (b - a) * (log(high) - log(low)))


def coordinates(path: str) -> list[tuple[float, float]]:
    numbers = list(map(float, re.findall(r"-?\d+\.?\d*", path)))
    return list(zip(numbers[::2], numbers[1::2]))


class Picture:
    """What a file of matplotlib shows, from its text alone."""

    def __init__(self, svg: str):
        self.root = ElementTree.fromstring(svg)
        self.axes = [g for g in self.root.iter(f"{SVG}g") if g.get("id", "").startswith("axes_")]

    @property
    def texts(self) -> str:
        """Lines that were wrapped are whole."""
        texts = ("".join(text.itertext()) for text in self.root.iter(f"{SVG}text"))
        return " ".join(" ".join(texts).split())

    def groups(self, kind: str) -> dict[tuple[int, str], list[ElementTree.Element]]:
        """By panel and backend, groups whose id begins with `kind`."""
        found: dict[tuple[int, str], list[ElementTree.Element]] = {}
        for g in self.root.iter(f"{SVG}g"):
            match = re.fullmatch(rf"{kind}-(\d+)-(.+?)(-\d+)?", g.get("id", ""))
            if match:
                found.setdefault((int(match[1]), match[2]), []).append(g)
        return found

    def points(self, kind: str) -> dict[tuple[int, str], Points]:
        found = {}
        for (panel, backend), groups in self.groups(kind).items():
            x, y = (self.scale(panel, name) for name in "xy")
            pairs = [at for g in groups for at in coordinates(g.find(f"{SVG}path").get("d"))]
            found[panel, backend] = sorted((round(x(a)), y(b)) for a, b in pairs)
        return found

    def scale(self, panel: int, axis: str):
        ticks = []
        for g in self.axes[panel].iter(f"{SVG}g"):
            if g.get("id", "").startswith(f"{axis}tick_"):
                (mark,) = g.iter(f"{SVG}use")
                ticks.append((float(mark.get(axis)), float(g.find(f".//{SVG}text").text)))
        return scale(ticks)


def drawn(tmp_path, *words: str) -> Picture:
    assert run(*words, "-o", str(tmp_path / "a.svg")) == 0
    return Picture((tmp_path / "a.svg").read_text())


def asked_layers(tp: int):
    args = argparse.Namespace(dtype="auto", tp=tp, ep=1)
    return asked_model("Qwen3-8B-FP8", args, GPUS["h100"].device).problems


# ---------------------------------------------------------------- the command


def test_points_are_those_of_the_table_and_the_chosen_one_is_marked(tmp_path):
    """Of all four FP8 layers, by what the table and the decision say."""
    shown = drawn(tmp_path, *MODEL, "--tp", "2")
    tables = find_tables(GPUS["h100"])
    problems = {name: p for name, p in asked_layers(2) if "layers.0." in name}
    names = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert len(shown.axes) == len(names)
    points, chosen = shown.points("times"), shown.points("chosen")
    for panel, name in enumerate(names):
        problem = next(p for key, p in problems.items() if key.endswith(f".{name}"))
        timings = timings_of(tables, problem)
        decision = ask(problem, "90", timings=timings)
        assert decision.winner.parts, "else nothing tells marks of ranges apart"
        assert {b for number, b in points if number == panel} == {b for b, _ in timings.us}
        for backend, us in timings.us:
            expected = [(m, t) for m, t in zip(timings.tokens, us) if t is not None]
            check(points[panel, backend], expected)
            ranges, low = [], 1
            for limit, part in decision.winner.parts:
                ranges += [(low, limit or 10**9)] * (part == backend)
                low = (limit or 0) + 1
            own = [(m, t) for m, t in expected if any(a <= m <= b for a, b in ranges)]
            check(chosen.get((panel, backend), []), own)
    assert "H100 80GB HBM3, 2026-" in shown.texts and "132 SMs" in shown.texts
    assert "4096x6144" in shown.texts and "tuned/sm_90_132_3352.json" in shown.texts


def check(found: Points, expected: Points) -> None:
    assert [m for m, _ in found] == [m for m, _ in expected]
    assert [us for _, us in found] == pytest.approx([us for _, us in expected], rel=1e-3)


def style(group: ElementTree.Element) -> str:
    return group.find(f"{SVG}path").get("style")


ESTIMATED = replace(
    TIMED, grade=Grade.ESTIMATED, error=tuple((name, (0.1,) * len(us)) for name, us in TIMED.us)
)


def test_measured_times_and_estimates_are_told_apart():
    for timings, is_dashed in ((TIMED, False), (ESTIMATED, True)):
        panel = Panel(ask(linear(), "90", timings=timings), ["model.layers.0.proj"])
        shown = Picture(picture([panel], "x", ".svg").decode())
        lines = [g for groups in shown.groups("times").values() for g in groups]
        assert len(lines) == 2 and bool(shown.groups("error")) == is_dashed
        for line in lines:
            assert ("stroke-dasharray" in style(line)) == is_dashed
            marks = {use.get("style") for use in line.iter(f"{SVG}use")}
            assert all(("fill: #ffffff" in mark) == is_dashed for mark in marks)


def test_imported_times_have_a_band_of_their_error(tmp_path):
    shown = drawn(tmp_path, "Qwen3.5-35B-A3B-FP8", "--device", "b200", "--libs", "all",
                    "--layer", "*.experts")  # fmt: skip
    assert shown.groups("error").keys() == shown.groups("times").keys()
    assert "imported" in shown.texts


def test_a_picture_is_the_same_file_each_time(tmp_path):
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        assert run(*MODEL, "--layer", "*.o_proj", "-o", str(file)) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_texts_stay_inside_of_a_picture_of_one_panel(tmp_path):
    shown = drawn(tmp_path, *MODEL, "--layer", "*.down_proj")
    texts = ["".join(text.itertext()) for text in shown.root.iter(f"{SVG}text")]
    assert max(map(len, texts)) <= 70 and "3352 GB/s" in shown.texts


def test_other_kinds_of_files(tmp_path):
    assert run(*MODEL, "-o", "a.png") == 0 and run(*MODEL, "-o", "a.html") == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    page = (tmp_path / "a.html").read_text()
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    assert len(Picture(svg).axes) == 4 and page.startswith("<!doctype html>")
    assert run(*MODEL) == 0 and (tmp_path / "kernel_times.svg").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("Qwen3-8B-FP8", "--device", "h1000"), "h1000"),
        (("Qwen3-8B-FP9", "--device", "h100"), "Qwen3-8B-FP9"),
        ((*MODEL, "-o", "a.pdf"), "it takes a name in .svg, .png, .html"),
        ((*MODEL, "-o", "a"), "it takes a name in .svg, .png, .html"),
        ((*MODEL, "-o", "/dev/null/a.svg"), "/dev/null/a.svg cannot be written"),
        ((*MODEL, "--layer", "*.down_prj"), "did you mean *.down_proj"),
        ((*MODEL, "--layer", "lm_head"), "run vllm kernels tune"),
        ((*MODEL, "--tp", "3"), "3"),
        ((*MODEL, "--quantization", "fp9"), "fp9"),
        ((*MODEL, "--hf-overrides", '{"hidden": 1}'), "hidden"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_said_in_one_line(capsys, words, text):
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm: error: ") and error.count("\n") == 1 and text in error


def test_without_matplotlib_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(*MODEL) == 2
    error = capsys.readouterr().err
    assert "needs matplotlib: pip install 'vllm[plot]'" in error and error.count("\n") == 1


# ---------------------------------------------------------------- curves


def test_a_kernel_of_another_version_is_no_measurement_and_one_that_may_not_run_is_marked():
    stale = replace(TIMED, stale=(("skinny", "1", "2"),))
    curves = {c.backend: c for c in curves_of(ask(linear(), "90", timings=stale))}
    assert curves["deep_gemm"].is_measured and not curves["skinny"].is_measured
    excluded = ask(linear(), "90", "all", "VLLM_USE_DEEP_GEMM=0", timings=TIMED)
    can_run = {c.backend: c.can_run for c in curves_of(excluded)}
    # skinny takes too few tokens for all, and is a part of splits.
    assert can_run == {"deep_gemm": False, "skinny": True}


def test_no_time_is_no_picture():
    decision = ask(linear(), "90")
    assert curves_of(decision) == ()


def test_each_kernel_has_one_colour():
    assert len(set(PALETTE)) == len(PALETTE)
    of = colours(curves_of(ask(linear(), "90", timings=TIMED)))
    assert len(set(of.values())) == len(of) > 1


def test_a_model_is_drawn_as_vllm_serve_reads_it(tmp_path):
    half = '{"intermediate_size": 6144}'
    whole, other = (picture_text(tmp_path, *words) for words in ((), ("--hf-overrides", half)))
    assert "24576" in whole and "12288" in other and "24576" not in other


def picture_text(tmp_path, *words: str) -> str:
    path = tmp_path / "x.svg"
    assert run(*MODEL, "--layer", "*.gate_up_proj", *words, "-o", str(path)) == 0
    return path.read_text()
