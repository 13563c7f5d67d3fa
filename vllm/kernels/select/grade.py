"""How much is known of a kernel on a chip."""

from enum import StrEnum

from vllm.machine import Device


class Grade(StrEnum):
    """What a candidate's place rests on, the best first."""

    MEASURED = "measured"
    """Timed for this problem on this chip with these versions."""
    IMPORTED = "imported"
    """Timed by others on this chip."""
    ESTIMATED = "estimated"
    """Its time comes from a model, from another version of it or another chip."""
    RUN = "run"
    """Its results were compared on this architecture; how fast it is, nobody measured."""
    COMPILED = "compiled"
    """It never ran on this architecture."""

    def reaches(self, least: "Grade") -> bool:
        return _PLACES[self] <= _PLACES[least]


_PLACES = {grade: place for place, grade in enumerate(Grade)}


def least(grades: list[Grade]) -> Grade:
    return max(grades, key=_PLACES.__getitem__)


def ran_on(device: Device, weight_format: str) -> str:
    """An entry of `KernelSpec.ran_on`: `sm_90/fp8-block`."""
    return f"{device.arch}/{weight_format}"
