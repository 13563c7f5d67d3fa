"""Pages for a browser: the chat at `/` and the API's description at `/docs` and `/redoc`.

Each is one file of HTML that needs no network and holds no secret, so it is served without a key.
Where the server has one, the page asks its user for it.
"""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Response

from vllm.entrypoints.openai.settings import ServerSettings

_FOLDER = Path(__file__).with_name("ui")
_PART = re.compile(
    r'<link rel="stylesheet" href="(?P<style>\w+\.css)">'
    r'|<script src="(?P<script>\w+\.js)"></script>'
)


@dataclass(frozen=True)
class Page:
    """body: the HTML, styles and scripts in it. headers: what it may do in a browser: run its own
    scripts and no others, and talk to this server alone."""

    body: bytes
    headers: Mapping[str, str]

    @classmethod
    def load(cls, name: str) -> "Page":
        """The page of a file in `ui/`, with the files that it names."""
        hashes: dict[str, list[str]] = {"style": [], "script": []}

        def inlined(match: re.Match[str]) -> str:
            kind = str(match.lastgroup)
            text = (_FOLDER / match[kind]).read_text(encoding="utf-8")
            hashes[kind].append(_source_hash(text))
            return f"<{kind}>{text}</{kind}>"

        source = (_FOLDER / name).read_text(encoding="utf-8")
        body = _PART.sub(inlined, source).encode()
        return cls(body, _headers(hashes["style"], hashes["script"]))

    def response(self) -> Response:
        return Response(self.body, media_type="text/html", headers=dict(self.headers))


def add_pages(app: FastAPI, settings: ServerSettings) -> None:
    paths = {
        "index.html": ("/",) if settings.ui else (),
        "docs.html": () if settings.disable_fastapi_docs else ("/docs", "/redoc"),
    }
    for name, own in paths.items():
        for path in own:
            page = Page.load(name)
            app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(_answer(page))


def _answer(page: Page) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return page.response()

    return answer


def _headers(styles: list[str], scripts: list[str]) -> dict[str, str]:
    # Trusted types let no script of the page make HTML of text, such as that of a model.
    policy = {
        "default-src": ["'none'"],
        "style-src": styles,
        "script-src": scripts,
        "connect-src": ["'self'"],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
        "require-trusted-types-for": ["'script'"],
        "trusted-types": ["'none'"],
    }
    return {
        "Content-Security-Policy": "; ".join(
            f"{name} {' '.join(sources)}" for name, sources in policy.items()
        ),
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


def _source_hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
