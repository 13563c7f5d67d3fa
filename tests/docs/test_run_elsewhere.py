"""Every command of the pages and every example runs in a test, or is marked with why not."""

import re

import pytest
from checking import RUN
from doc_pages import PAGES, REPOSITORY, SHELL, blocks, commands, text_of
from run_elsewhere import ELSEWHERE, REASONS


def unrun() -> dict[str, str]:
    """Commands that test_commands.py only parses, with their places."""
    found = {}
    for page in PAGES:
        for block in (block for block in blocks(page) if block.language in SHELL):
            for one in commands(block):
                program, *words = one.words
                is_run = program == "vllm" and any(tuple(words[: len(k)]) == k for k in RUN)
                if not is_run and program != "curl":
                    found[" ".join(one.words)] = one.place
    return found


def place_of(text: str) -> int | None:
    patterns = enumerate(pattern for pattern, _ in ELSEWHERE)
    return next((i for i, pattern in patterns if re.fullmatch(pattern, text, re.DOTALL)), None)


def test_every_command_ran_or_says_why_not() -> None:
    unknown = [f"{place}: {text}" for text, place in unrun().items() if place_of(text) is None]
    assert not unknown, (
        f"a test must run these, or tests/docs/run_elsewhere.py say where they ran: {unknown}"
    )


def test_no_entry_is_left_of_a_command_that_is_gone() -> None:
    used = {place_of(text) for text in unrun()}
    assert [ELSEWHERE[i][0] for i in range(len(ELSEWHERE)) if i not in used] == []


@pytest.mark.parametrize("where", dict.fromkeys(where for _, where in ELSEWHERE), ids=str)
def test_the_test_that_is_named_has_the_command(where: str | tuple[str, str]) -> None:
    if isinstance(where, str):
        assert where in REASONS
        return
    file, text = where
    assert text in text_of(file)


def test_every_example_is_run_by_a_test() -> None:
    tests = text_of("tests/examples/test_examples.py")
    examples = [file.stem for file in (REPOSITORY / "examples").glob("*.py")]
    assert len(examples) == 10
    assert [name for name in examples if name not in tests] == []
