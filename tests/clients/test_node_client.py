"""Node's openai package, installed by npm; skipped without Node or a registry."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Rome?" }];
const city = { type: "string", enum: ["Rome", "Oslo"] };
const parameters = { type: "object", properties: { city },
                     required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const own = { model: "tiny", temperature: 0, max_tokens: 40, parallel_tool_calls: false };
const whole = await client.chat.completions.create({ ...own, messages });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...own, messages, stream: true }))
  streamed += chunk.choices[0]?.delta?.content ?? "";
const called = await client.chat.completions.create(
  { ...own, messages, tools, tool_choice: "required" });
const turn = called.choices[0].message;
const result = { role: "tool", tool_call_id: turn.tool_calls[0].id, content: "sunny" };
const last = await client.chat.completions.create(
  { ...own, messages: [...messages, turn, result], tools, tool_choice: "none" });
console.log(JSON.stringify({ whole: whole.choices[0].message.content, streamed,
  call: turn.tool_calls[0].function, last: last.choices[0].message.content }));
"""


def test_node_streams_calls_a_tool_and_sends_its_result(base_url: str, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), "openai"]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if installed.returncode:
        pytest.skip(f"npm cannot install openai: {installed.stderr[-200:]}")
    (tmp_path / "client.mjs").write_text(SCRIPT)
    done = subprocess.run(
        ["node", "client.mjs", base_url], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["streamed"] == told["whole"]
    assert json.loads(told["call"]["arguments"])["city"] in ("Rome", "Oslo")
    assert told["last"]
