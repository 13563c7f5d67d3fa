"""benchmarks/serving/bench_http.py: its clients count what a server sends, and it runs."""

import asyncio
import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "serving"
sys.path.insert(0, str(SCRIPTS))

from bench_http import flags_of, percentiles  # noqa: E402
from http_clients import Plan, Request, run  # noqa: E402

EVENT = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"text":"b","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip


def answers_to(pieces: list[bytes], count: int) -> dict:
    """What one client measures of `count` answers, sent in these pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"!")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    async def measure() -> dict:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await run(Plan(port, 100, 0.0, []), [[b"ask!"] * count])

    return asyncio.run(measure())


@pytest.mark.parametrize("at", [*range(1, 2 * len(EVENT), 5), len(EVENT), 2 * len(EVENT)])
def test_clients_count_each_event_once_wherever_a_read_cuts_it(at: int) -> None:
    text = b"HTTP/1.1 200 OK\r\n\r\n" + EVENT * 3 + LAST
    at += text.index(b"data")
    found = answers_to([text[:at], text[at:]], 2)
    assert [num for *_, num in found["requests"]] == [4, 4]
    assert len(found["gaps"]) == 6
    for start, first, last, _ in found["requests"]:
        assert start < first <= last


def test_an_answer_that_ends_early_is_an_error_that_shows_it() -> None:
    with pytest.raises(RuntimeError, match=r"no whole answer.*HTTP/1\.1 429"):
        answers_to([b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater"], 1)
    with pytest.raises(RuntimeError, match="no whole answer"):
        answers_to([b"HTTP/1.1 200 OK\r\n\r\n" + EVENT * 3], 1)


def test_a_plan_is_the_same_after_its_line_and_its_prompts_are_of_the_vocabulary() -> None:
    plan = Plan(8000, 500, 0.6, [[Request("a", 3, 4), Request("b", 50, 1)], []])
    assert Plan.of(plan.line()) == plan
    for vocab_size in (40, 500, 150_000):
        prompt = Request("b", 5000, 1).prompt(vocab_size)
        assert prompt == Request("b", 5000, 1).prompt(vocab_size)
        assert 0 <= min(prompt) < max(prompt) < vocab_size
    assert Request("a", 50, 1).prompt(500) != Request("b", 50, 1).prompt(500)


def test_engine_arguments_are_flags_that_the_server_takes() -> None:
    from vllm.entrypoints.cli.main import make_parser

    engine = {"max_num_seqs": 32, "enable_prefix_caching": False, "kv_cache_dtype": "fp8",
              "enforce_eager": True, "speculative_config": {"method": "ngram"}}  # fmt: skip
    args = make_parser().parse_args(["serve", "model", *flags_of(engine)])
    assert args.max_num_seqs == 32 and args.enable_prefix_caching is False
    assert args.kv_cache_dtype == "fp8" and args.enforce_eager
    assert array("d", percentiles([0.001 * i for i in range(100)]).values()).tolist() == [50, 99]


@pytest.mark.slow
def test_the_whole_load_of_a_tiny_model_is_computed_and_told(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    words = ["--requests", "12", "--longest", "110", "--short", "8", "--clients", "3",
             "--processes", "2", "--rounds", "1", "--out", str(tmp_path)]  # fmt: skip
    subprocess.run(
        [sys.executable, SCRIPTS / "bench_http.py", tmp_path / "tiny.json", *words,
         "--engine-args", '{"max_num_seqs": 16}', "--", "--stream-interval", "4"],
        cwd=ROOT, check=True, timeout=300,
    )  # fmt: skip
    found = json.loads((tmp_path / "http_tiny.json").read_text())
    loads = {"http": found["http"], "short": found["short"], "waves": found["waves"]["3"]}
    assert found["offline"]["requests"] == 12
    assert {name: load["requests"] for name, load in loads.items()} == {
        "http": 12, "short": 8, "waves": 9
    }  # fmt: skip
    # Each token of a request is computed but for its last: no prompt was found in a cache.
    offline = found["offline"]
    tokens = {
        "http": offline["tokens_in"] + offline["tokens_out"] - 12,
        "short": 8 * (110 + 32 - 1),
        "waves": 9 * (110 + 110 - 1),
    }
    for name, load in loads.items():
        computed = load["steps"] * load["tokens_per_step"]
        assert computed == pytest.approx(tokens[name], abs=0.05 * load["steps"] + 1), name
        assert load["tokens_per_event"] > 2 and load["ttft_ms"]["p50"] > 0
        assert 0 < load["client_cpu"] < 1.1 and load["api_us_per_token"] > 0
    assert found["http"]["of_offline"] > 0
