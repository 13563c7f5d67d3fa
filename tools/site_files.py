"""What the pages of docs/ link to outside of it becomes part of the site, for mkdocs.yml."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Pages of the site beside those of docs/.
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    pages = [file for file in files if file.src_uri.endswith(".md")]
    texts = [(Path(config.docs_dir), Path(page.abs_src_path).read_text()) for page in pages]
    texts += [(ROOT, (ROOT / name).read_text()) for name in PAGES]
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    linked = {_inside(folder, link) for folder, text in texts for link, _ in _LINK.findall(text)}
    for name in sorted(name for name in linked if name not in PAGES):
        if not name.startswith("docs/") and (ROOT / name).is_file():
            uri = _uri(name)
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = ROOT if page.file.src_uri in PAGES else ROOT / "docs"

    def link(match: "re.Match[str]") -> str:
        name, anchor = _inside(folder, match[1]), match[2] or ""
        if name.startswith("docs/"):
            return f"]({name.removeprefix('docs/')}{anchor})"
        if name in PAGES:
            return f"]({name}{anchor})"
        return f"]({_uri(name)})" if (ROOT / name).is_file() else "]"

    return _LINK.sub(link, markdown)


def _inside(folder: Path, link: str) -> str:
    """The path of what `link` means in a page of `folder`, from the root of the repository."""
    target = (folder / link).resolve()
    return str(target.relative_to(ROOT)) if target.is_relative_to(ROOT) else link


def _uri(name: str) -> str:
    """mkdocs makes pages of Markdown files alone: what else is Markdown is shown as text."""
    return f"repository/{name}.txt" if name.endswith(".md") else f"repository/{name}"
