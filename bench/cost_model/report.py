"""The model's parameters, check and predictions as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collectives.bench.core.sizes import format_bytes
from collectives.bench.core.text import table_lines
from collectives.bench.cost_model.algorithms import HOST_ALL_REDUCES, host_algorithm
from collectives.bench.cost_model.calibration import Point, errors, predicted_us
from collectives.bench.cost_model.parameters import Parameters, Scale
from collectives.bench.cost_model.predictions import predict, predict_host, predictions, scaling_ends

__all__ = ["check_lines", "parameter_lines", "prediction_lines"]

OTHER_OPERATIONS = ("barrier", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def parameter_lines(
    parameters: Parameters, points: Sequence[Point], calibrated: Sequence[str]
) -> Iterator[str]:
    """Yields the parameters, times per byte as their inverse."""
    yield ""
    yield f"# parameters, calibrated on {len(points)} points; machine with {parameters.cores} cores"
    for name in Parameters.__slots__[1:]:
        value = getattr(parameters, name)
        if name == "burst_bytes" and not value:
            continue
        label, _, unit = name.partition("_")
        shown, unit = (1e-3 / value, "GB/s") if unit.endswith("us_per_byte") else (value, unit)
        origin = "calibrated" if name in (*calibrated, "burst_bytes") else "given"
        yield f"#   {label:10} {shown:10.3g} {unit:5} {origin}"


def check_lines(used: Sequence[Point], kept: Sequence[Point], parameters: Parameters) -> Iterator[str]:
    """Yields the points that were not used to calibrate, predicted and measured, and how far off all are."""
    yield ""
    yield "# check against points that were not used to calibrate"
    columns = [("operation", "", 15), ("algorithm", "", 15), ("machines", "", 9), ("ranks", "", 6),
               ("size (B)", "", 11), ("measured", "", 11), ("predicted", "", 11),
               ("pred/meas", "", 11)]  # fmt: skip
    rows = []
    for point in kept:
        predicted = predicted_us(point, parameters)
        algorithm = host_algorithm(point.operation, point.size_bytes, point.scale)
        place = (point.scale.machines, point.scale.ranks, point.size_bytes)
        times = (f"{point.measured_us:.4g}", f"{predicted:.4g}", f"{predicted / point.measured_us:.2f}")
        rows.append([point.operation, algorithm, *map(str, place), *times])
    yield from table_lines(columns, rows)
    here = [point for point in kept if point.scale.machines == 1]
    groups = {
        "calibration": used,
        "check, all-reduce": [point for point in here if point.operation == "all_reduce"],
        "check, other operations": [point for point in here if point.operation != "all_reduce"],
        "check, between machines": [point for point in kept if point.scale.machines > 1],
    }
    for name, points in groups.items():
        off = errors(points, parameters)
        if off is not None:
            yield (
                f"# error, {name} ({len(points)} points): median {off.median:.0%}, "
                f"9 of 10 below {off.p90:.0%}, worst {off.worst:.0%}"
            )


def prediction_lines(sizes: Sequence[int], scales: Sequence[Scale], parameters: Parameters) -> Iterator[str]:
    """Yields the host backend's and the fastest all-reduce, where algorithms end, and other operations."""
    where = f"{scales[0].ranks_per_machine} ranks on the {parameters.cores} cores of each machine"
    columns = [("machines", "", 9), ("ranks", "", 7), ("ours", "", 15), ("(us)", "", 11),
               ("efficiency", "", 12), ("best", "", 23), ("(us)", "", 11), ("ours/best", "", 11),
               ("  limit of ours", "", -15)]  # fmt: skip
    for size in sizes:
        yield from ["", f"# all_reduce of {format_bytes(size)}, {where}"]
        rows = []
        for scale in scales:
            if scale.ranks > 1:
                ours = predict_host(size, scale, parameters)
                best = min(predictions(size, scale, parameters), key=lambda each: each.time_us)
                rows.append([
                    str(scale.machines), str(scale.ranks), ours.algorithm, f"{ours.time_us:.4g}",
                    f"{ours.efficiency:.3f}", best.algorithm, f"{best.time_us:.4g}",
                    f"{ours.time_us / best.time_us:.2f}", f"  {ours.limit}",
                ])  # fmt: skip
        yield from table_lines(columns, rows)
    yield ""
    yield "# where algorithms stop: ranks at which the time is twice that of two machines, and those from"
    yield "# which efficiency stays below one half; the largest term on the largest scale (* is our own)"
    columns = [("size", "", 10), ("algorithm", "", 23), ("time doubles", "", 14), ("inefficient", "", 13),
               ("  limit", "", -8)]  # fmt: skip
    yield from table_lines(
        columns,
        (
            [
                format_bytes(end.size_bytes),
                end.algorithm + ("*" if end.algorithm in HOST_ALL_REDUCES else " "),
                *("-" if scale is None else str(scale.ranks) for scale in (end.doubles, end.inefficient)),
                f"  {end.limit}",
            ]
            for end in scaling_ends(sizes, scales, parameters)
        ),
    )
    yield from ["", "# our other operations (us), on one machine, two, and the most; the largest term there"]
    chosen = list(dict.fromkeys([scales[0], *scales[1:2], scales[-1]]))
    columns = [("operation", "", 15), ("size", "", 10),
               *((f"{scale.ranks} ranks", "", 14) for scale in chosen), ("  limit", "", -8)]  # fmt: skip
    rows = []
    for name in OTHER_OPERATIONS:
        for size in (0,) if name == "barrier" else sizes:
            found = [predict(name, size, scale, parameters) for scale in chosen]
            rows.append(
                [name, format_bytes(size), *(f"{each.time_us:.4g}" for each in found), f"  {found[-1].limit}"]
            )
    yield from table_lines(columns, rows)
