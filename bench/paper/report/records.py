"""The cells of a figure as a report, and those of several figures as a page with zoomable charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from collectives.bench.core.records import BaseReport, Chart, Table
from collectives.bench.core.text import network_of
from collectives.bench.paper.cells import Measured
from collectives.bench.paper.drawing import figure_charts
from collectives.bench.paper.report.kept import KeptFigure
from collectives.bench.paper.systems import systems_table
from collectives.bench.paper.tables import figure_tables

__all__ = ["FiguresReport", "Report"]


class Report(BaseReport[Measured]):
    """All cells of a figure that are done."""

    __slots__ = ()

    def record_as_json(self, record: Measured) -> dict[str, Any]:
        """Returns a cell and its raw samples."""
        return asdict(record)

    def tables(self) -> Sequence[Table]:
        """Returns the tables of the cells."""
        return list(figure_tables(self.records))


@dataclass(kw_only=True)
class FiguresReport(Report):
    """Several figures, as medians and spread.

    Attributes:
        figures: by name.
        with_systems: whether table 1 is one of them.
    """

    figures: Mapping[str, KeptFigure]
    with_systems: bool

    def tables(self) -> Sequence[Table]:
        """Returns the tables of each figure, and table 1."""
        found = [
            replace(table, heading=f"{name}: {table.heading}")
            for name, figure in self.figures.items()
            for table in figure_tables(figure.records)
        ]
        return [*found, systems_table()] if self.with_systems else found

    def charts(self) -> Sequence[Chart]:
        """Returns the panels of each figure."""
        return [
            replace(chart, title=", ".join([f"{name}: {chart.title}", *network_of(figure.options)]))
            for name, figure in self.figures.items()
            for chart in figure_charts(name, figure.records)
        ]
