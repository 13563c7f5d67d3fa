"""Conversations as `LLM.chat` takes them, and the template that makes a prompt of one."""

import json
from typing import Any

from vllm.errors import RequestError

Message = dict[str, Any]


def resolve_hf_chat_template(
    tokenizer: Any, chat_template: str | None, tools: list[Message] | None, **neutral: Any
) -> str | None:
    """The Jinja text: the given one, else the tokenizer's own (the one for tools, where there are
    tools and one for them), None for none. neutral: model_config and trust_remote_code, without
    effect."""
    if chat_template is not None:
        return chat_template
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        name = "tool_use" if tools and "tool_use" in own else "default"
        own = own.get(name)
    return own


def conversations(messages: Any) -> list[list[Message]]:
    """One conversation or several as a list of them, the text parts of a message joined."""
    given = messages if isinstance(messages, list | tuple) else ()
    found = [given] if given and isinstance(given[0], dict) else list(given)
    if not found or not all(isinstance(c, list | tuple) and c for c in found):
        raise RequestError(
            f'chat takes a list of messages {{"role": ..., "content": ...}}, or a list of such '
            f"lists, none of them empty, not {messages!r}",
            "messages",
        )
    return [[_plain_message(message) for message in messages] for messages in found]


def _plain_message(message: Any) -> Message:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "\n".join(part["text"] for part in content)
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"a message takes a role and a content, each a text (content also as parts of type "
            f"text), not {message!r}",
            "messages",
        )
    plain = {**message, "content": content}
    return plain | {"tool_calls": [_call(call) for call in calls]} if calls else plain


def _call(call: Any) -> Message:
    """An earlier call, its arguments as an object: what templates take."""
    try:
        function = dict(call["function"])
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        function["name"], function["arguments"] = str(function["name"]), dict(arguments)
    except (LookupError, TypeError, ValueError) as error:
        raise RequestError(
            f"messages: a call takes a function with a name and with arguments that are a JSON "
            f"object, not {call!r}",
            "messages",
        ) from error
    return {**call, "function": function}
