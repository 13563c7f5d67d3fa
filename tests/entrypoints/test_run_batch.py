"""`vllm run-batch`: the answers of a server, from a file to a file."""

import json
from pathlib import Path

from .serving import RunningServer, run_cli


def test_a_file_is_answered_in_its_order_as_a_server_would(
    tiny_model: Path, server: RunningServer, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "ban fick"}], "max_tokens": 8,
            "temperature": 0}  # fmt: skip
    text = {"prompt": "ban", "max_tokens": 4, "temperature": 0}
    requests = [
        ("a", "/v1/chat/completions", chat),
        ("b", "/v1/completions", {**text, "max_tokens": -1}),
        ("c", "/v1/completions", text),
        ("d", "/v1/nowhere", text),
        ("e", "/v1/completions", {**text, "stream": True}),
    ]
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})
        for name, url, body in requests
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines) + "\n\n")
    done = run_cli("run-batch", "-i", str(source), "-o", str(target), "--model", str(tiny_model),
                   "--max-num-seqs", "4", "--swap-space", "4")  # fmt: skip
    assert done.returncode == 1 and "5 requests answered, 3 of them refused" in done.stdout
    assert "--swap-space has no effect here" in done.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [name for name, _, _ in requests]
    statuses = [answer["response"]["status_code"] for answer in answers]
    assert statuses == [200, 400, 200, 404, 400]
    first = answers[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert first == server.chat()["choices"][0]["message"]["content"]
    third = answers[2]["response"]["body"]["choices"][0]["text"]
    assert third == server.complete(prompt="ban", max_tokens=4)["choices"][0]["text"]
    assert answers[1]["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_line_that_is_no_request_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a", "url": "/v1/completions"}\n')
    done = run_cli("run-batch", "-i", str(source), "-o", "/dev/null", "--model", "none")
    assert done.returncode == 2
    assert "line 1" in done.stderr and "wrong or missing: body" in done.stderr
