"""An agent with three tools completes its tasks by forced grammar, streamed and not."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.slow

NUM_TASKS = 50


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties],
                  "additionalProperties": False}  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


FILES = {f"notes-{i}.txt": f"item {i}: {i * 7}" for i in range(10)}
TOOLS = [
    _tool("read_file", path={"type": "string", "enum": [*FILES]}),
    _tool("add", numbers={"type": "array", "items": {"type": "integer", "enum": [1, 2, 3, 5, 8]},
                          "minItems": 2, "maxItems": 3}),
    _tool("finish", answer={"type": "string", "pattern": "^[a-zéß ]{1,12}$"},
          confidence={"type": "number", "enum": [0.5, 1]}),
]  # fmt: skip


def run_tool(name: str, arguments: dict[str, Any]) -> str:
    """Raises for arguments that do not fit."""
    if name == "read_file":
        (path,) = arguments.values()
        return FILES[path]
    if name == "add":
        (numbers,) = arguments.values()
        assert 2 <= len(numbers) <= 3
        return str(sum(numbers))
    assert name == "finish"
    assert 1 <= len(arguments["answer"]) <= 12
    assert arguments["confidence"] in (0.5, 1)
    return "done"


def answer_of(client: openai.OpenAI, is_streamed: bool, **fields: Any) -> dict[str, Any]:
    """The assistant's turn."""
    own: Any = {"model": "tiny", "tools": TOOLS, "parallel_tool_calls": False,
                "temperature": 1.0, "max_tokens": 120, **fields}  # fmt: skip
    if not is_streamed:
        choice = client.chat.completions.create(**own).choices[0]
        assert choice.finish_reason in ("tool_calls", "stop")
        return choice.message.model_dump(exclude_none=True)
    with client.chat.completions.stream(**own) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message.model_dump(exclude_none=True)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_fifty_tasks_of_three_steps_end_without_a_malformed_call(
    base_url: str, is_streamed: bool
) -> None:
    """Two steps of any of the tools, then the one that ends the task."""
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)

    def complete(task: int) -> list[str]:
        number = random.Random(task).randrange(10)
        messages: list[Any] = [{"role": "user", "content": f"Task {task}: use notes-{number}.txt"}]
        finish = {"type": "function", "function": {"name": "finish"}}
        names = []
        for step, choice in enumerate(("required", "required", finish)):
            turn = answer_of(client, is_streamed, messages=messages, tool_choice=choice,
                             seed=3 * task + step)  # fmt: skip
            (call,) = turn["tool_calls"]
            name, text = call["function"]["name"], call["function"]["arguments"]
            result = run_tool(name, json.loads(text))
            messages += [turn, {"role": "tool", "tool_call_id": call["id"], "content": result}]
            names.append(name)
        return names

    with ThreadPoolExecutor(8) as pool:
        done = [*pool.map(complete, range(NUM_TASKS))]
    assert [len(names) for names in done] == [3] * NUM_TASKS
    assert all(names[-1] == "finish" for names in done)
    assert len({name for names in done for name in names}) > 1
