"""What the model says, as a report: parameters, the check, and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from collectives.bench.core.charts import Chart, Curve
from collectives.bench.core.records import BaseReport
from collectives.bench.cost_model.algorithms import host_algorithm
from collectives.bench.cost_model.calibration import Point, as_json, errors, predicted_us
from collectives.bench.cost_model.parameters import Parameters, Scale
from collectives.bench.cost_model.plot import scaling_charts
from collectives.bench.cost_model.predictions import Prediction, scaling_ends

__all__ = ["Report"]


@dataclass(kw_only=True)
class Report(BaseReport[Prediction]):
    """Predicted all-reduces by every algorithm, and what they follow from.

    Attributes:
        parameters: as calibrated.
        predicted_for: those of the machines and network that the predictions are for.
        used: points that calibrated.
        kept: points of the check.
        sizes: those that are predicted.
        scales: where the ranks of the predictions are, ascending.
    """

    parameters: Parameters
    predicted_for: Parameters
    used: Sequence[Point]
    kept: Sequence[Point]
    sizes: Sequence[int]
    scales: Sequence[Scale]

    def as_json(self) -> dict[str, Any]:
        """Returns the report as plain values, with parameters, points and where algorithms stop."""
        checked = errors(self.kept, self.parameters)
        return {
            **super().as_json(),
            "parameters": asdict(self.parameters),
            "predicted_for": asdict(self.predicted_for),
            "calibration": [as_json(point, self.parameters) for point in self.used],
            "check": [as_json(point, self.parameters) for point in self.kept],
            "check_errors": None if checked is None else checked._asdict(),
            "ends": [asdict(end) for end in scaling_ends(self.sizes, self.scales, self.predicted_for)],
        }

    def record_as_json(self, record: Prediction) -> dict[str, Any]:
        """Returns a prediction as plain values, and whether the host backend takes this algorithm."""
        ours = host_algorithm("all_reduce", record.size_bytes, record.scale)
        return {**asdict(record), "is_ours": record.algorithm == ours}

    def tables(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Returns all of it by subject."""
        plain = self.as_json()
        return {
            "Predictions": plain["records"],
            "Where algorithms stop": plain["ends"],
            "Parameters": [
                {"parameter": name, "calibrated": value, "predicted for": plain["predicted_for"][name]}
                for name, value in plain["parameters"].items()
            ],
            "Check": plain["check"],
        }

    def charts(self) -> Sequence[Chart]:
        """Returns the predicted time over ranks of each size, and predicted over measured times."""
        charts = scaling_charts(self.sizes, self.scales, self.predicted_for)
        return [*charts, *([self._check()] if self.kept else [])]

    def _check(self) -> Chart:
        curves = []
        for operation in dict.fromkeys(point.operation for point in self.kept):
            points = [point for point in self.kept if point.operation == operation]
            predicted = [predicted_us(point, self.parameters) for point in points]
            curves.append(Curve(operation, [point.measured_us for point in points], predicted, look="points"))
        ends = [min(point.measured_us for point in self.kept), max(point.measured_us for point in self.kept)]
        equal = Curve("as measured", ends, ends, look="dotted")
        return Chart("check: predicted over measured", "measured (us)", "predicted (us)", [*curves, equal])
