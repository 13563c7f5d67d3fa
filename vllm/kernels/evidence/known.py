"""Everything that is known of kernel times on one chip, and what it says of a problem."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from vllm.kernels.evidence import imported
from vllm.kernels.evidence.bf16 import faster_in_bf16
from vllm.kernels.evidence.cost_model import path_of_fitted
from vllm.kernels.evidence.estimates import Costs, estimate_of, find_fitted
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.tables import Chip, Table, find_tables, timings_of, user_folder
from vllm.kernels.select.decision import FasterInBf16, Parts
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import Problem, WeightProblem
from vllm.utils.dataclasses import dataclass, replace


@dataclass(frozen=True, eq=False)
class Known:
    """tables: measured on this chip, the strongest first, then on chips with other memory. costs:
    fitted to such tables. chip: whose times others measured, None for nobody's."""

    tables: tuple[Table, ...] = ()
    costs: tuple[Costs, ...] = ()
    chip: Chip | None = None

    @classmethod
    def of(cls, chip: Chip) -> "Known":
        """ConfigError for a file that is broken."""
        return cls(find_tables(chip), find_fitted(chip), chip)

    def evidence(
        self, problem: Problem, versions: Mapping[str, str] | None = None
    ) -> Timings | None:
        """What was measured of this problem here, of another version or on a chip of other memory
        too, else by others, else what the cost model says; None where nothing is known. versions:
        by backend, what is here."""
        measured = timings_of(self.tables, problem, versions)
        if measured is not None and measured.grade is Grade.MEASURED:
            before = self._before(problem, versions)
            return measured if before is None else replace(measured, before=before)
        estimated = estimate_of(self.costs, problem, versions)
        return measured or self._imported(problem) or estimated

    def _before(self, problem: Problem, versions: Mapping[str, str] | None) -> Timings | None:
        """What this build's tables say where a user measured the problem too."""
        own = [table for table in self.tables if not table.is_near]
        if all(table.is_shipped or problem.size_key not in table.rows for table in own):
            return None
        return timings_of([table for table in own if table.is_shipped], problem, versions)

    def _imported(self, problem: Problem) -> Timings | None:
        """None where others measured no two kernels that a backend here calls too, or their tables
        of this chip are a cross-check of ours alone."""
        if self.chip is None or not isinstance(problem, WeightProblem):
            return None
        times = imported.first_times(_comparing_tables(self, problem.family), problem)
        return None if times is None else as_evidence(times)

    def faster_in_bf16(self, problem: Problem, parts: Parts) -> FasterInBf16 | None:
        """What others measured where choices may follow them; see `evidence/bf16.py`."""
        if self.chip is None:
            return None
        return faster_in_bf16(_imported_tables(self, problem.family), problem, parts)

    def digests(self) -> Iterator[str]:
        """Names of the tables, with what they hold, and of the user's other files."""
        for table in self.tables:
            content = repr((table.chip, dict(table.rows))).encode()
            yield f"{Path(table.source).name} {_digest(content)}"
        folders = path_of_fitted(user_folder() / "_").parent, user_folder() / imported.FOLDER
        for folder in folders:
            for path in sorted(folder.glob("*.json*")):
                yield f"{folder.name}/{path.name} {_digest(path.read_bytes())}"


@lru_cache(maxsize=8)
def _imported_tables(known: Known, family: str) -> tuple[imported.ImportedTable, ...]:
    """Those that choices may follow."""
    assert known.chip is not None
    return imported.find_imported(known.chip, family, alone_ranking=True)


@lru_cache(maxsize=8)
def _comparing_tables(known: Known, family: str) -> tuple[imported.ImportedTable, ...]:
    """With those kinds of layers alone for which two kernels compare that backends here call."""
    return tuple(imported.comparing(_imported_tables(known, family)))


def as_evidence(times: imported.ImportedTimes) -> Timings | None:
    """For the selector; None where there are not two kernels to compare."""
    if len(times.us) < 2:
        return None
    error = tuple((backend, times.error) for backend, _ in times.us)
    return Timings(times.source, times.tokens, times.us, (), Grade.IMPORTED, error)


def _digest(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()[:16]
