"""`Report`: what all forms of a report (text, JSON, page, diff) are made from."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm.kernels.report.calls import Calls
from vllm.kernels.report.ledger import Ledger
from vllm.kernels.select.decision import Record
from vllm.machine import Device, Libs


class ModelFacts(NamedTuple):
    """is_served: whether the engine runs it. notes: where its layers come from, and what is left
    out of them."""

    is_served: bool
    notes: tuple[str, ...] = ()


class Report(NamedTuple):
    """What a report tells: `report(*parse_report(json)) == json`.

    env: variables that were set, as text. records: layers with their decisions. ledger: what was
    re-quantised at load; None where nothing was loaded. model: of one that was asked about. calls:
    of the kernels of a server.
    """

    device: Device
    libs: Libs
    env: Mapping[str, str]
    records: list[Record]
    ledger: Ledger | None = None
    model: ModelFacts | None = None
    calls: Calls | None = None

    @classmethod
    def of_stages(cls, reports: Sequence["Report"]) -> "Report":
        """Of an engine whose pipeline stages made `reports`, in their order."""
        records = [record for report in reports for record in report.records]
        ledgers = [report.ledger for report in reports if report.ledger is not None]
        entries = [entry for ledger in ledgers for entry in ledger.entries]
        return reports[0]._replace(records=records, ledger=Ledger(entries) if ledgers else None)
