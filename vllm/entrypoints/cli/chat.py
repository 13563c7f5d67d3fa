"""`vllm chat`: a conversation with a running server, in a terminal or for a script."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.entrypoints.cli.client import Server, add_flags, inputs, request_fields
from vllm.errors import ConfigError, VllmError, did_you_mean
from vllm.utils.terminal import takes_styles

Message = dict[str, Any]

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_HELP = """\
/system [TEXT]  set the system message; without TEXT remove it
/clear          forget the conversation
/save FILE      write the conversation as JSON
/model [NAME]   ask another model of the server; without NAME list them
/exit           end, as does Ctrl-D
//TEXT          send a text that begins with a slash
Ctrl-C stops an answer. Alt-Enter begins a new line."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        description="Chat with a running server. In a terminal: line editing, history and the "
        "commands that /help lists; Ctrl-C stops an answer, Ctrl-D ends.",
    )
    add_flags(parser, "Send this one message and print the answer.")
    parser.add_argument("--system-prompt", help="System message of the conversation.")
    parser.add_argument(
        "--tools", metavar="FILE",
        help="JSON list of tools in OpenAI's form. Calls are shown, and you type their results.",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    tools = _tools_of(args.tools) if args.tools else []
    server = Server(args.url, args.api_key)
    is_terminal = args.quick is None and sys.stdin.isatty() and sys.stdout.isatty()
    ask = _terminal_input() if is_terminal else None
    fields = request_fields(args, server) | ({"tools": tools} if tools else {})
    chat = Chat(server, fields, args.system_prompt)
    if ask is None:
        for text in inputs(args.quick):
            chat.say(text)
    else:
        Terminal(chat, ask).run()


def _tools_of(file: str) -> list[Any]:
    try:
        tools = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools {file}: {error}") from error
    if not isinstance(tools, list):
        raise ConfigError(f"--tools {file}: it takes a file with a JSON list of tools")
    return tools


def _terminal_input() -> Callable[[str], str]:
    """Reads a line that can be edited, with the history of earlier conversations."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory
    except ImportError as error:
        raise ConfigError(
            "a chat in a terminal needs prompt_toolkit: pip install prompt_toolkit, or use --quick"
        ) from error
    history = envs.VLLM_CACHE_ROOT / "chat_history"
    is_kept = False  # not in a home that is read-only
    with suppress(OSError):
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch()
        is_kept = True
    session: Any = PromptSession(history=FileHistory(str(history)) if is_kept else None)
    keys = _key_bindings()
    return lambda prompt: session.prompt(prompt, key_bindings=keys)


def _key_bindings() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return keys


def _dimmed(text: str) -> str:
    return f"{_DIM}{text}{_PLAIN}" if takes_styles(sys.stdout) else text


@dataclass
class Answer:
    """An answer as it arrives. calls: by their index. Times by time.monotonic."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, Message] = field(default_factory=dict)
    num_tokens: int | None = None
    start: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0

    def add(self, event: dict[str, Any]) -> tuple[str, str]:
        """What an event adds to the reasoning and to the content."""
        self.num_tokens = (event.get("usage") or {}).get("completion_tokens", self.num_tokens)
        reasoning = content = ""
        for choice in event["choices"]:
            self.last = time.monotonic()
            delta = choice["delta"]
            reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                self._add_call(part)
        self.content += content
        self.reasoning += reasoning
        if self.first is None and (reasoning or content or self.calls):
            self.first = self.last
        return reasoning, content

    def _add_call(self, part: Message) -> None:
        empty = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        call = self.calls.setdefault(part["index"], empty)
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def message(self) -> Message:
        calls = {"tool_calls": list(self.calls.values())} if self.calls else {}
        return {"role": "assistant", "content": self.content or None if calls else self.content,
                **calls}  # fmt: skip

    def speed(self) -> str:
        """Tokens per second from the first token to the last; "" where none is known."""
        if not self.num_tokens or self.first is None:
            return ""
        wait, decode = self.first - self.start, self.last - self.first
        rate = f", {(self.num_tokens - 1) / decode:.1f} tokens/s" if decode > 0 else ""
        return f"{self.num_tokens} tokens{rate}, first after {wait:.2f} s"


class Chat:
    """The conversation. fields: of every request."""

    def __init__(self, server: Server, fields: dict[str, Any], system: str | None):
        self.server = server
        self.fields = fields
        self.messages: list[Message] = []
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}] * bool(text) + rest

    def clear(self) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def say(self, text: str) -> Answer:
        """Sends a message and prints the answer; both stay in the conversation."""
        self.messages.append({"role": "user", "content": text})
        answer = Answer()
        self.answer(answer, lambda _, content: print(content, end="", flush=True))
        print()
        return answer

    def answer(self, answer: Answer, show: Callable[[str, str], None]) -> None:
        """Fills `answer` as it arrives, and adds it to the conversation. show: prints what is new
        of reasoning and content."""
        body = {**self.fields, "messages": self.messages,
                "stream_options": {"include_usage": True}}  # fmt: skip

        async def ask() -> None:
            path = "/chat/completions"
            async with (
                self.server.client() as client,
                aclosing(client.post_events(path, body)) as events,
            ):
                async for event in events:
                    show(*answer.add(event))

        asyncio.run(ask())
        self.messages.append(answer.message())


class Terminal:
    """Reads what the user types, and shows answers. ask: reads a line after a prompt."""

    def __init__(self, chat: Chat, ask: Callable[[str], str]):
        self._chat = chat
        self._ask = ask
        self._is_dim = False
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": lambda text: chat.set_system(text or None),
            "/clear": lambda text: chat.clear(),
            "/save": self._save,
            "/model": self._model,
            "/help": lambda text: print(_HELP),
        }

    def run(self) -> None:
        """Until Ctrl-D or /exit."""
        print(f"{self._chat.fields['model']} at {self._chat.server.url} (/help lists commands)")
        for text in self._lines():
            name, _, rest = text.partition(" ")
            try:
                if name in self._commands:
                    self._commands[name](rest.strip())
                elif text.startswith("/") and not text.startswith("//"):
                    known = [*self._commands, "/exit"]
                    print(f"unknown command {name}{did_you_mean(name, known)} (/help lists all)")
                else:
                    self._say(text[1:] if text.startswith("//") else text)
            except VllmError as error:
                print(f"error: {error}")

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                text = self._ask("> ").encode(errors="replace").decode()
            except KeyboardInterrupt:
                print("(Ctrl-D ends)")
                continue
            except EOFError:
                return
            if text.strip() in ("/exit", "/quit"):
                return
            if text.strip():
                yield text

    def _say(self, text: str) -> None:
        """A message, its answer, and the results of calls until there are no more."""
        messages = self._chat.messages
        before = len(messages)
        messages.append({"role": "user", "content": text})
        try:
            while calls := self._answered():
                for call in calls:
                    result = self._ask(f"{call['function']['name']} returns: ")
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        except (KeyboardInterrupt, EOFError):  # instead of a result
            pass
        finally:
            if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
                del messages[before:]  # nothing was answered

    def _answered(self) -> list[Message]:
        """Shows an answer and returns its calls. Ctrl-C stops it: what there is of it counts, but
        no call, which may be half of one."""
        answer = Answer()
        try:
            self._chat.answer(answer, self._show)
        except KeyboardInterrupt:
            self._finish_line()
            print(_dimmed("[stopped]"))
            if answer.content:
                self._chat.messages.append({"role": "assistant", "content": answer.content})
            return []
        finally:
            self._set_dim(False)
        self._finish_line()
        for call in answer.calls.values():
            function = call["function"]
            print(f"call: {function['name']}({function['arguments']})")
        if speed := answer.speed():
            print(_dimmed(f"[{speed}]"))
        return list(answer.calls.values())

    def _show(self, reasoning: str, content: str) -> None:
        if reasoning:
            self._set_dim(True)
            sys.stdout.write(reasoning)
        if content:
            if self._is_dim:
                self._set_dim(False)
                sys.stdout.write("\n")
            sys.stdout.write(content)
        sys.stdout.flush()

    def _set_dim(self, is_dim: bool) -> None:
        if is_dim != self._is_dim:
            self._is_dim = is_dim
            if takes_styles(sys.stdout):
                sys.stdout.write(_DIM if is_dim else _PLAIN)

    def _finish_line(self) -> None:
        self._set_dim(False)
        print()

    def _save(self, file: str) -> None:
        if not file:
            print("/save takes a file")
            return
        try:
            text = json.dumps(self._chat.messages, indent=1, ensure_ascii=False)
            Path(file).expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            print(f"error: {error}")
        else:
            print(f"{len(self._chat.messages)} messages in {file}")

    def _model(self, name: str) -> None:
        models = self._chat.server.models()
        if not name:
            now = self._chat.fields["model"]
            print("\n".join(f"{'*' if model == now else ' '} {model}" for model in models))
        elif name not in models:
            print(f"the server has no model {name}{did_you_mean(name, models)}")
        else:
            self._chat.fields["model"] = name
