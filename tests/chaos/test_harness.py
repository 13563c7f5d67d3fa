"""The suite's own parts: times, the prober and the table."""

import http.server
import json
import threading
import time
from pathlib import Path

import pytest

from .harness import Fault, Prober, Row, seconds_of, table, write_page


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("5s", 5), ("20m", 1200), ("2h", 7200)])
def test_times_of_a_soak(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "2d", "-1s"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="2h"):
        seconds_of(text)


def test_a_prober_sees_an_answer_that_is_slow_or_has_not_come() -> None:
    released = threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            released.wait(10)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as slow:
        threading.Thread(target=slow.serve_forever, daemon=True).start()
        prober, case = Prober(slow.server_port), Fault(Row("slow"))
        case.probe(prober)
        time.sleep(1.3)
        assert prober.longest > 1.0
        released.set()
        with pytest.raises(AssertionError, match="/health took"):
            case.finish()
        time.sleep(0.3)
        prober.begin()
        time.sleep(0.3)
        assert prober.longest < 1.0
        prober.end()
        slow.shutdown()


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "chaos.json"
    page.write_text("before\n<!-- chaos table -->\nold\n<!-- end of chaos table -->\nafter\n")
    rows = [Row("a fault", True, 0.01, 2.34, 0.456), Row("another")]
    write_page(rows, page, results)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| a fault | yes | < 0.1 s | 2.3 s | 0.46 s |\n| another | **no** | - | - | - |" in text
    assert table(rows) in text
    assert [row["fault"] for row in json.loads(results.read_text())["faults"]] == [
        "a fault", "another",
    ]  # fmt: skip
