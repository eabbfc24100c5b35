"""What a search found for each number of ranks, as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from collectives.bench.core.charts import Chart, Curve
from collectives.bench.core.records import BaseReport
from collectives.bench.core.sizes import format_bytes
from collectives.bench.core.text import number_of_ranks
from collectives.bench.tuning.search import Outcome

__all__ = ["Report"]


class Report(BaseReport[Outcome]):
    """The outcome for each number of ranks."""

    __slots__ = ()

    def record_as_json(self, record: Outcome) -> dict[str, Any]:
        """Returns an outcome as plain values."""
        return {
            "ranks": record.ranks,
            "conclusion": record.conclusion,
            "noise": record.noise,
            "gain": record.gain,
            "thresholds_before": dict(record.before),
            "thresholds_after": {**record.before, **record.after},
            "times": [
                {
                    "operation": probe.operation,
                    "size_bytes": probe.size_bytes,
                    "before_us": before,
                    "after_us": after,
                    "ratio": after / before,
                }
                for probe, before, after in zip(record.probes, record.before_us, record.after_us, strict=True)
            ],
        }

    def tables(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Returns the times, the thresholds and what follows, each by ranks."""
        found = [self.record_as_json(record) for record in self.records]
        return {
            "Measurements": [{"ranks": one["ranks"], **row} for one in found for row in one["times"]],
            "Thresholds": [
                {
                    "ranks": one["ranks"],
                    "threshold": name,
                    "before": before,
                    "after": one["thresholds_after"][name],
                }
                for one in found
                for name, before in one["thresholds_before"].items()
            ],
            "Conclusions": [
                {key: one[key] for key in ("ranks", "conclusion", "noise", "gain")} for one in found
            ],
        }

    def charts(self) -> Sequence[Chart]:
        """Returns the times with the new thresholds over those before, for each number of ranks."""
        return [_chart(record) for record in self.records]


def _chart(outcome: Outcome) -> Chart:
    names = [f"{probe.operation} {format_bytes(probe.size_bytes)}" for probe in outcome.probes]
    ratios = [after / before for before, after in zip(outcome.before_us, outcome.after_us, strict=True)]
    curve = Curve("after/before", names, ratios)
    return Chart(number_of_ranks(outcome.ranks), "", "time after over time before", [curve])
