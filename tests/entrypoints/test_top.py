"""`vllm top`: what it computes from `/metrics`, and what it shows of a server."""

import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from vllm.entrypoints.cli import top_metrics
from vllm.entrypoints.cli.top_metrics import frame, quantile, snapshot
from vllm.errors import ConfigError

from .serving import COMMAND, RunningServer, environment, run_cli

pytest.importorskip("rich")

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 2.0
vllm:num_requests_running{{engine="1",model_name="m"}} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.5
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.25
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{engine="0"}} 40.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{engine="0"}} 10.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="0.1"}} {fast}
vllm:time_to_first_token_seconds_bucket{{le="1.0"}} {all}
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {all}
vllm:time_to_first_token_seconds_count {all}
vllm:time_to_first_token_seconds_sum 1.0
# TYPE process_open_fds gauge
process_open_fds 7.0
"""


def test_rates_are_of_the_time_between_two_answers() -> None:
    before = snapshot(METRICS.format(tokens=100, fast=10, all=10), 50.0)
    now = snapshot(METRICS.format(tokens=150, fast=10, all=12), 52.0)
    shown = frame(before, now)
    assert (shown.models, shown.running, shown.waiting) == (("m",), 3, 0)
    assert (shown.kv_cache, shown.prefix_hits) == (0.375, 0.25)
    assert (shown.generation_rate, shown.prompt_rate) == (25.0, 0.0)
    # The two new first tokens took between 0.1 and 1 s.
    assert shown.latencies["first token"] == pytest.approx((0.55, 0.91, 0.991))
    assert shown.latencies["whole request"] is None
    assert not shown.latencies_since_start
    quiet = frame(now, now._replace(seconds=53.0))
    assert quiet.generation_rate == 0.0
    assert quiet.latencies_since_start
    assert quiet.latencies["first token"][0] == pytest.approx(0.06)  # of all 12


def test_quantiles_of_buckets() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({1.0: 0.0, math.inf: 0.0}, 0.5) is None
    assert quantile({1.0: 4.0, 2.0: 8.0, math.inf: 8.0}, 0.75) == 1.5
    assert quantile({1.0: 0.0, math.inf: 3.0}, 0.99) == 1.0
    assert len(top_metrics.QUANTILES) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [("<html>", "not in Prometheus' text format"), ("up 1\n", "no vllm serve answers there")],
)
def test_another_programs_answer_is_told(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        snapshot(text, 0.0)


def test_a_frame_of_a_server(server: RunningServer) -> None:
    server.complete(prompt="ban", max_tokens=4)
    done = run_cli("top", "--url", server.url, "--once", "--interval", "0.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"tiny at {server.url}\n")
    assert re.search(r"requests +0 running, 0 waiting", done.stdout)
    assert re.search(r"^first token( +\d+\.\d{3}){3}", done.stdout, re.MULTILINE)
    assert re.search(r"^cpu +linear +\S+ +default order +\d+", done.stdout, re.MULTILINE)
    assert "\x1b" not in done.stdout


def test_what_cannot_be_shown_is_told() -> None:
    done = run_cli("top", "--url", "http://127.0.0.1:9", "--once")
    assert done.returncode == 2 and "no server answers at http://127.0.0.1:9" in done.stderr
    done = run_cli("top", "--interval", "0")
    assert "--interval 0.0: it takes a number of seconds of 0.1 or more" in done.stderr
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "from vllm.entrypoints.cli.main import main; sys.exit(main(['top', '--once']))"
    )
    command = [sys.executable, "-c", code]
    without = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert without.returncode == 2 and "pip install rich" in without.stderr


@pytest.mark.parametrize(("term", "clears"), [("xterm", True), ("dumb", False)])
def test_a_terminal_shows_frames_until_ctrl_c(server: RunningServer, term, clears) -> None:
    command = [*COMMAND, "top", "--url", server.url, "--interval", "0.1"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env=environment(TERM=term), stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 60
    while shown.count(b"KV cache") < 2 and time.monotonic() < deadline:
        if select.select([ours], [], [], 1)[0]:
            shown += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    while select.select([ours], [], [], 5)[0]:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait(20) == 130
    assert shown.count(b"KV cache") >= 2
    assert (b"\x1b[?1049h" in shown) is (b"\x1b[?1049l" in shown) is clears
    assert b"Traceback" not in shown
