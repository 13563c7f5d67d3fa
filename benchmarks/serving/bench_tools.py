"""What tools, long histories and cancelled requests cost a server: figures with their limits.

usage: python benchmarks/serving/bench_tools.py --url http://127.0.0.1:8000 --out FILE

Without --url only what needs no server is measured. The server needs a chat template that knows
tools, a chunk of --chunk tokens (--max-num-batched-tokens) and no other clients.
"""

import argparse
import asyncio
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx

from vllm.entrypoints.openai.prompts import Prompts
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.tool_parsers.registry import known
from vllm.tool_parsers.schemas import Tool

USER = {"role": "user", "content": "What is the weather in Rome?"}
NUM_TOOLS = 20
TURNS = 200


def tools(size: int = 1000) -> list[dict[str, Any]]:
    """Each of about `size` characters of JSON."""
    made = []
    for number in range(NUM_TOOLS):
        properties = {
            f"field_{number}_{i}": {"type": "string", "description": "What it is for. " * 4}
            for i in range(size // 130)
        }
        parameters = {"type": "object", "properties": properties, "required": [*properties][:2]}
        function = {"name": f"tool_{number}", "description": "x" * 60, "parameters": parameters}
        made.append({"type": "function", "function": function})
    return made


def parser_us() -> float:
    """Microseconds of CPU time per piece of text of the slowest parser, with a call."""
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = Tool("tool_0", None, parameters, None)
    text = "Some words before. " * 50 + '<tool_call>\n{"name": "tool_0", "arguments": {"a": "'
    text += "words in it " * 100 + '"}}\n</tool_call>'
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    slowest = 0.0
    for parser in known().values():
        times = []
        for _ in range(5):
            reader = parser([tool])
            start = time.process_time()  # others may use the machine
            for piece in pieces:
                reader.feed(piece, False)
            times.append((time.process_time() - start) / len(pieces))
        slowest = max(slowest, min(times))
    return slowest * 1e6


def template_ms(model: str, template: str) -> float:
    """Milliseconds of CPU time to render a history of TURNS messages."""
    from transformers import AutoTokenizer

    prompts = Prompts(AutoTokenizer.from_pretrained(model), 1 << 20, template)
    turns = [{"role": ("user", "assistant")[i % 2], "content": "Some words. " * 20}
             for i in range(TURNS)]  # fmt: skip
    request = ChatCompletionRequest.model_validate({"messages": turns})

    async def run() -> float:
        times = []
        for _ in range(20):
            start = time.process_time()
            await prompts.render(request)
            times.append(time.process_time() - start)
        return statistics.median(times) * 1e3

    return asyncio.run(run())


async def first_token_s(client: httpx.AsyncClient, **fields: Any) -> float:
    body = {"messages": [USER], "max_tokens": 1, "stream": True, "temperature": 0, **fields}
    start = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if '"finish_reason":null' in line or '"finish_reason":"' in line:
                return time.perf_counter() - start
    raise RuntimeError("the stream had no token")


async def serve_figures(url: str, chunk: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        rows: dict[str, Any] = {}
        filler = "word " * 5000  # about as long as the tools
        with_tools = [await first_token_s(client, tools=tools()) for _ in range(6)]
        without = [await first_token_s(client) for _ in range(6)]
        plain_turn = {"role": "user", "content": filler}
        as_long = [await first_token_s(client, messages=[plain_turn]) for _ in range(6)]
        rows["ttft_first_s"] = {"tools": with_tools[0], "without": without[0]}
        later = {"with_tools": with_tools[1:], "without": without[1:], "as_long": as_long[1:]}
        medians = {name: statistics.median(times) for name, times in later.items()}
        rows["ttft_later_s"] = medians
        rows["ttft_ratio_after_the_first"] = medians["with_tools"] / medians["without"]
        rows["ttft_ratio_to_a_prompt_as_long"] = medians["with_tools"] / medians["as_long"]
        long = {"prompt": [7 + i % 900 for i in range(12 * chunk)], "max_tokens": 1}
        start = time.perf_counter()
        (await client.post("/v1/completions", json=long)).raise_for_status()
        chunk_s = (time.perf_counter() - start) / 12
        rows["chunk_s"] = chunk_s
        long["prompt"] = [11 + i % 901 for i in range(12 * chunk)]
        task = asyncio.create_task(client.post("/v1/completions", json=long))
        await asyncio.sleep(2 * chunk_s)
        rows["small_beside_long_chunks"] = await first_token_s(client) / chunk_s
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        rows["cancelled_frees_after_chunks"] = await until_idle(client) / chunk_s
        return rows


async def until_idle(client: httpx.AsyncClient) -> float:
    """Seconds until the engine has no request."""
    start = time.perf_counter()
    while True:
        text = (await client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_")]
        if all(float(line.rpartition(" ")[2]) == 0 for line in lines):
            return time.perf_counter() - start
        await asyncio.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="Of a server; default: none.")
    parser.add_argument("--model", required=True, help="Folder with the tokenizer.")
    parser.add_argument("--template", type=Path, required=True)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = {
        "parser_us_per_token": parser_us(),
        f"template_ms_of_{TURNS}_messages": template_ms(args.model, args.template.read_text()),
        **(asyncio.run(serve_figures(args.url, args.chunk)) if args.url else {}),
    }
    limits = {"parser_us_per_token": 20, f"template_ms_of_{TURNS}_messages": 10,
              "ttft_ratio_after_the_first": 1.2, "small_beside_long_chunks": 3,
              "cancelled_frees_after_chunks": 1}  # fmt: skip
    result = {
        "command": "python benchmarks/serving/bench_tools.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, CPU",
        "load_before": Path("/proc/loadavg").read_text().split()[0],
        "figures": rows,
        "limits": limits,
        "missed": [name for name, limit in limits.items() if rows.get(name, 0) > limit],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
