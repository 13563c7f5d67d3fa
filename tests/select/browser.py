"""A page in headless Chromium: what a script finds in it, and a picture of it.

A window of Chromium is at least 500 pixels wide, so a page is loaded into a frame of the width that
is asked for.
"""

import json
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome",
         "headless_shell", "chrome-headless-shell")  # fmt: skip
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
          "--disable-background-networking", "--disable-component-update", "--disable-sync",
          "--hide-scrollbars", "--virtual-time-budget=4000")  # fmt: skip
_SECONDS = 60


def installed() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def _run(folder: Path, page: Path, width: int, height: int, *flags: str) -> str:
    """width, height: of the frame in pixels."""
    frame = folder / f"frame_{width}.html"
    frame.write_text(
        "<!doctype html><style>body { margin: 0 } iframe { border: 0; display: block }</style>"
        "<script>onmessage = event => document.body.append(Object.assign("
        "document.createElement('pre'), {textContent: event.data}))</script>"
        f'<body><iframe src="{page.name}" style="width:{width}px;height:{height}px"></iframe>'
    )
    done = subprocess.run(
        [
            *(str(installed()), *_FLAGS, *flags, f"--user-data-dir={folder / 'profile'}"),
            *(f"--window-size={max(width, 500)},{height}", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=True,
    )
    return done.stdout


def found_in(page: str, script: str, folder: Path, width: int = 1280, height: int = 900) -> Any:
    """What `script`, the body of a function, returns in the page; an error of it is raised."""
    posting = (
        "<script>addEventListener('load', () => { let found; try { found = {value: (() => {"
        f"{script}"
        "})()} } catch (error) { found = {error: error.stack} }"
        "parent.postMessage(JSON.stringify(found), '*') })</script></body>"
    )
    file = folder / "page.html"
    file.write_text(page.replace("</body>", posting), encoding="utf-8")
    dump = _run(folder, file, width, height, "--dump-dom")
    found = json.loads(unescape(dump.partition("<pre>")[2].partition("</pre>")[0]))
    assert "error" not in found, found["error"]
    return found.get("value")


def screenshot(page: str, picture: Path, width: int, height: int) -> None:
    file = picture.with_suffix(".html")
    file.write_text(page, encoding="utf-8")
    _run(picture.parent, file, width, height, f"--screenshot={picture}")
