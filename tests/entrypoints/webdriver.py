"""A page of a server in headless Chromium, by the WebDriver protocol: JSON over HTTP."""

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import browser

DRIVER = shutil.which("chromedriver")
MISSING = [
    *([] if browser.installed() else [f"none of {', '.join(browser.NAMES)}"]),
    *([] if DRIVER else ["no chromedriver"]),
]
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
          "--no-first-run", "--disable-background-networking", "--disable-component-update",
          "--disable-sync", "--hide-scrollbars")  # fmt: skip
# Keys as WebDriver writes them.
ENTER, ESCAPE, TAB, RIGHT = "\ue007", "\ue00c", "\ue004", "\ue014"
SHIFT = "\ue008"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class ScriptError(AssertionError):
    """What the browser or a script in it refused."""


@dataclass
class Session:
    """One window. port: of chromedriver; path: of the session."""

    port: int
    path: str = ""

    def send(self, method: str, path: str, **fields: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            body = json.dumps(fields) if method == "POST" else None
            connection.request(method, self.path + path, body)
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(value, dict) and "error" in value:
            raise ScriptError(f"{value['error']}: {value['message']}")
        return value

    def open(self, url: str) -> None:
        self.send("POST", "/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns; a promise is waited for."""
        return self.send("POST", "/execute/sync", script=script, args=[*arguments])

    def until(self, script: str, seconds: float = 30) -> Any:
        """The first value of `script` that is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < end, f"never true: {script}\n{self.text('body')}"
            time.sleep(0.05)
        return value

    def text(self, css: str) -> str:
        """As one reads it, of what is shown."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join()"
        return str(self.run(script, css))

    def _find(self, css: str) -> str:
        found = self.send("POST", "/element", using="css selector", value=css)
        return f"/element/{found[_ELEMENT]}"

    def click(self, css: str) -> None:
        """As with a pointer: an element that others cover, or that is hidden, is an error."""
        self.send("POST", f"{self._find(css)}/click")

    def type(self, css: str, text: str) -> None:
        self.send("POST", f"{self._find(css)}/value", text=text)

    def press(self, *keys: str) -> None:
        """Keys one after the other, to what has the focus; those of a text together."""
        actions = [
            {"type": kind, "value": key}
            for text in keys
            for kind, order in (("keyDown", text), ("keyUp", text[::-1]))
            for key in order
        ]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self.send("POST", "/actions", actions=[source])

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.send("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def resize(self, width: int, height: int) -> None:
        """Also to less than the smallest window."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=False)  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """light or dark, as the system's settings."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.send("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the last call: of scripts and of the policy."""
        return [entry["message"] for entry in self.send("POST", "/se/log", type="browser")]


@contextlib.contextmanager
def started_browser(folder: Path) -> Iterator[Session]:
    """folder: of what the browser keeps."""
    with subprocess.Popen(
        [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            ports = (re.search(r"started successfully on port (\d+)", line) for line in lines)
            session = Session(next(int(match[1]) for match in ports if match))
            options = {
                "binary": browser.installed(),
                "args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"],
            }
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "WARNING"},
            }
            made = session.send("POST", "/session", capabilities={"alwaysMatch": wanted})
            session.path = f"/session/{made['sessionId']}"
            try:
                yield session
            finally:
                session.send("DELETE", "")
        finally:
            process.terminate()
