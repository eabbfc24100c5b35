"""How long a run takes, by the number of its rows, and what of that each measurement gets.

The seconds of rows are guesses until reports come, which say what each row took. Rows that fail may take
longer, up to limits of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["Budget", "Work", "budget_of"]

_ONE_GPU_S: Final = 600.0
_EIGHT_GPUS_S: Final = 3600.0
"""What a run should take; in proportion between one GPU and eight."""
_MEASUREMENT_S: Final = 5.0, 60.0
"""What a measurement gets at least and at most, for all its peers together."""


@dataclass(frozen=True)
class Work:
    """What a section does.

    Attributes:
        seconds: what it takes, without what measurements may get.
        measurements: the number of rows that measure for as long as they are told to.
    """

    seconds: float = 0.0
    measurements: int = 0


@dataclass(frozen=True)
class Budget:
    """The time of a run.

    Attributes:
        measurements: their number.
        measurement_s: what each of them gets.
        total_s: what all takes.
    """

    measurements: int
    measurement_s: float
    total_s: float

    def __str__(self) -> str:
        said = f"about {max(1, round(self.total_s / 60))} min, longer where rows fail"
        if self.measurements:
            said += f"; {self.measurement_s:.0f} s for each of {self.measurements} measurements"
        return said


def budget_of(gpus: int, works: Iterable[Work]) -> Budget:
    """Returns the time of a run: measurements share what other rows leave, within limits.

    Args:
        gpus: number of devices.
        works: of the sections.
    """
    listed = [*works]
    fixed = sum(work.seconds for work in listed)
    number = sum(work.measurements for work in listed)
    share = min(1.0, (gpus - 1) / 7)
    left = _ONE_GPU_S + share * (_EIGHT_GPUS_S - _ONE_GPU_S) - fixed
    least, most = _MEASUREMENT_S
    each = min(most, max(least, left / max(number, 1)))
    return Budget(number, each, fixed + number * each)
