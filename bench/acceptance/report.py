"""Rows with a verdict each, as they are printed, and as JSON and Markdown."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from collectives.bench.core.arguments import telling_how_long
from collectives.bench.core.records import BaseReport, Chart, Column, Curve, Table, Timing, curve_of

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


_COLUMNS = (
    Column("section", "", -12),
    Column("check", "", -32),
    Column("verdict", "", -8),
    Column("found", "", -40),
    Column("time", "(s)", 8),
)


class Report(BaseReport[Row]):
    """The rows of a run."""

    def record_as_json(self, record: Row) -> dict[str, Any]:
        """Returns a row as plain values."""
        return asdict(record) | {"verdict": record.verdict.value}

    def tables(self) -> Sequence[Table]:
        """Returns the rows without their figures, of which the words say what a reader needs."""
        rows = [
            (row.section, row.name, row.verdict.value, row.said, f"{row.seconds:.1f}") for row in self.records
        ]
        return [Table(self.summary(), _COLUMNS, rows)]

    def charts(self) -> Sequence[Chart]:
        """Returns how long each row of a section took, and the measured times of all-reduces over size."""
        return [*self._durations(), *self._speeds()]

    def _durations(self) -> Iterator[Chart]:
        verdicts = [verdict for verdict in Verdict if self.count(verdict)]
        curves = []
        for verdict in verdicts:
            rows = [row for row in self.records if row.verdict is verdict]
            curves.append(Curve(verdict.value, [row.section for row in rows], [row.seconds for row in rows]))
        if curves:
            yield Chart("how long the rows of each section took", "", "seconds", curves, stacked=True)

    def _speeds(self) -> Iterator[Chart]:
        y = "time (us), slowest rank, median and p10 to p90"
        for row in self.records:
            if row.section == "bandwidth" and "records" in row.figures:
                charts: dict[str, dict[str, list[tuple[float, Timing]]]] = {}
                for record in row.figures["records"]:
                    cold = Timing(**{name: record["cold"][name] for name in Timing.__slots__})
                    by_peer = charts.setdefault(record["operation"], {})
                    by_peer.setdefault(record["peer"], []).append((record["size_bytes"], cold))
                where = row.name.partition(", ")[2]
                for operation, by_peer in charts.items():
                    curves = [curve_of(peer, points) for peer, points in by_peer.items()]
                    yield Chart(f"{operation}, {where}", "size (bytes)", y, curves)

    def count(self, verdict: Verdict) -> int:
        """Returns the number of rows with a verdict."""
        return sum(row.verdict is verdict for row in self.records)

    def summary(self) -> str:
        """Returns the numbers of rows by verdict."""
        counts = Counter(row.verdict for row in self.records)
        return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)

    def markdown(self) -> str:
        """Returns a table of all rows under what they were found on, to be sent as it is."""
        about = {**self.environment, **self.options}
        lines = [f"# {self.program}: {self.summary()}", ""]
        lines += [f"- {name}: {value}" for name, value in about.items()]
        lines += ["", "| section | check | verdict | found | seconds |", "|---|---|---|---|---|"]
        for row in self.records:
            said = row.said.replace("|", "\\|").replace("\n", "<br>")
            cells = (row.section, row.name, row.verdict.value, said, f"{row.seconds:.1f}")
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"
