"""The model's parameters, check and predictions as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collectives.bench.core.sizes import format_bytes
from collectives.bench.cost_model.calibration import Point, errors, predicted_us
from collectives.bench.cost_model.host import connections_per_leader, our_algorithm, segment_bytes
from collectives.bench.cost_model.model import terms
from collectives.bench.cost_model.scaling import End, best, ends, first_scale, is_ours, ours
from collectives.bench.cost_model.terms import Parameters, Scale

__all__ = ["check_lines", "parameter_lines", "prediction_lines"]

MEMORY_LIMIT_BYTES = 64 << 20
CONNECTION_LIMIT = 1024
"""Descriptors that a process usually may open."""

OTHER_OPERATIONS = ("barrier", "broadcast", "all_gather", "reduce_scatter", "all_to_all")

_UNITS = {
    "meeting_us": "us",
    "line_us": "us",
    "switch_us": "us",
    "flag_us": "us",
    "latency_us": "us",
    "message_us": "us",
    "copy_us_per_byte": "GB/s",
    "reduce_us_per_byte": "GB/s",
    "link_us_per_byte": "GB/s",
    "socket_us_per_byte": "GB/s",
    "crowding": "",
    "burst_bytes": "B",
}


def parameter_lines(
    parameters: Parameters, points: Sequence[Point], calibrated: Sequence[str]
) -> Iterator[str]:
    """Yields the parameters, times per byte as their inverse."""
    yield ""
    yield f"# parameters, calibrated on {len(points)} points; machine with {parameters.cores} cores"
    for name, unit in _UNITS.items():
        value = getattr(parameters, name)
        if name == "burst_bytes" and not value:
            continue
        shown = 1e-3 / value if unit == "GB/s" else value
        origin = "calibrated" if name in (*calibrated, "burst_bytes") else "given"
        label = name.removesuffix("_us_per_byte").removesuffix("_us").removesuffix("_bytes")
        yield f"#   {label:10} {shown:10.3g} {unit:5} {origin}"


def check_lines(used: Sequence[Point], kept: Sequence[Point], parameters: Parameters) -> Iterator[str]:
    """Yields the points that were not used to calibrate, predicted and measured, and how far off all are."""
    yield ""
    yield "# check against points that were not used to calibrate"
    yield (
        "#" + "operation".rjust(15) + "algorithm".rjust(15) + "machines".rjust(9) + "ranks".rjust(6)
        + "size (B)".rjust(11) + "measured".rjust(11) + "predicted".rjust(11) + "pred/meas".rjust(11)
    )  # fmt: skip
    for point in kept:
        predicted = predicted_us(point, parameters)
        algorithm = our_algorithm(point.operation, point.size_bytes, point.scale)
        yield (
            f" {point.operation:>15}{algorithm:>15}{point.scale.machines:>9}{point.scale.ranks:>6}"
            f"{point.size_bytes:>11}{point.measured_us:>11.4g}{predicted:>11.4g}"
            f"{predicted / point.measured_us:>11.2f}"
        )
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
    """Yields what the model says of scales: ours and the best, where algorithms end, and other limits."""
    for size in sizes:
        yield ""
        yield (
            f"# all_reduce of {format_bytes(size)}, {scales[0].ranks_per_machine} ranks on the "
            f"{parameters.cores} cores of each machine"
        )
        yield (
            "#" + "machines".rjust(9) + "ranks".rjust(7) + "ours".rjust(15) + "(us)".rjust(11)
            + "efficiency".rjust(12) + "best".rjust(23) + "(us)".rjust(11) + "ours/best".rjust(11)
            + "  limit of ours"
        )  # fmt: skip
        for scale in scales:
            if scale.ranks > 1:
                yield _prediction_row(size, scale, parameters)
    yield ""
    yield "# where algorithms stop: ranks at which the time is twice that of two machines, and those from"
    yield "# which efficiency stays below one half; the largest term on the largest scale"
    yield (
        "#" + "size".rjust(10) + "algorithm".rjust(23) + "time doubles".rjust(14) + "inefficient".rjust(13)
        + "  limit"
    )  # fmt: skip
    for end in ends(sizes, scales, parameters):
        yield _end_row(end)
    yield ""
    yield from _operation_lines(sizes, scales, parameters)
    yield ""
    yield from _hard_limit_lines(scales)


def _prediction_row(size: int, scale: Scale, parameters: Parameters) -> str:
    mine, fastest = ours(size, scale, parameters), best(size, scale, parameters)
    return (
        f" {scale.machines:>9}{scale.ranks:>7}{mine.algorithm:>15}{mine.time_us:>11.4g}"
        f"{mine.efficiency:>12.3f}{fastest.algorithm:>23}{fastest.time_us:>11.4g}"
        f"{mine.time_us / fastest.time_us:>11.2f}  {mine.limit}"
    )


def _end_row(end: End) -> str:
    ours_or_not = "*" if is_ours(end.algorithm) else " "
    return (
        f" {format_bytes(end.size_bytes):>10}{end.algorithm:>22}{ours_or_not}{_ranks(end.doubles):>14}"
        f"{_ranks(end.inefficient):>13}  {end.limit}"
    )


def _ranks(scale: Scale | None) -> str:
    return "-" if scale is None else str(scale.ranks)


def _operation_lines(sizes: Sequence[int], scales: Sequence[Scale], parameters: Parameters) -> Iterator[str]:
    yield "# our other operations (us), on one machine, two, and the most; the largest term there"
    chosen = list(dict.fromkeys([scales[0], *scales[1:2], scales[-1]]))
    yield (
        "#"
        + "operation".rjust(15)
        + "size".rjust(10)
        + "".join(f"{scale.ranks:>8} ranks" for scale in chosen)
        + "  limit"
    )
    for name in OTHER_OPERATIONS:
        for size in (0,) if name == "barrier" else sizes:
            parts = [terms(name, size, scale, parameters) for scale in chosen]
            times = "".join(f"{sum(part.values()):>14.4g}" for part in parts)
            last = parts[-1]
            limit = max(last, key=lambda term: last[term]) if last else ""
            yield f" {name:>15}{format_bytes(size):>10}{times}  {limit}"


def _hard_limit_lines(scales: Sequence[Scale]) -> Iterator[str]:
    yield "# limits that are no times"
    yield (
        "#"
        + "machines".rjust(9)
        + "ranks".rjust(7)
        + "memory a rank".rjust(16)
        + "connections a leader".rjust(22)
    )
    for scale in scales:
        memory = f"{segment_bytes(scale) / 2**20:.1f} MiB"
        yield f" {scale.machines:>9}{scale.ranks:>7}{memory:>16}{connections_per_leader(scale):>22}"
    memory_end = first_scale(scales, segment_bytes, MEMORY_LIMIT_BYTES)
    connection_end = first_scale(scales, connections_per_leader, CONNECTION_LIMIT)
    yield (
        f"# more than {format_bytes(MEMORY_LIMIT_BYTES)} a rank from {_ranks(memory_end)} ranks; "
        f"more than {CONNECTION_LIMIT} connections a leader from {_ranks(connection_end)} ranks"
    )
