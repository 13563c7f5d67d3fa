"""The pages of the documentation, taken apart: fenced blocks, commands, links, headings."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = tuple(
    path.relative_to(REPOSITORY).as_posix()
    for path in sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])
)
SHELL = ("bash", "sh", "shell", "console")
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its first line. title: the text line above it, `path/file.py:` in
    CONTRIBUTING.md."""

    page: str
    line: int
    language: str
    text: str
    title: str


@dataclass(frozen=True)
class Command:
    """words: without the variables that stand before them."""

    place: str
    text: str
    variables: dict[str, str]
    words: list[str]


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text()


def blocks(page: str) -> list[Block]:
    text = text_of(page)
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n")[2]
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(page, line, match[1], match[2], before))
    return found


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", text_of(page))


@dataclass(frozen=True)
class Section:
    """From a heading of the second level to the next."""

    title: str
    lines: range


def sections(page: str) -> list[Section]:
    lines = text_of(page).splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line.startswith("## ")]
    ends = [*starts[1:], len(lines) + 1]
    return [Section(lines[a - 1][3:], range(a, b)) for a, b in zip(starts, ends)]


def commands(block: Block) -> Iterator[Command]:
    """Of a shell block; a line that ends with a backslash goes on in the next."""
    joined = block.text.replace("\\\n", " ")
    for line in joined.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield command(f"{block.page}:{block.line}", line)


def command(place: str, text: str) -> Command:
    words = shlex.split(re.sub(r"\$\([^)]*\)|\$\w+", "/x", text))
    count = next((i for i, word in enumerate(words) if not _VARIABLE.match(word)), len(words))
    variables = dict(word.split("=", 1) for word in words[:count])
    return Command(place, text.strip(), variables, words[count:])


def inline_codes(page: str) -> list[str]:
    """Spans of code in the text and in tables, without line breaks."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}
