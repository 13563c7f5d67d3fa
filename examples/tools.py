"""A model of a running server calls a function of this program. A grammar holds the call to the
function's JSON schema, so that it can always be read.

    vllm serve Qwen/Qwen3-0.6B-FP8
    python examples/tools.py [URL]

URL: of the server, http://localhost:8000 without it. The model's chat template must know tools.
"""

import json
import sys
import urllib.request
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city today.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def weather(city: str) -> str:
    return json.dumps({"city": city, "sky": "clear", "celsius": 21})


def answer(server: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The message with which the model answers."""
    body = {"messages": messages, "tools": [TOOL], "max_tokens": 128, "temperature": 0, **fields}
    request = urllib.request.Request(
        f"{server}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
        return message


def main(server: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Shall I take an umbrella in Rome?"}
    ]
    # "auto" leaves it to the model whether to call; "required" makes it call.
    called = answer(server, messages, tool_choice="required")
    messages.append(called)
    for call in called["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        result = weather(**arguments)
        print(f"call: weather({arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print("answer:", answer(server, messages, tool_choice="none")["content"])


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://localhost:8000")
