"""Rows with a verdict each, as they are printed, and as JSON and a page."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from collectives.bench.core.arguments import telling_how_long
from collectives.bench.core.records import BaseReport, Chart, Curve, Table, grouped

Found = tuple[str, Mapping[str, Any]]
"""What a check found, in words and as figures."""


class CheckFailedError(Exception):
    """What was checked is not so; the message says what was found instead."""


class CheckSkippedError(Exception):
    """Nothing could be checked; the message says why, and what would change that."""


class Verdict(str, enum.Enum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        section: what it belongs to.
        name: what was checked.
        verdict: what became of it.
        said: what was found, in words; more than one line where a failure needs it.
        seconds: how long it took.
        figures: what was found, as plain values.
    """

    section: str
    name: str
    verdict: Verdict
    said: str
    seconds: float
    figures: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Returns the row as it is printed."""
        mark = {Verdict.PASSED: "ok", Verdict.FAILED: "FAIL", Verdict.SKIPPED: "skip"}[self.verdict]
        return f"{mark:4}  {self.section}: {self.name}: {self.said}"


def checked(section: str, name: str, check: Callable[[], Found]) -> Row:
    """Carries out a check and tells for how long it has been under way; returns its row.

    Args:
        section: of the row.
        name: of the row.
        check: returns what it found in words and as figures. Any exception is a failure but
            :class:`CheckSkippedError`.
    """
    began = time.monotonic()
    figures: Mapping[str, Any] = {}
    try:
        with telling_how_long(f"{section}: {name}"):
            said, figures = check()
        verdict = Verdict.PASSED
    except CheckSkippedError as error:
        said, verdict = str(error), Verdict.SKIPPED
    except CheckFailedError as error:
        said, verdict = str(error), Verdict.FAILED
    except Exception as error:  # noqa: BLE001 - the other rows are checked, too
        said, verdict = f"{type(error).__name__}: {error}", Verdict.FAILED
    return Row(section, name, verdict, said, time.monotonic() - began, figures)


class Report(BaseReport[Row]):
    """The rows of a run."""

    SCHEMA = 2

    def record_as_json(self, record: Row) -> dict[str, Any]:
        """Returns a row as plain values."""
        return asdict(record) | {"verdict": record.verdict.value}

    def tables(self) -> Sequence[Table]:
        """Returns the rows without their figures, of which the words say what a reader needs."""
        rows = [
            (row.section, row.name, row.verdict.value, row.said, f"{row.seconds:.1f}") for row in self.records
        ]
        return [Table(self.summary(), ("section", "check", "verdict", "found", "time\n(s)"), rows)]

    def charts(self) -> Sequence[Chart]:
        """Returns how long each row of a section took."""
        curves = [
            Curve(verdict.value, [row.section for row in rows], [row.seconds for row in rows])
            for verdict, rows in grouped(self.records, lambda row: row.verdict).items()
        ]
        return [Chart("how long the rows of each section took", "", "seconds", curves, stacked=True)]

    def count(self, verdict: Verdict) -> int:
        """Returns the number of rows with a verdict."""
        return sum(row.verdict is verdict for row in self.records)

    def summary(self) -> str:
        """Returns the numbers of rows by verdict."""
        counts = Counter(row.verdict for row in self.records)
        return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
