"""The GSM8K harness: its data, its prompts, and what it says of servers that answer or do not."""

import asyncio
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from entrypoints.serving import REPOSITORY, environment, run_cli, started_server

from vllm.errors import ConfigError
from vllm.evals import gsm8k, gsm8k_data
from vllm.evals.gsm8k import Server
from vllm.evals.gsm8k_data import Item
from vllm.utils.http_client import HttpError

SCRIPT = REPOSITORY / "tests/evals/gsm8k/gsm8k_eval.py"


def row(number: int) -> dict[str, str]:
    return {"question": f"What is {number} + 0?", "answer": f"It is {number}.\n#### {number:,}"}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    for split, count in (("test", 12), ("train", 8)):
        lines = [json.dumps(row(1000 * number)) for number in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def items(count: int) -> list[Item]:
    return [Item(row(n)["question"], row(n)["answer"], Decimal(n)) for n in range(count)]


def run_script(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True, text=True, timeout=240, env=environment(),
    )  # fmt: skip


# ---------------------------------------------------------------- data


def test_items_are_questions_solutions_and_numbers(data_dir):
    loaded = gsm8k_data.load(data_dir, "test", is_checked=False)
    assert len(loaded) == 12
    assert loaded[3] == Item("What is 3000 + 0?", "It is 3000.\n#### 3,000", Decimal(3000))


def test_a_missing_folder_says_how_to_get_the_data(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere/test\.jsonl.*--data-dir.*--download"):
        gsm8k_data.load(tmp_path / "nowhere", "test")


def test_other_data_is_refused_by_its_checksum(data_dir):
    found = hashlib.sha256((data_dir / "test.jsonl").read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=f"{found}.*--no-checksum"):
        gsm8k_data.load(data_dir, "test")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2: not an object"),
        ("[1]", "line 2: not an object"),
        ('{"question": "q"}', "line 2: not an object.*'answer'"),
        ('{"question": "q", "answer": 5}', "line 2: not an object"),
        ('{"question": 5, "answer": "#### 5"}', "line 2"),
        ('{"question": "q", "answer": "it is 5"}', 'line 2: "answer" must end with "#### NUMBER"'),
        ('{"question": "q", "answer": "#### five"}', 'must end with "#### NUMBER"'),
        ("[" * 100_000, "line 2"),
        ("", "line 2"),
    ],
)
def test_a_malformed_line_is_named(line, message):
    data = f"{json.dumps(row(1))}\n{line}\n{json.dumps(row(2))}".encode()
    with pytest.raises(ConfigError, match=message):
        gsm8k_data.parse(data, "test.jsonl")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe"])
def test_a_file_without_questions_is_refused(data):
    with pytest.raises(ConfigError, match=r"test\.jsonl"):
        gsm8k_data.parse(data, "test.jsonl")


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_the_first_200_training_items_give_the_shots_of_all(seed):
    whole = items(7473)
    shots = gsm8k_data.choose_shots(whole, 5, seed)
    assert shots == gsm8k_data.choose_shots(whole[:200], 5, seed)
    assert (shots == whole[:5]) == (seed is None)


def test_more_shots_than_items_are_refused():
    with pytest.raises(ConfigError, match="--num-shots 5: there are 4"):
        gsm8k_data.choose_shots(items(4), 5, None)


def test_the_prompt_has_the_layout_of_lm_evaluation_harness():
    package = Path(find_spec("lm_eval").origin).parent
    task = yaml.safe_load((package / "tasks/gsm8k/gsm8k.yaml").read_text())
    one, two = items(2)
    rendered = [
        text.replace("{{question}}", one.question).replace("{{answer}}", one.solution)
        for text in (task["doc_to_text"], task["doc_to_target"])
    ]
    expected = " ".join(rendered) + f"\n\nQuestion: {two.question}\nAnswer:"
    assert gsm8k_data.prompt_of(two.question, [one]) == expected
    assert set(gsm8k.STOP) == set(task["generation_kwargs"]["until"])


# ---------------------------------------------------------------- servers


@contextmanager
def scripted_server(reply: Callable[[str], str | None]) -> Iterator[str]:
    """Answers every prompt with reply(prompt); from the first None on it hangs up on everyone."""
    is_dead = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "scripted"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = None if is_dead.is_set() else reply(body["prompt"])
            if text is None:
                is_dead.set()
                self.close_connection = True
                return
            self._send({"choices": [{"text": text}], "usage": {"completion_tokens": 10}})

        def _send(self, content: object) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def number_asked(prompt: str) -> int:
    return int(prompt.rpartition("What is ")[2].partition(" ")[0])


def test_right_wrong_and_invalid_answers_are_counted():
    def reply(prompt: str) -> str:
        assert prompt.count("Question:") == 3, "two worked examples and the question"
        number = number_asked(prompt)
        return ("no idea", f" 3 and\n#### {number}.00.", f"#### {number + 1}")[number % 3]

    with scripted_server(reply) as url:
        result = gsm8k.evaluate(Server(url), items(30), items(2), concurrency=7)
    assert result["error"] is None
    assert (result["num_answered"], result["num_correct"]) == (30, 10)
    assert result["accuracy"] == result["invalid_rate"] == pytest.approx(1 / 3)
    assert result["interval"] == pytest.approx((0.1923, 0.5122), abs=1e-4)
    assert result["num_output_tokens"] == 300
    assert result["output_tokens_per_s"] == pytest.approx(300 / result["duration_s"])
    assert [answer.index for answer in result["answers"]] == list(range(30))


def test_the_score_by_upstream_s_rule_stands_beside_ours(tmp_path):
    """It reads -N as N, and N.00 as 0."""

    def reply(prompt: str) -> str:
        number = number_asked(prompt)
        return (f"#### {number}", f"#### -{number}", f"#### {number}.00")[number % 3]

    with scripted_server(reply) as url:
        result = gsm8k.evaluate(Server(url), items(30), [])
    assert (result["num_correct"], result["accuracy"]) == (20, pytest.approx(2 / 3))
    assert (result["num_correct_upstream"], result["accuracy_upstream"]) == (
        20,
        pytest.approx(2 / 3),
    )
    rights = {(a.is_correct, a.is_correct_upstream) for a in result["answers"]}
    assert rights == {(True, True), (False, True), (True, False)}
    assert "By vLLM's rule       0.6667" in gsm8k.summary(result)
    gsm8k.save(result, tmp_path / "results.json")
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["accuracy_upstream"] == result["accuracy_upstream"]
    assert [a["is_correct_upstream"] for a in saved["answers"]] == [
        a.is_correct_upstream for a in result["answers"]
    ]


def test_no_more_requests_run_than_allowed():
    running, most, lock = 0, 0, threading.Lock()

    def reply(_: str) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.02)
        with lock:
            running -= 1
        return "1"

    with scripted_server(reply) as url:
        gsm8k.evaluate(Server(url), items(20), [], concurrency=3)
    assert 1 < most <= 3


def test_answers_until_the_server_dies_are_saved_and_the_exit_code_says_so(data_dir, tmp_path):
    def reply(prompt: str) -> str | None:
        return "1" if number_asked(prompt) < 5000 else None

    saved = tmp_path / "results.json"
    with scripted_server(reply) as url:
        done = run_script(
            *("--base-url", url, "--data-dir", str(data_dir), "--no-checksum"),
            *("--num-shots", "2", "--concurrency", "1", "--save-results", str(saved)),
        )
    assert done.returncode == 1
    assert "STOPPED EARLY" in done.stdout
    assert "5 of 12" in done.stdout
    result = json.loads(saved.read_text())
    assert result["num_answered"] == len(result["answers"]) == 5
    assert result["error"]


def test_no_server_at_all_is_one_line(data_dir):
    done = run_script("--base-url", "http://127.0.0.1:9", "--data-dir", str(data_dir),
                      "--no-checksum")  # fmt: skip
    assert done.returncode == 2
    assert "no server answers at http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("reply", [{}, {"data": []}, {"data": "x"}, []])
def test_a_server_that_lists_no_model_is_refused(reply):
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = json.dumps(reply).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
        await writer.drain()
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await gsm8k._evaluate(Server(f"http://127.0.0.1:{port}"), items(1), [], 8, 1)

    with pytest.raises(HttpError, match="lists no model"):
        asyncio.run(ask())


@pytest.mark.parametrize("words", [["--num-questions", "0"], ["--concurrency", "-1"]])
def test_a_count_that_means_nothing_is_refused(words):
    done = run_cli("eval", "gsm8k", *words)
    assert done.returncode == 2
    assert words[0] in done.stderr


@pytest.mark.slow
def test_a_real_server_answers_every_question(text_checkpoint, data_dir, tmp_path):
    saved = tmp_path / "results.json"
    with started_server(text_checkpoint, tmp_path / "log") as server:
        done = run_cli(
            *("eval", "gsm8k", "--port", str(server.port), "--data-dir", str(data_dir)),
            *("--no-checksum", "--num-shots", "1", "--max-tokens", "8"),
            *("--save-results", str(saved)),
        )
    assert done.returncode == 0, done.stderr
    result = json.loads(saved.read_text())
    assert (result["model"], result["num_answered"]) == ("tiny", 12)
    assert 0 < result["num_output_tokens"] <= 96
