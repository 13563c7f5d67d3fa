"""What a page of a report says, read from its HTML alone."""

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

_VOID = {"br", "wbr", "meta", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list["Element | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def all(self, tag: str, **attributes: str) -> list["Element"]:
        """Descendants in order of the page; `role="grid"`, `class_="names"`."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if child.tag == tag and wanted.items() <= child.attributes.items():
                    found.append(child)
                found += child.all(tag, **attributes)
        return found

    def one(self, tag: str, **attributes: str) -> "Element":
        (found,) = self.all(tag, **attributes)
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(page: str) -> Element:
    """The page as a tree, whose tags are all closed in order."""
    reader = _Reader()
    reader.feed(page.removeprefix("<!doctype html>\n"))
    reader.close()
    assert len(reader.open) == 1
    return reader.open[0]


def embedded(page: str) -> Any:
    """The JSON that the page carries."""
    return json.loads(parse(page).one("script", id="report").text)


def check_alone(page: str) -> None:
    """It needs no other file: links lead into the page, and every id is there once."""
    root = parse(page)
    ids = re.findall(r'(?<= id=")[^"]+', page[: page.index('<script type="application/json"')])
    assert len(ids) == len(set(ids))
    assert {link.attributes["href"] for link in root.all("a")} <= {f"#{name}" for name in ids}
    text = page.replace('href="#', "")
    assert not re.search(r"(src|href|srcset|action)=|url\(|@import|https?:", _without_data(text))


def _without_data(page: str) -> str:
    return re.sub(r"(?s)<script type=.application/json.*?</script>", "", page)
