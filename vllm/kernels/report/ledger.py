"""The re-quantisation ledger: what loading did to weights or scales beyond what is stored."""

from typing import Any

from vllm.kernels.report.layer_groups import counted
from vllm.utils.dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Entry:
    """One transform of one layer.

    transform: such as `fp8-block float32 -> ue8m0`. relative_error: Frobenius norm of the change
    over that of the stored weight, or of the scales of inputs; max_error: greatest change of an
    element. is_exact: no value changed. of_inputs: what changed are scales of inputs, by which
    activations are quantised; the weight is as stored.
    """

    layer: str
    transform: str
    relative_error: float
    max_error: float
    is_exact: bool
    of_inputs: bool = False


@dataclass()
class Ledger:
    """Every transform of a model, in the order of loading."""

    entries: list[Entry] = field(default_factory=list)

    def record(
        self,
        layer: str,
        transform: str,
        relative_error: float,
        max_error: float,
        is_exact: bool,
        of_inputs: bool = False,
    ) -> None:
        """Adds what `Entry` describes."""
        entry = Entry(layer, transform, relative_error, max_error, is_exact, of_inputs)
        self.entries.append(entry)

    def to_json(self) -> dict[str, Any]:
        return {"summary": self.summary(), "entries": [asdict(entry) for entry in self.entries]}

    def summary(self) -> str:
        """One line: how many layers lost what, and how many transforms were exact."""
        lossy = [entry for entry in self.entries if not entry.is_exact and not entry.of_inputs]
        num_exact = sum(entry.is_exact for entry in self.entries)
        exact = f"{counted(num_exact, 'transform')} exact"
        if num_inputs := len(self.entries) - len(lossy) - num_exact:
            exact += f"; {counted(num_inputs, 'layer')} with other scales of inputs"
        if not lossy:
            return f"no lossy transform, {exact}" if self.entries else "no lossy transform"
        worst = max(lossy, key=lambda entry: entry.relative_error)
        from statistics import median

        middle = median(entry.relative_error for entry in lossy)
        return (
            f"re-quantised {counted(len(lossy), 'layer')} with loss: relative error median "
            f"{middle:.2%}, worst {worst.relative_error:.2%} ({worst.layer}); {exact}"
        )
