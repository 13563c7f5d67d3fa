"""Calls as JSON objects with the name of the tool and its arguments."""

import json

from vllm.tool_parsers.parser import Emit, NotACall, Parser, Steps

ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCalls(Parser):
    """Reads `{"name": ..., "arguments": {...}}` in any order of keys; `parameters` is taken for
    `arguments`, and a text for the object in it."""

    def object_call(self) -> Steps:
        """NotACall for an object without a name."""
        yield from self.one_of("{")
        emit: Emit | None = None
        held: list[str] | None = None
        has_arguments = False
        while True:
            yield from self.space()
            if (yield from self.char()) == "}":
                break
            key = yield from self.json_value()
            yield from self.space()
            yield from self.one_of(":")
            yield from self.space()
            if key == "name" and emit is None:
                name = yield from self.json_value()
                if not isinstance(name, str) or not name:
                    raise NotACall
                emit = self.call(name)
                if held is not None:
                    emit("".join(held))
            elif key in ARGUMENT_KEYS and not has_arguments:
                has_arguments = True
                if emit is None:
                    held = []
                    yield from self._arguments(held.append)
                else:
                    yield from self._arguments(emit)
            else:
                yield from self.json_text(lambda _: None)
            yield from self.space()
            if not (yield from self.char()):
                return  # the answer ends within the call
            if (yield from self.one_of(",", "}")) == "}":
                return self._closed(emit, has_arguments)
        yield from self.one_of("}")
        return self._closed(emit, has_arguments)

    def _closed(self, emit: Emit | None, has_arguments: bool) -> None:
        if emit is None:
            raise NotACall
        if not has_arguments:
            emit("{}")

    def _arguments(self, emit: Emit) -> Steps:
        first = yield from self.char()
        if first == "{":
            yield from self.json_text(emit)
            return
        value = yield from self.json_value()
        emit(value or "{}" if isinstance(value, str) else json.dumps(value or {}))

    def list_calls(self) -> Steps:
        """`[{...}, {...}]`. NotACall where no list of objects begins."""
        yield from self.one_of("[")
        yield from self.space()
        while (yield from self.char()) == "{":
            yield from self.object_call()
            yield from self.space()
            if not (yield from self.char()):
                return
            if (yield from self.one_of(",", "]")) == "]":
                return
            yield from self.space()
        yield from self.one_of("]")
