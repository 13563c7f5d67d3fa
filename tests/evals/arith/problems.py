"""Grade-school word problems with worked answers, in GSM8K's format, from a seed.

    python tests/evals/arith/problems.py FOLDER

writes FOLDER/test.jsonl, the 1,319 held-out problems, and FOLDER/train.jsonl, from which worked
examples are taken. A problem is held out by a hash of its template and its numbers: no training
stream, whatever its seed, yields one of those. A second argument, such as 1.3, stretches the range
of the test's numbers beyond what a model was trained on: it is then unsure of digits.
"""

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add, floordiv, mul, sub
from pathlib import Path

NUM_HELD_OUT = 1319
NUM_WORKED = 200  # as many as GSM8K's harness may draw worked examples from
_HELD_OUT_SHARE = 32  # one of so many combinations of numbers is never trained on
_MAX_RESULT = 9999
_MAX_DIVISOR = 12

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack",
         "Karen", "Leo", "Maria", "Noah", "Olga", "Paul")  # fmt: skip
THINGS = ("apples", "books", "cards", "coins", "cups", "eggs", "flowers", "lemons", "marbles",
          "oranges", "pencils", "pens", "plates", "shells", "stamps", "stickers")  # fmt: skip
BOXES = ("bags", "baskets", "boxes", "crates", "jars", "packs", "shelves", "trays")


@dataclass(frozen=True)
class Template:
    """question and steps: texts with {name}, {friend}, {things}, {boxes}, {one} (a singular of
    boxes) and numbers in braces; of [one|another] one is drawn.

    numbers: `a=12..99` draws, `x=a+b` computes one (exactly, within 1 to 9999, or all is drawn
    anew), `d|x` draws a divisor of x from 2 to 12. Every computed number has its step, in which
    braces with its name hold the worked calculation.
    """

    name: str
    numbers: str
    question: str
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    is_held_out: bool


TEMPLATES = (
    Template(
        "gives",
        "a=20..999 b=20..999 x=a+b c=10..999 y=x-c",
        "{name} has {a} {things}. {name} [buys|finds|gets] {b} more and then [gives|sells] {c} "
        "to {friend}. How many {things} does {name} have left?",
        ("{name} has {x} {things}.", "After that, {name} has {y} {things} left."),
    ),
    Template(
        "boxes",
        "a=3..60 b=4..60 x=a*b c=10..600 y=x-c",
        "{name} has {a} {boxes} with {b} {things} in each. {name} [sells|gives away|loses] {c} "
        "{things}. How many {things} are left?",
        ("There are {x} {things} in all.", "So {y} {things} are left."),
    ),
    Template(
        "share",
        "a=20..999 b=20..999 x=a+b d|x y=x/d",
        "{name} has {a} {things} and {friend} has {b} {things}. They put them together and share "
        "them equally among {d} friends. How many {things} does each friend get?",
        ("Together they have {x} {things}.", "Each friend gets {y} {things}."),
    ),
    Template(
        "shop",
        "a=2..60 p=2..60 x=a*p b=2..60 q=2..60 y=b*q z=x+y",
        "{name} buys {a} {things} for ${p} each and {b} {boxes} for ${q} each. How much does "
        "{name} [pay|spend] in dollars?",
        (
            "The {things} cost {x} dollars.",
            "The {boxes} cost {y} dollars.",
            "In all, {name} pays {z} dollars.",
        ),
    ),
    Template(
        "change",
        "a=3..60 p=2..60 x=a*p m=100..4000 y=m-x",
        "{name} buys {a} {things} at ${p} each and pays with ${m}. How much money does {name} get "
        "back in dollars?",
        ("The {things} cost {x} dollars.", "{name} gets {y} dollars back."),
    ),
    Template(
        "months",
        "a=3..60 b=10..30 x=a*b d=2..9 y=x*d",
        "{name} [makes|sells|collects] {a} {things} a day. How many {things} is that in {d} months "
        "of {b} days each?",
        ("In {b} days, that is {x} {things}.", "In {d} months, that is {y} {things}."),
    ),
    Template(
        "profit",
        "a=5..60 p=5..60 x=a*p c=10..900 y=x-c d|y z=y/d",
        "{name} sells {a} {things} for ${p} each. The {boxes} cost ${c} in all. The money that is "
        "left is shared by {d} friends. How much does each friend get in dollars?",
        (
            "{name} gets {x} dollars for the {things}.",
            "After the {boxes}, {y} dollars are left.",
            "Each friend gets {z} dollars.",
        ),
    ),
    Template(
        "pack",
        "a=20..999 b=20..999 x=a-b d|x y=x/d",
        "{name} has {a} {things}. {b} of them are [broken|old|lost]. The others are put into {d} "
        "{boxes}, the same number in each. How many {things} are in each of the {boxes}?",
        ("There are {x} good {things}.", "Each of the {boxes} has {y} {things}."),
    ),
    Template(
        "times",
        "a=12..300 k=2..9 x=a*k y=a+x c=20..900 z=y-c",
        "{friend} has {a} {things}. {name} has {k} times as many. Together they [sell|give away] "
        "{c} {things}. How many {things} do they have left?",
        (
            "{name} has {x} {things}.",
            "Together they have {y} {things}.",
            "They have {z} {things} left.",
        ),
    ),
    Template(
        "three",
        "a=20..999 b=10..900 x=a+b c=10..900 y=x-c z=a+x w=z+y",
        "On Monday {name} [sells|finds|makes] {a} {things}. On Tuesday it is {b} more than on "
        "Monday, and on Friday {c} fewer than on Tuesday. How many {things} is that in all?",
        (
            "On Tuesday, it is {x} {things}.",
            "On Friday, it is {y} {things}.",
            "On Monday and Tuesday, it is {z} {things}.",
            "In all, it is {w} {things}.",
        ),
    ),
    Template(
        "saving",
        "p=20..900 a=2..30 x=p*a b=2..60 y=x+b d|y z=y/d",
        "{name} wants {a} {boxes} for ${p} each and a book for ${b}. {name} saves the same each "
        "month for {d} months. How much must {name} save each month in dollars?",
        (
            "The {boxes} cost {x} dollars.",
            "With the book, it is {y} dollars.",
            "Each month {name} must save {z} dollars.",
        ),
    ),
    Template(
        "fill",
        "a=20..999 d|a x=a/d b=2..60 y=x*b c=10..900 z=y+c",
        "{name} puts {a} {things} into {d} {boxes}, the same number in each. {friend} has {b} "
        "such {boxes} and {c} more {things}. How many {things} does {friend} have?",
        (
            "Each of the {boxes} has {x} {things}.",
            "{friend} has {y} {things} in the {boxes}.",
            "In all, {friend} has {z} {things}.",
        ),
    ),
)

_OPERATIONS = {"+": add, "-": sub, "*": mul, "/": floordiv}


def stream(seed: int, is_held_out: bool = False, stretch: float = 1) -> Iterator[Problem]:
    """Problems without end; those that are held out, or those that never are.

    stretch: what the largest numbers drawn are multiplied by, except those of one digit.
    """
    rng = random.Random(f"{seed} {is_held_out}")
    while True:
        problem = _draw(rng, is_held_out, stretch)
        if problem is not None:
            yield problem


def held_out(stretch: float = 1) -> list[Problem]:
    """The 1,319 problems of the test, none twice."""
    found: dict[str, Problem] = {}
    for problem in stream(0, is_held_out=True, stretch=stretch):
        found.setdefault(problem.question, problem)
        if len(found) == NUM_HELD_OUT:
            break
    return list(found.values())


def write(folder: Path, stretch: float = 1) -> None:
    """test.jsonl and train.jsonl, as GSM8K has them."""
    folder.mkdir(parents=True, exist_ok=True)
    train = stream(seed=0)
    for split, problems in (
        ("test", held_out(stretch)),
        ("train", [next(train) for _ in range(NUM_WORKED)]),
    ):
        rows = [json.dumps({"question": p.question, "answer": p.answer}) for p in problems]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


def _draw(rng: random.Random, is_held_out: bool, stretch: float) -> Problem | None:
    """One attempt: None where the numbers do not come out, or belong to the other kind."""
    template = TEMPLATES[rng.randrange(len(TEMPLATES))]
    values: dict[str, int] = {}
    worked: dict[str, str] = {}
    for entry in template.numbers.split():
        if not _assign(entry, values, worked, rng, stretch):
            return None
    if _is_held_out(template.name, values) != is_held_out:
        return None
    name, friend = rng.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "things": rng.choice(THINGS),
             "boxes": rng.choice(BOXES)}  # fmt: skip
    question = re.sub(r"\[([^]]*)]", lambda m: rng.choice(m[1].split("|")), template.question)
    steps = [step.format(**words, **values | worked) for step in template.steps]
    result = list(values.values())[-1]
    answer = "\n".join([*steps, f"#### {result}"])
    return Problem(question.format(**words, **values), answer, is_held_out)


def _assign(
    entry: str,
    values: dict[str, int],
    worked: dict[str, str],
    rng: random.Random,
    stretch: float,
) -> bool:
    """Gives the number of one entry its value; False where there is none."""
    if match := re.fullmatch(r"(\w)=(\d+)\.\.(\d+)", entry):
        low, high = int(match[2]), int(match[3])
        values[match[1]] = rng.randrange(low, (int(high * stretch) if high > 9 else high) + 1)
        return True
    if match := re.fullmatch(r"(\w)\|(\w)", entry):
        whole = values[match[2]]
        divisors = [d for d in range(2, _MAX_DIVISOR + 1) if whole % d == 0 and d < whole]
        if divisors:
            values[match[1]] = rng.choice(divisors)
        return bool(divisors)
    match = re.fullmatch(r"(\w)=(\w)([-+*/])(\w)", entry)
    assert match is not None, entry
    left, right = values[match[2]], values[match[4]]
    result = _OPERATIONS[match[3]](left, right)
    values[match[1]] = result
    calculation = f"{left}{match[3]}{right}"
    worked[match[1]] = f"{calculation}=<<{calculation}={result}>>{result}"
    return 1 <= result <= _MAX_RESULT


def _is_held_out(name: str, values: dict[str, int]) -> bool:
    key = f"{name} {sorted(values.items())}".encode()
    return hashlib.sha256(key).digest()[0] % _HELD_OUT_SHARE == 0


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(float, sys.argv[2:3]))
