"""What `vllm serve` says when it is ready: where it is, and what to type next."""

import json
import shlex
import shutil
import sys
from pathlib import Path

_PORT = 8000  # where `vllm chat` looks without being told


def greeting(
    url: str, model_name: str, seconds: float, needs_key: bool, has_page: bool = False
) -> str:
    """url: as curl takes it, `--unix-socket PATH http://localhost` among them. seconds: of the
    start."""
    body = json.dumps(
        {"model": model_name, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    )
    header = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header}"
    lines = [f"{curl} -d {shlex.quote(body)}"]
    if not url.startswith("-"):  # the chat knows no Unix sockets
        is_usual = url == f"http://localhost:{_PORT}"
        where = "" if is_usual else f" --url {url}/v1"
        lines.insert(0, f"{own_command()} chat{where}{' --api-key YOUR_KEY' * needs_key}")
    place = url.removeprefix("--unix-socket ")
    head = f"Serving {model_name} at {place}/v1 (ready after {seconds:.1f} s). In another terminal:"
    page = [f"Or open {url}/ in a browser."] if has_page else []
    end = [*page, "Ctrl-C here ends the server."]
    return "\n".join([head, *(f"  {line}" for line in lines), *end])


def own_command() -> str:
    """How this program is started from any folder: `vllm` where that is it, else its path."""
    program = Path(sys.argv[0])
    if program.name != "vllm":  # python -m
        return f"{shlex.quote(sys.executable)} -m vllm.entrypoints.cli.main"
    found = shutil.which("vllm")
    is_found = found is not None and Path(found).absolute() == program.absolute()
    return "vllm" if is_found else shlex.quote(str(program.absolute()))
