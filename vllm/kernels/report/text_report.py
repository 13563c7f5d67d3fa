"""Decisions as text for people: which kernel, why this one, and why not the others."""

from collections.abc import Iterable, Sequence

from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Requant
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.evidence.splits import TOLERANCE, Expected, expected
from vllm.kernels.evidence.steps import MAIN_STEPS
from vllm.kernels.evidence.tables import column_text
from vllm.kernels.evidence.versions import stale_lines
from vllm.kernels.report.columns import WIDTH, columns
from vllm.kernels.report.layer_groups import OutcomeGroup, by_outcome, by_text, compress, counted
from vllm.kernels.report.report import Report
from vllm.kernels.report.side_effects import side_effect_lines
from vllm.kernels.select.decision import Candidate, Decision, Evidence, Record
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import LinearProblem, Problem, WeightProblem
from vllm.kernels.select.reason import DEFAULT_ORDER, RANK_ACCURACY, Why
from vllm.kernels.select.spec import COMPILERS
from vllm.machine import BUILD, Lib

CHOSEN, COULD_RUN, NO_KERNEL = "chosen", "could run", "(none)"
# What a verdict's kind means.
KINDS: dict[str, str] = {
    CHOSEN: "serves these layers",
    COULD_RUN: "can run, but comes later in the order",
    Why.DEVICE: "does not run on this chip",
    Why.LIBRARY: "a library or our own code is missing, too old or broken",
    Why.FORMAT: "does not support the weight's format",
    Why.SHAPE: "does not support the sizes",
    Why.DTYPE: "does not support the dtype",
    Why.POLICY: "excluded by a flag, a variable or a rule, or another is requested",
    Why.NUMERICS: "different arithmetic, or loss of accuracy",
}
# What a grade of evidence says.
GRADES = {
    Grade.MEASURED: "timed for this size on this chip",
    Grade.IMPORTED: "timed by others on this chip; not run on hardware here",
    Grade.ESTIMATED: "its time is estimated",
    Grade.RUN: "its results were compared on this chip, its time was not measured",
    Grade.COMPILED: "not run on hardware",
}
_NEVER_RAN = Grade.IMPORTED, Grade.COMPILED
_KERNEL_WIDTH = 32  # of a split, which wraps
_BOLD, _PLAIN = "\033[1m", "\033[0m"
EXPECTED_TOKENS = LinearProblem(1, 1, WeightFormat("bf16")).m_range
_MOOT = "Of a kernel that does not take the format, only that is shown; --json has every reason."
_SHOWN = (1, 16, 128, 1024, 8192, *MAIN_STEPS)
_UNITS = ("bytes", "KiB", "MiB", "GiB")

# ---------------------------------------------------------------- one line


def outcome(decision: Decision) -> str:
    """One line: what was chosen for the problem, by whom, or that nothing was."""
    if decision.chosen is None:
        return f"{decision.problem} on {decision.device}: no kernel ({decision.origin.text})"
    grade = decision.winner.grade
    origin = decision.origin.text + (f"; {GRADES[grade]}" if grade in _NEVER_RAN else "")
    text = f"{decision.problem} -> {decision.kernel} ({origin})"
    choice = expectation_of(decision)
    if choice is None or choice.mean_regret < TOLERANCE - 1:
        return text
    assert decision.timings is not None
    return f"{text}: {choice.mean_regret:.1%} slower than the fastest {decision.timings.grade}"


def log_lines(records: Iterable[Record]) -> list[str]:
    """One line per distinct outcome, with the layers it covers."""
    return [f"{layers}: {text}" for text, layers in by_text(records, outcome).items()]


def verdict(candidate: Candidate, decision: Decision) -> list[tuple[str, str]]:
    """(kind, text) of each reason against the candidate, or of how it runs or could run."""
    if candidate.reasons:
        return [(str(reason.why), reason.text) for reason in candidate.reasons]
    kind = CHOSEN if candidate.backend == decision.chosen else COULD_RUN
    return [(kind, ", ".join([*how(candidate, decision), grade_text(candidate.grade)]))]


def how(candidate: Candidate, decision: Decision) -> list[str]:
    """In which way a candidate computes the problem, as far as there is something to say; of each
    part of a split what it does to activations, where they differ in that."""
    problem = decision.problem
    acts = {one.backend: act_text(one, problem) for one in decision.candidates}
    is_mixed = len({acts[backend] for _, backend in candidate.parts}) > 1
    facts = []
    for limit, backend in candidate.parts:
        tokens = "above" if limit is None else f"up to M = {limit}"
        facts.append(f"{backend} {tokens}{f' ({acts[backend]})' if is_mixed else ''}")
    if not is_mixed and (act := act_text(candidate, problem)):
        facts.append(act)
    if candidate.scales:
        facts.append(_scales_text(candidate))
    if candidate.fit is not None:
        facts.append(candidate.fit.text)
    specs = [spec for spec in registry.specs(problem.family) if spec.backend == candidate.backend]
    if specs and specs[0].compiles == COMPILERS[0]:
        facts.append("compiles for tens of seconds at a first start")
    return facts


def act_text(candidate: Candidate, problem: Problem) -> str:
    """What it does to activations; "" where the weight is not quantised."""
    is_quantized = isinstance(problem, WeightProblem) and problem.weight.is_quantized
    if not is_quantized or candidate.act is None:
        return ""
    return "weight-only" if candidate.act is ActScheme.NONE else f"activations {candidate.act}"


def grade_text(grade: Grade) -> str:
    """`measured`; of what never ran `compiled: not run on hardware`."""
    return f"{grade}: {GRADES[grade]}" if grade in _NEVER_RAN else str(grade)


def _scales_text(candidate: Candidate) -> str:
    text = f"{candidate.scales} scales"
    return text if candidate.requant is None else f"{text} ({requant_text(candidate.requant)})"


def requant_text(requant: Requant) -> str:
    """What bringing a weight to scales of another form costs it."""
    if not requant.error:
        return "exact: lossless here"
    if requant.is_estimated:
        return f"re-quantised at load, about {requant.error:.2%}, estimated from the format"
    return f"re-quantised at load, relative error {requant.error:.2%}"


# ---------------------------------------------------------------- what was measured


def expectation_of(decision: Decision) -> Expected | None:
    """What the chosen kernel is expected to take, beside all that policy alone keeps away; of one
    that quantises activations, beside those that do too: another arithmetic is asked for by name.
    """
    problem, timings = decision.problem, decision.timings
    if decision.chosen is None or timings is None:
        return None
    winner = decision.winner
    able = {
        c.backend
        for c in decision.candidates
        if all(r.why in (Why.POLICY, Why.SHAPE) for r in c.reasons)
        and (c.act is not ActScheme.NONE or winner.act is ActScheme.NONE)
    }
    return expected(timings, decision.parts, able, problem.m_range)


def expectation_text(choice: Expected, timings: Evidence) -> str:
    """`8.2 us for M = 1, 291 for 4096; 0.4% over the fastest measured, at most 2.1% (cutlass for
    M = 96)`; where times are not measured here, with their error: `estimated (+-6% to 15%)`. Of
    attention: `8.2 us for decode 1x1024, 291 for prompt 4096; ...`."""
    shown = [pair for pair in choice.us if pair[0] in _SHOWN] or [choice.us[0]]
    times = ", ".join(
        f"{us:.3g} for {m if i else column_text(m)}" for i, (m, us) in enumerate(shown)
    )
    text = f"{times.replace(' ', ' us ', 1)}; {choice.mean_regret:.1%} over the fastest"
    text += f" {timings.grade}{error_text(timings)}"
    if not choice.worst_regret:
        return text
    worst = f"{choice.fastest_there} for {column_text(choice.worst_tokens)}"
    return f"{text}, at most {choice.worst_regret:.1%} ({worst})"


def error_text(timings: Evidence) -> str:
    """` (+-6% to 15%)`: the least and the largest error of a time; "" of what was measured here."""
    errors = [error for _, own in timings.error for error in own if error]
    return f" (+-{min(errors):.0%} to {max(errors):.0%})" if errors else ""


# ---------------------------------------------------------------- tables


def table(decision: Decision, width: int = WIDTH) -> str:
    """The outcome, then every candidate in order of preference, with all reasons against it."""
    lines = columns([outcome(decision)], [], width)
    return "\n".join(lines + _candidate_lines(decision, width))


def _candidate_lines(decision: Decision, width: int, name_width: int = 0) -> list[str]:
    name_width = max([name_width, *(len(c.backend) for c in decision.candidates)])
    lines = []
    for position, candidate in enumerate(decision.candidates, 1):
        mark = ">" if candidate.backend == decision.chosen else " "
        head = f"{mark} {position:>2} {candidate.backend}"
        for kind, text in verdict(candidate, decision):
            lines += columns([head, kind, text], [name_width + 5, len(COULD_RUN)], width)
            head = ""
    return lines


# ---------------------------------------------------------------- a page


def page(report: Report, width: int = WIDTH, bold: bool = False, is_brief: bool = False) -> str:
    """Where, what was chosen for how many layers, and, unless is_brief, every candidate."""
    outcomes = by_outcome(report.records)
    facts = where(report, separator="  ").items()
    paragraphs = [[line for row in facts for line in columns(row, [9], width)]]
    model_notes = report.model.notes if report.model else ()
    paragraphs += [columns([f"Note: {text}"], [], width) for text in model_notes]
    if len(outcomes) > 1 or is_brief:
        paragraphs.append(_summary(outcomes, width, bold))
    events = [f"Event: {line}" for line in side_effect_lines(report.records)]
    events += [f"Note: {line}" for line in stale_lines(report.records)]
    paragraphs += [columns([text], [], width) for text in (*notes(outcomes), *events)]
    if is_brief:
        outcomes = []
    name_width = max((len(c.backend) for one in outcomes for c in one.candidates), default=0)
    paragraphs += [_outcome_lines(one, name_width, width, bold) for one in outcomes]
    if any(r.why is Why.FORMAT for one in outcomes for c in one.candidates for r in c.reasons):
        paragraphs.append(columns([_MOOT], [], width))
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def where(report: Report, separator: str) -> dict[str, str]:
    """The machine and, with this separator, the variables; reasons tell what is in this build."""
    libs = sorted(report.libs.libs, key=lambda lib: lib.name)
    texts = ", ".join(_lib_text(lib) for lib in libs if lib.name != BUILD)
    facts = {"device": str(report.device), "libraries": texts or "none"}
    if report.env:
        facts["variables"] = separator.join(f"{k}={v}" for k, v in report.env.items())
    return facts


def _lib_text(lib: Lib) -> str:
    if lib.broken:
        return f"{lib.name} (broken: {lib.broken})"
    carried = dict.fromkeys(arch.rpartition("/")[2] for arch in lib.archs)
    archs = f" ({' '.join(carried)})" if carried else ""
    return f"{lib.name} {lib.version}".rstrip() + archs


def _summary(outcomes: Sequence[OutcomeGroup], width: int, bold: bool) -> list[str]:
    """Stories that differ in sizes and reasons alone share a line."""
    counts: dict[tuple[str, str, str, str], int] = {}
    for one in outcomes:
        formats = dict.fromkeys(decision.problem.format for decision, _ in one.groups)
        serves = f"{one.family} {', '.join(formats)}"
        grade = str(one.winner.grade) if one.chosen else ""
        key = (one.kernel or NO_KERNEL, serves, grade, one.origin.text)
        counts[key] = counts.get(key, 0) + one.num_layers
    rows = [
        (chosen.replace("|", " | "), f"{count:>6}", serves, grade, origin)
        for (chosen, serves, grade, origin), count in counts.items()
    ]
    head = ("kernel", "layers", "serves", "evidence", "decided by")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(4)]
    widths[0] = min(widths[0], _KERNEL_WIDTH)
    first = [_strong(line, bold) for line in columns(head, widths, width)]
    return first + [line for row in rows for line in columns(row, widths, width)]


def notes(outcomes: Sequence[OutcomeGroup]) -> list[str]:
    """What the reader should know beyond the reasons: what an origin of accuracy is about."""
    found = []
    if any(one.chosen and one.winner.grade in _NEVER_RAN for one in outcomes):
        found.append(
            "Note: what is marked compiled or imported was not run on hardware: none of its "
            "results was ever compared on this chip. --require-evidence run keeps it out."
        )
    if all(one.origin.rank != RANK_ACCURACY for one in outcomes):
        return found
    return [
        *found,
        "Note: a kernel that takes UE8M0 scales (DeepGEMM on Blackwell) rounds FP8 weights a "
        "second time at load, unless their scales are powers of two, so accuracy decided here. "
        "VLLM_USE_DEEP_GEMM=1 or --requant allow lifts the model rule, and no budget.",
    ]


def _outcome_lines(one: OutcomeGroup, name_width: int, width: int, bold: bool) -> list[str]:
    title = f"{one.kernel or 'NO KERNEL'} for {counted(one.num_layers, f'{one.family} layer')}"
    lines = [_strong(title, bold)]
    lines += _indented(columns(["why", why(one)], [3], width - 2))
    lines += _indented(_group_lines(one, width - 2))
    return lines + _indented(_candidate_lines(one, width - 2, name_width))


def why(one: OutcomeGroup) -> str:
    """Who decided, what came before in the default order, and what partial blocks cost."""
    text = f"{one.origin.text} (rank {one.origin.rank} of {DEFAULT_ORDER.rank})"
    names = [
        candidate.backend
        for candidate in one.candidates
        if all(reason.why is not Why.FORMAT for reason in candidate.reasons)
    ]
    if one.chosen is None:
        text += ": no candidate can run, or the one that is asked for cannot"
    elif one.origin == DEFAULT_ORDER:
        before = names[: names.index(one.chosen)]
        listed = ", ".join(before) if len(before) < 3 else f"the {len(before)}"
        text += f": {listed} before it cannot run" if before else f": first of {len(names)}"
        if one.family in ("linear", "moe") and all(d.timings is None for d, _ in one.groups):
            text += "; nobody measured a size near these"
    fit = one.winner.fit if one.chosen else None
    if fit is None:
        return text
    total = size_text(fit.extra_bytes * one.num_layers)
    layers = f" in all {one.num_layers} layers" if one.num_layers > 1 else ""
    return f"{text}\npartial scale blocks are {fit.how}: {total} a rank{layers}"


def _group_lines(one: OutcomeGroup, width: int) -> list[str]:
    """Layers, how many, what they ask, and what the choice takes; in columns if these fit."""
    rows = [
        (compress(layers), f"{len(layers)} x", asks(decision.problem), time_lines(decision))
        for decision, layers in one.groups
    ]
    names = max(len(name) for patterns, *_ in rows for name in patterns)
    counts = max(len(count) for _, count, *_ in rows)
    texts = max(len(text) for _, _, text, _ in rows)
    lines = []
    for patterns, count, text, choices in rows:
        number = f"{count:>{counts}}"
        if counts + names + texts + 4 <= width:
            lines += columns([number, "\n".join(patterns), text], [counts, names], width)
        else:
            lines += columns([number, "\n".join([*patterns, f"  {text}"])], [counts], width)
        for choice in choices:
            lines += columns(["", f"  {choice}"], [counts], width)
    return lines


def time_lines(decision: Decision) -> list[str]:
    """What the choice is expected to take, and whether bf16 would take less; as far as known."""
    return [line for line in (expected_line(decision), bf16_line(decision)) if line]


def expected_line(decision: Decision) -> str:
    """Text of `expectation_of`; empty where nothing is known."""
    choice = expectation_of(decision)
    if choice is None or decision.timings is None:
        return ""
    return expectation_text(choice, decision.timings)


def bf16_line(decision: Decision) -> str:
    """`bf16 is faster here: 1.4x at 4096 tokens, imported from ...`; "" where it is not known to
    be."""
    found = decision.faster_in_bf16
    if found is None:
        return ""
    worst = counted(found.worst_tokens, "token")
    others = f"at {len(found.tokens)} of {counted(found.num_compared, 'token count')}"
    return (
        f"bf16 is faster here: {found.ratio:.2g}x at {worst} ({others}), imported from "
        f"{found.source}"
    )


def asks(problem: Problem) -> str:
    """The problem, and what of it its own text leaves out."""
    facts = [str(problem)]
    for name, what in (("cut_n", "rows"), ("cut_k", "columns"), ("cut", "intermediate"),
                       ("cut_experts", "experts")):  # fmt: skip
        if (ranks := getattr(problem, name, 1)) > 1:
            facts.append(f"{what} over {ranks} ranks")
    m_range = getattr(problem, "m_range", EXPECTED_TOKENS)
    if m_range != EXPECTED_TOKENS:
        facts.append(f"M = {m_range[0]}" + f" to {m_range[1]}" * (m_range[0] != m_range[1]))
    if isinstance(problem, WeightProblem) and problem.requant_error is not None:
        form = problem.weight.description.rounded_scales
        facts.append(f"in {form} scales {requant_text(Requant(problem.requant_error))}")
    return ", ".join(facts)


def size_text(num_bytes: int) -> str:
    """`+12.0 KiB`"""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"+{value:.1f} {_UNITS[unit]}" if unit else f"+{num_bytes} bytes"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]


def _strong(text: str, bold: bool) -> str:
    return f"{_BOLD}{text}{_PLAIN}" if bold else text
