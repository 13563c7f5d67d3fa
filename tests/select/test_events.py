"""What a choice costs beyond its kernel: here, steps that no CUDA graph can hold."""

import json
import logging

import pytest
from selection_cases import LIBS, linear, parse_device, policy_of

from vllm.kernels.report import json_report
from vllm.kernels.select.problem import AttentionProblem, KVQuantProblem
from vllm.kernels.selection import Selection

NAME = "model.layers.{}.self_attn.attn"


def attention(cache="bf16", dtype="bf16", head_dim=128, num_heads=32):
    return AttentionProblem(num_heads, 8, head_dim, cache, dtype)


def chosen(device, *problems, libs="all", wishes="-"):
    selection = Selection(parse_device(device), LIBS[libs], policy_of(wishes, device=device))
    for index, problem in enumerate(problems):
        selection.choose(NAME.format(index), problem)
    return selection


def warnings_of(selection, caplog):
    with caplog.at_level(logging.INFO):
        selection.log()
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("device", "problem", "libs"),
    [
        ("90", attention("fp32", "fp32"), "all"),
        ("121", attention(head_dim=512), "all"),
        ("90", attention(num_heads=65 * 8), "none"),
        ("75", attention("fp16", "fp16"), "none"),
        ("90", attention(), "broken"),
        ("90", KVQuantProblem(8, 128, "bf16"), "broken"),
    ],
    ids=str,
)
def test_a_kernel_that_the_host_waits_for_leaves_no_graphs_and_says_so(
    device, problem, libs, caplog
):
    selection = chosen(device, linear("bf16"), problem, problem, libs=libs)
    assert selection.needs_eager
    (line,) = warnings_of(selection, caplog)
    assert line.startswith(f"no CUDA graphs: {problem.family} {problem.dtype} by torch, for which")
    assert "triton: " in line and line.endswith("(model.layers.{1-2}.self_attn.attn)")


def test_who_asked_for_such_a_kernel_is_named(caplog):
    wish = "--kernel *.self_attn.attn=torch"
    (line,) = warnings_of(chosen("90", attention(), wishes=wish), caplog)
    assert "; --kernel *.self_attn.attn=torch (" in line and "triton: " not in line


@pytest.mark.parametrize(
    ("device", "problem"),
    [("90", attention()), ("90", attention("fp8")), ("80", attention()), ("90", linear("bf16")),
     ("cpu", attention("fp32", "fp32")), ("cpu", attention())],
)  # fmt: skip
def test_all_others_are_captured(device, problem, caplog):
    selection = chosen(device, problem)
    assert not selection.needs_eager and warnings_of(selection, caplog) == []


def test_a_saved_answer_tells_it_again():
    selection = chosen("90", attention("fp32", "fp32"))
    saved = json_report.parse_report(json.loads(json.dumps(selection.to_json())))
    again = json_report.report(saved.device, saved.libs, saved.env, saved.records)
    (decision,) = again["decisions"]
    assert decision["event"].startswith("no CUDA graphs: attention fp32 by torch")
