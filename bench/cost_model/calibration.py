"""Parameters of the model from measurements, and how well it predicts measurements that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.bench.comparison.records import Record
from collectives.bench.cost_model.algorithms import ALGORITHMS, host_algorithm
from collectives.bench.cost_model.parameters import Parameters, Scale
from collectives.bench.cost_model.predictions import time_us

__all__ = [
    "MEMORY",
    "NETWORK",
    "SHAPED",
    "Errors",
    "Point",
    "as_json",
    "check_scatter",
    "errors",
    "fit",
    "points_of_records",
    "predicted_us",
    "split",
]

MEMORY = ("arrival_us", "line_us", "switch_us", "flag_us", "copy_us_per_byte", "reduce_us_per_byte",
          "crowding")  # fmt: skip
"""Parameters that measurements on one machine tell."""

NETWORK = ("latency_us", "message_us", "link_us_per_byte", "socket_us_per_byte")
"""Parameters that measurements between machines tell."""

SHAPED = (*NETWORK, "burst_bytes")
"""The same where a token bucket shapes the links."""

PRIOR = 0.1
"""Weight of a parameter's distance from its start, an e-fold, beside an error of e-fold of a point: decides
what the points leave open and nothing else."""

OUTLIER = 0.3
"""Error, an e-fold, from which a point counts less than by its square, so that single bad ones
decide little."""

MOST_SCATTER = 5.0
"""Slow calls (ninetieth percentile) over quick ones (tenth), of the middle point, above which a record is
refused: the ranks have then waited for other programs more than for each other."""

CALIBRATING = ("all_reduce", "broadcast", "barrier")
"""Operations that calibrate: one that reduces, one that only copies, one that only waits."""

STEPS = 60

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """A measured time.

    Attributes:
        operation: name of the operation.
        size_bytes: its size.
        scale: where the ranks were.
        measured_us: the time of a call that nothing disturbed.
        scatter: slow calls over quick ones; such points count less, the more they scatter.
        cores: of each machine; 0 for those of the parameters.
    """

    operation: str
    size_bytes: int
    scale: Scale
    measured_us: float
    scatter: float = 1.0
    cores: int = 0


class Errors(NamedTuple):
    """How far predictions are from measurements, of all points; 0.1 is ten percent in either direction."""

    median: float
    p90: float
    worst: float


def points_of_records(records: Sequence[Record], kind: str, machines: int = 1, cores: int = 0) -> list[Point]:
    """Returns the points of our host backend among records, each with the tenth percentile of its times.

    The model knows nothing of other programs on the machine, and these only ever add time: on a shared
    machine the median of few calls is often one that was put off.

    Args:
        records: of any comparison; peers other than ``host`` and operations that the model does not know are
            left out.
        kind: which time, a name of :data:`~collectives.bench.core.records.KINDS`.
        machines: on how many machines the ranks were, equally many on each.
        cores: of each machine; 0 for those of the parameters.

    Raises:
        ValueError: ranks cannot be spread so.
    """
    points = []
    for record in records:
        timing = record.timing(kind)
        known = record.operation == "all_reduce" or record.operation in ALGORITHMS
        if record.peer != "host" or not known or timing is None or record.ranks < 2:
            continue
        if record.ranks % machines:
            raise ValueError(f"{record.ranks} ranks cannot be spread equally over {machines} machines")
        scale = Scale(machines, record.ranks // machines)
        points.append(
            Point(
                record.operation,
                record.size_bytes,
                scale,
                timing.p10_us,
                timing.p90_us / timing.p10_us,
                cores,
            )
        )
    return points


def check_scatter(points: Sequence[Point], name: str) -> None:
    """Refuses points that are too noisy to tell anything.

    Args:
        points: of one record.
        name: of the record, for the message.

    Raises:
        ValueError: they are; the message says how much and what helps.
    """
    if not points:
        return
    middle = float(np.median([point.scatter for point in points]))
    if middle > MOST_SCATTER:
        worst = max(points, key=lambda point: point.scatter)
        raise ValueError(
            f"{name} is too noisy to calibrate with: of half of its {len(points)} points the slow calls "
            f"(p90) take more than {middle:.0f} times as long as the quick ones (p10), but "
            f"{MOST_SCATTER:g} is the most; worst is {worst.operation} of {worst.size_bytes} B on "
            f"{worst.scale.ranks} ranks with {worst.scatter:.0f}; "
            "measure again while nothing else runs here, or for longer (--budget)"
        )


def predicted_us(point: Point, parameters: Parameters) -> float:
    """Returns the model's time for a point, by the algorithm that the host backend takes."""
    algorithm = host_algorithm(point.operation, point.size_bytes, point.scale)
    if point.cores:
        parameters = replace(parameters, cores=point.cores)
    return time_us(algorithm, point.size_bytes, point.scale, parameters)


def _log_errors(points: Sequence[Point], parameters: Parameters) -> Vector:
    return np.log([predicted_us(point, parameters) / point.measured_us for point in points])


def split(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Returns the points to calibrate with, and those that are kept for the check.

    All-reduces, broadcasts and barriers with the fewest and with the most ranks calibrate, at every second
    size. Everything else is kept: the sizes between, other numbers of ranks, all other operations.
    """
    candidates = [point for point in points if point.operation in CALIBRATING]
    ranks = sorted({point.scale.ranks for point in candidates})
    chosen = {ranks[0], ranks[-1]} if ranks else set()
    sizes = {0, *sorted({point.size_bytes for point in candidates if point.size_bytes})[::2]}
    used = [point for point in candidates if point.scale.ranks in chosen and point.size_bytes in sizes]
    return used, [point for point in points if point not in used]


def fit(points: Sequence[Point], start: Parameters, names: Sequence[str]) -> Parameters:
    """Returns the parameters whose predictions are nearest to points, by relative error.

    The Levenberg-Marquardt method over the parameters' logarithms, so that all stay positive. Large errors
    count by their size, not by their square (the pseudo-Huber loss; Charbonnier et al., "Deterministic
    edge-preserving regularization in computed imaging", 1997), and points that scatter count less.

    Args:
        points: measurements.
        start: parameters to start from; what the points leave open stays there.
        names: the parameters that are looked for; the others stay as they are.

    Raises:
        ValueError: there is no point.
    """
    if not points:
        raise ValueError("there is no measurement of the host backend to calibrate with")
    origin = np.log([getattr(start, name) for name in names])

    def with_values(logs: Vector) -> Parameters:
        values: dict[str, Any] = dict(zip(names, map(float, np.exp(logs)), strict=True))
        return replace(start, **values)

    weights = np.asarray([1 / (1 + math.log(point.scatter)) for point in points])

    def residuals(logs: Vector) -> Vector:
        parameters = with_values(logs)
        off = _log_errors(points, parameters)
        softened = np.sign(off) * OUTLIER * np.sqrt(2 * (np.sqrt(1 + (off / OUTLIER) ** 2) - 1))
        return np.concatenate([weights * softened, PRIOR * (logs - origin)])

    return with_values(_minimize(residuals, origin))


def _minimize(residuals: Callable[[Vector], Vector], start: Vector) -> Vector:
    """Returns where the sum of the residuals' squares is least (Levenberg-Marquardt)."""
    x: Vector = start.copy()
    now, damping = residuals(x), 1e-2
    for _ in range(STEPS):
        step = 1e-4
        jacobian = np.stack([(residuals(x + step * row) - now) / step for row in np.eye(len(x))], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ now
        while damping < 1e9:
            change = np.linalg.solve(normal + damping * np.eye(len(x)), -gradient)
            then = residuals(x + np.clip(change, -2, 2))
            if then @ then < now @ now:
                break
            damping *= 4
        else:
            return x
        gain = now @ now - then @ then
        x, now, damping = x + np.clip(change, -2, 2), then, damping / 6
        if gain < 1e-10:
            break
    return x


def errors(points: Sequence[Point], parameters: Parameters) -> Errors | None:
    """Returns how far predictions are from points; ``None`` where there are none."""
    if not points:
        return None
    off = np.abs(_log_errors(points, parameters))
    return Errors(*map(float, np.expm1(np.percentile(off, (50, 90, 100)))))


def as_json(point: Point, parameters: Parameters) -> dict[str, object]:
    """Returns a point and its prediction as plain values."""
    return {
        **asdict(point),
        "algorithm": host_algorithm(point.operation, point.size_bytes, point.scale),
        "predicted_us": predicted_us(point, parameters),
    }
