r"""How long would an operation take on many machines, and where does each algorithm stop scaling?

Calibrates a cost model (latency, overhead and time per byte, of shared memory and of the network) on
measurements of this machine, checks it against measurements that the calibration has not seen, and predicts
an all-reduce by the host backend's algorithms and by textbook ones, up to thousands of ranks.

Measurements are made here, or taken from the JSON file of an earlier ``collectives bench allreduce`` or
``collectives bench collectives`` (--record). All-reduces, broadcasts and barriers with the fewest and with
the most ranks calibrate, at every second size; the check has all the others. Of each measurement the quick
calls count (tenth percentile), because the model knows nothing of other programs; a record in which calls
scatter too much is refused. The network is what --link-bandwidth, --link-latency and --message-overhead say;
whatever they leave open is calibrated on a record between machines, such as network namespaces that play
them. The first two commands measure, the last calibrates, checks and predicts:

    collectives bench collectives --backends host --nproc 2,3,4 \
        --ops all_reduce,broadcast,barrier,all_gather,reduce_scatter --sizes 8:16M:8,64K --budget 15 \
        --json within.json
    collectives bench collectives --backends host --nproc 2,4 --machines 2 --link 1gbit \
        --ops all_reduce,broadcast,barrier,all_gather,reduce_scatter --sizes 8:16M:8,64K --budget 15 \
        --json between.json
    collectives bench model --record within.json --network-record between.json \
        --link-bandwidth 25G --plot scaling.png

*efficiency* is the time that no algorithm can beat (latencies of the best fan-out; 2(m-1)/m of the size on
each link; every byte read and written once) over the algorithm's time. *limit* is the largest term of its
time. Algorithms with a * are the host backend's ("ours").
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from collectives.bench.comparison.measurement import measure
from collectives.bench.comparison.options import Options
from collectives.bench.comparison.records import KINDS, read_report
from collectives.bench.comparison.records import Report as Measurements
from collectives.bench.core.arguments import (
    add_files,
    at_least,
    check_plot,
    failing_as_command,
    parse_counts,
    parse_sizes_argument,
    show_progress,
    write_files,
)
from collectives.bench.core.machine import usable_cores
from collectives.bench.core.namespaces import burst_bytes, bytes_a_second
from collectives.bench.core.sizes import parse_sizes
from collectives.bench.core.text import header_lines
from collectives.bench.cost_model.calibration import (
    MEMORY,
    NETWORK,
    SHAPED,
    Point,
    check_scatter,
    fit,
    points_of_records,
    split,
)
from collectives.bench.cost_model.parameters import Parameters
from collectives.bench.cost_model.plot import plot_scaling, scaling_charts
from collectives.bench.cost_model.predictions import predictions, scales_up_to
from collectives.bench.cost_model.records import Report
from collectives.bench.cost_model.report import check_lines, parameter_lines, prediction_lines
from collectives.ranks.processes import RankFailedError

__all__ = ["add_arguments", "run"]

MEASURED_SIZES = "8:64M:8,1K,16K,1M,4M,64M"
MEASURED = ("all_reduce", "broadcast", "barrier", "all_gather", "reduce_scatter")
SIZES = "8,4K,64K,1M,25M,256M"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument(
        "--record",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="JSON file of measurements on one machine, instead of measuring here; may be repeated",
    )
    parser.add_argument(
        "--nproc",
        type=parse_counts(2),
        default=(2, 3, 4),
        metavar="N,...",
        help="numbers of ranks to measure here (default: 2,3,4)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=12.0,
        metavar="SECONDS",
        help="time to measure with each number of ranks (default: %(default)g)",
    )
    parser.add_argument(
        "--kind", choices=KINDS[:2], default="cold", help="which of the measured times (default: cold)"
    )
    parser.add_argument(
        "--network-record", type=Path, metavar="FILE", help="JSON file of measurements between machines"
    )
    parser.add_argument(
        "--network-machines",
        type=at_least(2),
        metavar="M",
        help="machines that those ranks were on, equally many on each (default: as the record says)",
    )
    network = Parameters()
    parser.add_argument(
        "--link-bandwidth",
        type=_bandwidth,
        metavar="RATE",
        help="of a machine's link in each direction, such as 1G, 25G: bits a second "
        "(default: as measured, or 10G)",
    )
    parser.add_argument(
        "--link-latency",
        type=float,
        metavar="US",
        help=f"microseconds from one machine to another (default: as measured, or {network.latency_us:g})",
    )
    parser.add_argument(
        "--message-overhead",
        type=float,
        metavar="US",
        help="microseconds of a core for sending or receiving a message "
        f"(default: as measured, or {network.message_us:g})",
    )
    parser.add_argument(
        "--ranks",
        type=at_least(2),
        default=10_000,
        metavar="N",
        help="predict up to N ranks (default: 10000)",
    )
    parser.add_argument(
        "--ranks-per-machine",
        type=at_least(1),
        default=4,
        metavar="R",
        help="ranks on each of the predicted machines (default: 4)",
    )
    parser.add_argument(
        "--cores",
        type=at_least(1),
        metavar="C",
        help="cores of each of the predicted machines (default: as many as ranks)",
    )
    parser.add_argument(
        "--sizes", type=parse_sizes_argument, default=SIZES, metavar="SIZES", help="(default: %(default)s)"
    )
    add_files(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time over ranks into FILE (PNG)")


def _bandwidth(text: str) -> float:
    """Returns bytes a microsecond of bits a second; K, M and G are powers of 1000 here."""
    factor = {"K": 1e3, "M": 1e6, "G": 1e9}.get(text.strip()[-1:].upper())
    number = float(text.strip()[:-1] if factor else text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, but is {text!r}")
    return number * (factor or 1.0) / 8 / 1e6


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 0.

    Raises:
        CommandError: a file cannot be used, a rank failed, or matplotlib is missing.
    """
    check_plot(arguments.plot)
    given = _given(arguments)
    start = replace(Parameters(cores=usable_cores()), **given)
    with failing_as_command(OSError, KeyError, TypeError, ValueError, RankFailedError):
        reports = [read_report(path) for path in arguments.record] or [_measure(arguments)]
        start = replace(start, cores=int(reports[0].environment["cores_usable"]))
        points = []
        for i, report in enumerate(reports):
            machines = report.options.get("machines", 1)
            if machines != 1:
                raise ValueError(
                    f"a --record was measured on {machines} machines; give it as --network-record"
                )
            found = points_of_records(report.records, arguments.kind)
            check_scatter(found, str(arguments.record[i]) if arguments.record else "what was measured here")
            points += found
        used, kept = split(points)
        parameters = fit(used, start, MEMORY)
        if arguments.network_record is not None:
            between, link = _between_machines(arguments)
            seen, unseen = split(between)
            parameters = fit(seen, _start_between(parameters, link), SHAPED if link else NETWORK)
            used, kept = [*used, *seen], [*kept, *unseen]
    # A bucket belongs to the links that were measured; those of real machines have none.
    target = replace(parameters, cores=arguments.cores or arguments.ranks_per_machine, burst_bytes=0.0)
    target = replace(target, **given)
    scales = scales_up_to(arguments.ranks, arguments.ranks_per_machine)
    calibrated = (*MEMORY, *(NETWORK if arguments.network_record else ()))
    print("\n".join(header_lines(reports[0])))
    print("\n".join(parameter_lines(parameters, used, calibrated)))
    print("\n".join(check_lines(used, kept, parameters)))
    print("\n".join(prediction_lines(arguments.sizes, scales, target)))
    said = Report(
        "model",
        reports[0].environment,
        {name: getattr(arguments, name) for name in ("kind", "ranks", "ranks_per_machine", "sizes")},
        [each for size in arguments.sizes for scale in scales for each in predictions(size, scale, target)],
        parameters=parameters,
        predicted_for=target,
        used=used,
        kept=kept,
        sizes=arguments.sizes,
        scales=scales,
    )
    write_files(said, arguments)
    if arguments.plot is not None:
        charts = scaling_charts(arguments.sizes, scales, target)
        plot_scaling(arguments.plot, charts, scales, target)
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what the user says of the network; it holds for predictions, whatever was measured."""
    bandwidth: float | None = arguments.link_bandwidth
    values = {
        "link_us_per_byte": None if bandwidth is None else 1 / bandwidth,
        "latency_us": arguments.link_latency,
        "message_us": arguments.message_overhead,
    }
    return {name: value for name, value in values.items() if value is not None}


def _start_between(parameters: Parameters, link: str | None) -> Parameters:
    """Returns where to look for the network of a record from, whatever network is to be predicted.

    Calls in a row find a link's bucket nearly empty. A fit that began with all of it would stay there: of a
    message that the bucket holds, the link's speed changes nothing.
    """
    usual = Parameters()
    start = replace(parameters, **{name: getattr(usual, name) for name in NETWORK})
    if link is None:
        return start
    return replace(start, link_us_per_byte=1e6 / bytes_a_second(link), burst_bytes=burst_bytes(link) / 8)


def _between_machines(arguments: argparse.Namespace) -> tuple[list[Point], str | None]:
    """Returns the points of the record between machines, and the rate that shaped their links."""
    path: Path = arguments.network_record
    report = read_report(path)
    machines = arguments.network_machines or report.options.get("machines", 1)
    if machines < 2:
        raise ValueError(
            f"{path} does not say that its ranks were on several machines; measure with "
            "'collectives bench collectives --machines 2 --json FILE', or say so with --network-machines"
        )
    # Namespaces share the cores of the machine that plays them.
    played = report.options.get("machines", 1) > 1
    cores = max(1, int(report.environment["cores_usable"]) // machines) if played else 0
    points = points_of_records(report.records, arguments.kind, machines, cores)
    check_scatter(points, str(path))
    return points, report.options.get("link") if played else None


def _measure(arguments: argparse.Namespace) -> Measurements:
    options = Options(
        backends=("host",),
        ranks=arguments.nproc,
        sizes=tuple(parse_sizes(MEASURED_SIZES)),
        operations=MEASURED,
        budget_s=arguments.budget,
    )
    return measure(options, show_progress, program="model")
