"""The records of ``bench hooks`` and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from collectives.bench.core.records import BaseReport, Chart, Timing, curve_of
from collectives.bench.core.text import Column, or_dash, skipped_lines, table_lines

__all__ = ["HookRecord", "HookReport", "report_lines"]

BASELINE = "none"
"""The hook that others are compared with: none, which is plain averaging."""


@dataclass(frozen=True, slots=True)
class HookRecord:
    """One hook with one task.

    Attributes:
        task: name of the task.
        hook: name of the hook.
        backend: name of the backend.
        ranks: number of ranks.
        parameters: number of trained parameters.
        steps: optimizer steps.
        iteration: those after the warm-up.
        sent_bytes: what a rank sends in one of them.
        link_bytes: what a machine sends in an iteration, over all steps; ``None`` without machines.
        first_loss: mean over the ranks at the first step.
        final_loss: mean over the ranks in the last tenth of the steps.
        accuracy: part of the held-out samples that the model reads right; ``None`` where there are none.
        ranks_identical: whether all ranks ended with bitwise the same parameters.
    """

    task: str
    hook: str
    backend: str
    ranks: int
    parameters: int
    steps: int
    iteration: Timing
    sent_bytes: float
    link_bytes: float | None
    first_loss: float
    final_loss: float
    accuracy: float | None
    ranks_identical: bool

    @property
    def right(self) -> bool:
        """Whether the ranks stayed together, as they must with a hook that communicates."""
        return self.ranks_identical or self.hook == "noop" or self.ranks == 1


class HookReport(BaseReport[HookRecord]):
    """All that the program found out."""

    def record_as_json(self, record: HookRecord) -> dict[str, Any]:
        """Returns a record as plain values, with its ratio."""
        return {**asdict(record), "time_over_none": self.time_ratio(record)}

    def charts(self) -> Sequence[Chart]:
        """Returns the iterations of all hooks, for each task."""
        return [
            Chart(
                task,
                "",
                "iteration (ms), slowest rank, median and p10 to p90",
                [
                    curve_of(record.hook, [(record.hook, record.iteration)], 1e3)
                    for record in self.records
                    if record.task == task
                ],
            )
            for task in dict.fromkeys(record.task for record in self.records)
        ]

    def time_ratio(self, record: HookRecord) -> float | None:
        """Returns a record's iteration over that without a hook; ``None`` where that is missing."""
        for other in self.records:
            if (other.task, other.hook) == (record.task, BASELINE):
                return record.iteration.median_us / other.iteration.median_us
        return None


_COLUMNS: tuple[Column, ...] = (
    ("hook", "", -17), ("median (ms)", "", 12), ("p10", "", 9), ("p90", "", 9), ("/none", "", 8),
    ("sent (MB)", "", 11), ("link (MB)", "", 11), ("loss before", "", 13), ("after", "", 9), ("acc", "", 7),
    ("  right", "", -7),
)  # fmt: skip


def report_lines(report: HookReport) -> Iterator[str]:
    """Yields a table for each task, then what was skipped."""
    for task in dict.fromkeys(record.task for record in report.records):
        records = [record for record in report.records if record.task == task]
        first = records[0]
        yield ""
        yield (
            f"# {task}: {first.parameters / 1e6:.2f} M parameters, {first.ranks} ranks over {first.backend}, "
            f"{first.steps} steps, {first.iteration.calls} of them timed; slowest rank"
        )
        yield from table_lines(_COLUMNS, (_cells(report, record) for record in records))
    if report.skipped:
        yield ""
        yield from skipped_lines(report.skipped)


def _cells(report: HookReport, record: HookRecord) -> list[str]:
    timing = record.iteration
    right = "yes" if record.right else "NO"
    return [
        record.hook,
        *(f"{us / 1e3:.2f}" for us in (timing.median_us, timing.p10_us, timing.p90_us)),
        or_dash(report.time_ratio(record), ".3f"),
        f"{record.sent_bytes / 1e6:.3f}",
        or_dash(None if record.link_bytes is None else record.link_bytes / 1e6, ".3f"),
        f"{record.first_loss:.4f}",
        f"{record.final_loss:.4f}",
        or_dash(record.accuracy, ".3f"),
        f"  {'-' if record.hook == 'noop' else right}",
    ]
