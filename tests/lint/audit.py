"""`make audit`: known weaknesses of the packages that are installed beside this Python.

pip-audit asks PyPI; it runs in an environment of its own, since it needs other packages than the
project. Exit codes: 0 none known, 1 some are, 2 nobody could be asked.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

FOLDER = Path(sys.prefix) / "audit"
OFFLINE = "it needs the network, and PyPI itself: a mirror may have no advisories"


def main() -> int:
    try:
        found = audited()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        print(f"make audit: nothing was audited: {error}; {OFFLINE}", file=sys.stderr)
        return 2
    text, code = summary(found)
    print(text, file=sys.stderr if code else sys.stdout)
    return code


def audited() -> list[dict[str, Any]]:
    """What pip-audit says of each package."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / "bin" / "pip-audit").exists():
        venv.create(FOLDER, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "pip-audit"]
        subprocess.run([*map(str, install)], check=True)
    command = [str(python), "-m", "pip_audit", "--local", "--skip-editable", "--format", "json",
               "--progress-spinner", "off"]  # fmt: skip
    environment = {**os.environ, "PIPAPI_PYTHON_LOCATION": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    try:
        return list(json.loads(done.stdout)["dependencies"])
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"pip-audit: {last[:300]}") from None


def summary(found: list[dict[str, Any]]) -> tuple[str, int]:
    """What to print, and the exit code."""
    asked = [package for package in found if "vulns" in package]
    skipped = [package["name"] for package in found if "vulns" not in package]
    if len(asked) <= len(skipped):
        share = f"{len(skipped)} of {len(found)} packages are not known to whom was asked"
        return f"make audit: {share}; {OFFLINE}", 2
    lines = [
        f"{package['name']} {package['version']}: {weakness['id']}, fixed in "
        f"{', '.join(weakness['fix_versions']) or 'no version'}"
        for package in asked
        for weakness in package["vulns"]
    ]
    told = f"{len(asked)} packages audited, {len(lines)} weaknesses known"
    if skipped:
        told += f"; not audited: {', '.join(sorted(skipped))}"
    return "\n".join([*lines, told]), int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
