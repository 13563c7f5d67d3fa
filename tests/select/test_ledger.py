"""The ledger tells in one line what loading cost, and in JSON everything."""

import dataclasses
import json
import subprocess
import sys

import pytest

from vllm.kernels.report.ledger import Entry, Ledger

TO_UE8M0 = "fp8-block float32 -> ue8m0"


def lossy(layer: str, relative_error: float) -> Entry:
    return Entry(layer, TO_UE8M0, relative_error, relative_error / 10, is_exact=False)


def exact(layer: str) -> Entry:
    return Entry(layer, TO_UE8M0, 0.0, 0.0, is_exact=True)


def make(*entries: Entry) -> Ledger:
    ledger = Ledger()
    for entry in entries:
        ledger.record(**dataclasses.asdict(entry))
    return ledger


def test_nothing_recorded_means_nothing_lost():
    assert make().summary() == "no lossy transform"
    assert make().to_json() == {"summary": "no lossy transform", "entries": []}


def test_exact_transforms_are_counted_and_lose_nothing():
    assert make(exact("a")).summary() == "no lossy transform, 1 transform exact"
    assert make(exact("a"), exact("b")).summary() == "no lossy transform, 2 transforms exact"


def test_the_summary_has_the_median_and_names_the_worst_layer():
    ledger = make(lossy("a", 0.026), lossy("b", 0.0281), lossy("c", 0.025), exact("d"))
    assert ledger.summary() == (
        "re-quantised 3 layers with loss: relative error median 2.60%, worst 2.81% (b); "
        "1 transform exact"
    )


def test_exact_transforms_do_not_lower_the_median():
    entries = [lossy("a", 0.02), lossy("b", 0.04), *(exact(name) for name in "cdefg")]
    assert "median 3.00%, worst 4.00% (b); 5 transforms exact" in make(*entries).summary()


def test_scales_of_inputs_are_no_loss_of_the_weight():
    inputs = Entry("a", "nvfp4 input scales -> the largest", 0.5, 0.1, False, of_inputs=True)
    assert make(inputs).summary() == (
        "no lossy transform, 0 transforms exact; 1 layer with other scales of inputs"
    )
    assert (
        "median 2.00%, worst 2.00% (b); 0 transforms exact; 1 layer with"
        in make(inputs, lossy("b", 0.02)).summary()
    )


def test_one_layer_is_a_layer():
    assert make(lossy("a", 0.5)).summary().startswith("re-quantised 1 layer with loss:")


def test_json_keeps_every_entry_in_the_order_of_loading():
    ledger = make(lossy("b", 0.026), exact("a"))
    written = json.loads(json.dumps(ledger.to_json()))
    assert [Entry(**entry) for entry in written["entries"]] == ledger.entries
    assert written["summary"] == ledger.summary()


def test_an_entry_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        exact("a").relative_error = 1.0


def test_the_ledger_needs_no_torch():
    code = "import sys, vllm.kernels.report.ledger; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
