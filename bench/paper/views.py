"""Figures as reports: tables, charts with the paper's axes, images, and what a folder keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from collectives.bench.core.charts import made_with, write_image
from collectives.bench.core.records import BaseReport, Chart, Column, Curve, Table, Timing, curve_of
from collectives.bench.core.text import network_of
from collectives.bench.paper.cells import PHASES, Measured
from collectives.bench.paper.figures import FIGURES

SCHEMES = {
    "S": "synchronous update",
    "A": "asynchronous update",
    "C": "cross-iteration",
    "I": "intra-iteration",
    "D": "data parallel",
    "M": "model parallel",
}
"""The schemes by letter, as section 7 of the paper explains them."""

_PAPER = "Li et al., VLDB 2020, table 1"


@dataclass(frozen=True, slots=True)
class System:
    """A system.

    Attributes:
        name: its name.
        schemes: letters of :data:`SCHEMES`.
        source: where that stands.
        year: of that source.
    """

    name: str
    schemes: str
    source: str
    year: int = 2020


_OF_PAPER = {
    "PyTorch DDP": "SID",
    "PyTorch RPC": "ACIDM",
    "TensorFlow MultiWorkerMirrored": "SID",
    "TensorFlow ParameterServer": "AIDM",
    "Mesh TensorFlow": "SIDM",
    "GPipe": "SCM",
    "Horovod": "SID",
    "GradientFlow": "SID",
    "SlowMo": "AID",
    "PipeDream": "SCIDM",
    "ZeRO": "SIDM",
    "Parallax": "SAIDM",
    "ByteScheduler": "SCID",
    "TicTac": "AIDM",
    "PACE": "SID",
}

SYSTEMS = (
    *(System(name, schemes, _PAPER) for name, schemes in _OF_PAPER.items()),
    System("BytePS", "SAID", "Jiang et al., OSDI 2020: synchronous and asynchronous data parallel training"),
    System("GSPMD", "SIDM", "Xu et al., arXiv 2105.04663: sharding of one step over devices", 2021),
    System("ZeRO-Infinity", "SIDM", "Rajbhandari et al., SC 2021: partitioned states", 2021),
    System(
        "Megatron-LM",
        "SIDM",
        "Narayanan et al., SC 2021: tensor, pipeline and data parallelism, with flushes",
        2021,
    ),
    System("Alpa", "SIDM", "Zheng et al., OSDI 2022: intra- and inter-operator parallelism", 2022),
    System("PyTorch FSDP", "SIDM", "Zhao et al., VLDB 2023: parameters sharded, gathered by layer", 2023),
    System("DiLoCo", "AID", "Douillard et al., arXiv 2311.08105: local steps, as the paper has SlowMo", 2023),
    System("TorchTitan", "SIDM", "Liang et al., arXiv 2410.06511: FSDP, tensor and pipeline", 2024),
    System(
        "collectives",
        "SID",
        "its ddp: gradients averaged within the backward pass; PostLocalSGDOptimizer averages parameters",
        2026,
    ),
)
"""Those of the paper in its order, then later ones."""


def systems_table() -> Table:
    """Returns the table, with what its letters mean."""
    letters = "; ".join(f"{letter}: {words}" for letter, words in SCHEMES.items())
    columns = [
        Column("system", "", -32),
        Column("year", "", 5),
        *(Column(f"  {letter}", "", 4) for letter in SCHEMES),
        Column("   source", "", -10),
    ]
    rows = [
        [
            system.name,
            str(system.year),
            *("x" if letter in system.schemes else "" for letter in SCHEMES),
            f"   {system.source}",
        ]
        for system in SYSTEMS
    ]
    return Table(f"table1: {letters}", columns, rows)


def systems_json() -> list[dict[str, Any]]:
    """Returns the table as plain values."""
    return [asdict(system) for system in SYSTEMS]


WITHIN = 1.1
"""A total time so many times the best one counts as as good: all beyond is noise."""


def figure_tables(records: Sequence[Measured]) -> Iterator[Table]:
    """Yields the tables of a figure's cells, one for each kind."""
    for kind, (title, heads, rows) in _KINDS.items():
        chosen = [record for record in records if record.cell["kind"] == kind]
        if chosen:
            longest = max(len(record.cell["panel"]) for record in chosen)
            columns = [Column("panel", "", -max(longest, 5) - 1), Column("ranks", "", 6), *heads]
            cells = [
                [record.cell["panel"], str(record.cell["ranks"]), *row]
                for record in chosen
                for row in rows(record)
            ]
            yield Table(title, columns, cells)


def best_bucket_mb(records: Sequence[Measured]) -> dict[str, float]:
    """Returns, by backend, the MiB of an all-reduce from which larger ones gain no more, of figure 2."""
    found = {}
    for record in records:
        if record.cell["kind"] == "AllReduceSweep":
            totals = [float(np.median(calls)) for calls in record.samples["total_ns"]]
            enough = next(i for i, total in enumerate(totals) if total <= WITHIN * min(totals))
            found[record.cell["backend"]] = float(f"{record.cell['counts'][enough] * 4 / 2**20:.2g}")
    return found


def usual_samples(record: Measured, number: int) -> dict[str, list[int]]:
    """Returns a series of iterations, by phase, without those in which the wrapper was made anew."""
    times = record.samples["series"][number]
    rebuilt = set(times["rebuilt"])
    return {
        name: [value for i, value in enumerate(times[name]) if i not in rebuilt]
        for name in ("iteration", *PHASES)
    }


def _sweep_rows(record: Measured) -> Iterator[list[str]]:
    cell, samples = record.cell, record.samples
    for count, calls in zip(cell["counts"], samples["total_ns"], strict=True):
        yield [f"{count:,}", str(-(-cell["parameters"] // count)), *_spread(calls), str(samples["wrong"])]


def _ready_rows(record: Measured) -> Iterator[list[str]]:
    passes = record.samples["ready_ns"]
    number = len(passes[0])
    for part in (0.1, 0.25, 0.5, 0.75, 1.0):
        place = max(0, round(part * number) - 1)
        yield [str(place + 1), *_spread([times[place] for times in passes])]


def _iteration_rows(record: Measured) -> Iterator[list[str]]:
    for i, series in enumerate(record.cell["series"]):
        times = usual_samples(record, i)
        phases = [f"{np.median(times[name]) / 1e6:.2f}" for name in PHASES]
        yield [f"  {series['name']}", *_spread(times["iteration"]), *phases]


def _loss_rows(record: Measured) -> Iterator[list[str]]:
    losses = record.samples["losses"]
    last = max(1, len(losses) // 10)
    final = f"{np.mean(losses[-last:]):.3f}"
    yield [str(record.cell["interval"]), str(len(losses)), f"{losses[0]:.3f}", final]


def _spread(ns: Sequence[int]) -> list[str]:
    took = Timing.of([ns])
    return [str(took.calls), *(f"{us / 1e3:.2f}" for us in (took.median_us, took.p10_us, took.p90_us))]


_SPREAD = [
    Column("calls", "", 6),
    Column("median", "(ms)", 10),
    Column("p10", "(ms)", 10),
    Column("p90", "(ms)", 10),
]

_KINDS: Mapping[str, tuple[str, Sequence[Column], Callable[[Measured], Iterator[list[str]]]]] = {
    "AllReduceSweep": (
        "all-reduces",
        [Column("parameters", "", 12), Column("all-reduces", "", 12), *_SPREAD, Column("#wrong", "", 7)],
        _sweep_rows,
    ),
    "ReadyGradients": ("ready gradients", [Column("ready", "", 6), *_SPREAD], _ready_rows),
    "Iterations": (
        "iterations",
        [Column("  series", "", -25), *_SPREAD, *(Column(name, "(ms)", 14) for name in PHASES)],
        _iteration_rows,
    ),
    "Losses": (
        "losses",
        [
            Column("interval", "", 9),
            Column("iterations", "", 11),
            Column("first", "", 8),
            Column("last tenth", "", 11),
        ],
        _loss_rows,
    ),
}
"""Title, columns and rows by kind of cell."""


COLUMNS = 4
"""Most panels in a row."""

CUTOFF = 0.05
"""Of figure 11's filter, as part of half the sampling rate."""

FILTER_ORDER = 3


def figure_charts(name: str, records: Sequence[Measured]) -> list[Chart]:
    """Returns the panels of a figure.

    Args:
        name: of the figure.
        records: its cells.

    Raises:
        ModuleNotFoundError: scipy is not installed, which figure 11 needs.
    """
    panels: dict[str, list[Measured]] = {}
    for record in records:
        panels.setdefault(_panel(name, record), []).append(record)
    if name == "fig9":  # each backend's line begins with the iteration of one rank
        panels = _with_local(panels)
    return [_CHARTS[name](panel, chosen) for panel, chosen in panels.items()]


def draw(
    name: str,
    charts: Sequence[Chart],
    environment: Mapping[str, Any],
    options: Mapping[str, Any],
    path: Path,
) -> None:
    """Writes a figure as a PNG image.

    Args:
        name: of the figure.
        charts: those of :func:`figure_charts`, at least one.
        environment: of the report.
        options: of the report.
        path: of the image; its directory is made.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    title = f"Figure {name.removeprefix('fig')}: {FIGURES[name].title}. {made_with(environment, options)}"
    write_image(path, charts, _columns([chart.title.split(",")[0] for chart in charts]), title)


def _columns(firsts: Sequence[str]) -> int:
    """Returns how many panels stand in a row: those of a model, where each has as many.

    Args:
        firsts: the first words of each panel's name.
    """
    each = {firsts.count(first) for first in firsts}
    of_model = each.pop() if len(each) == 1 else 1
    return of_model if 1 < of_model <= COLUMNS else min(COLUMNS, len(firsts))


def _panel(name: str, record: Measured) -> str:
    cell = record.cell
    if cell["kind"] == "AllReduceSweep":  # all backends in one
        return f"{cell['panel'][:3]} all-reduces of {cell['parameters'] / 1e6:g} M parameters in all"
    if name in {"fig6", "fig7", "fig8"}:
        return f"{cell['panel']}, {cell['ranks']} ranks"
    return str(cell["panel"])


def _with_local(panels: Mapping[str, list[Measured]]) -> dict[str, list[Measured]]:
    local = {panel: found for panel, found in panels.items() if found[0].cell["ranks"] == 1}
    return {
        panel: [*local.get(found[0].cell["model"], ()), *found]
        for panel, found in panels.items()
        if panel not in local
    } or dict(panels)


def _bucketing(panel: str, records: Sequence[Measured]) -> Chart:
    if records[0].cell["kind"] == "AllReduceSweep":
        curves = [
            _curve(record.cell["backend"], record.cell["counts"], record.samples["total_ns"])
            for record in records
        ]
        return Chart(panel, "parameters per all-reduce", "total time (s)", curves)
    passes = records[0].samples["ready_ns"]
    gradients = range(1, len(passes[0]) + 1)
    curve = _curve(f"median of {len(passes)} passes, p10 to p90", gradients, [*zip(*passes, strict=True)])
    return Chart(panel, "ready gradients", "time since backward began (s)", [curve], log="")


def _breakdown(panel: str, records: Sequence[Measured]) -> Chart:
    names = [series["name"] for series in records[0].cell["series"]]
    bars = [usual_samples(records[0], i) for i in range(len(names))]
    medians = np.array([[np.median(times[phase]) for phase in PHASES] for times in bars])
    medians /= medians[names.index("no overlap")].sum()
    curves = [
        Curve(_PHASE_NAMES[phase], names, heights.tolist())
        for phase, heights in zip(PHASES, medians.T, strict=True)
    ]
    return Chart(panel, "", "time of an iteration (no overlap = 1)", curves, log="", stacked=True)


def _buckets(panel: str, records: Sequence[Measured]) -> Chart:
    """Returns a box for each bucket size, and the iterations that it leaves out."""
    names = [f"{series['bucket_mb']:g}" for series in records[0].cell["series"]]
    usual = [(name, ns) for i, name in enumerate(names) for ns in usual_samples(records[0], i)["iteration"]]
    rebuilt = [
        (name, times["iteration"][place])
        for name, times in zip(names, records[0].samples["series"], strict=True)
        for place in times["rebuilt"]
    ]
    curves = [
        Curve("", [name for name, _ in usual], [ns / 1e9 for _, ns in usual], look="boxes"),
        Curve(
            "wrapper made anew",
            [name for name, _ in rebuilt],
            [ns / 1e9 for _, ns in rebuilt],
            look="points",
            color=3,
        ),
    ]
    return Chart(panel, "bucket size (MB)", "latency of an iteration (s)", curves, log="")


def _scaling(panel: str, records: Sequence[Measured]) -> Chart:
    ranks = [record.cell["ranks"] for record in records]
    curves = [_curve("measured", ranks, [usual_samples(record, 0)["iteration"] for record in records])]
    return replace(_over_ranks(panel, ranks, "latency of an iteration (s)", curves), from_zero=True)


def _intervals(panel: str, records: Sequence[Measured]) -> Chart:
    """Returns boxes with their means, which skipped synchronisations lower; medians would show none."""
    ordered = sorted(records, key=lambda record: int(record.cell["ranks"]))
    curves = []
    for i, series in enumerate(records[0].cell["series"]):
        taken = [(str(one.cell["ranks"]), ns) for one in ordered for ns in usual_samples(one, i)["iteration"]]
        curves.append(
            Curve(series["name"], [ranks for ranks, _ in taken], [ns / 1e9 for _, ns in taken], look="boxes")
        )
    return Chart(panel, "ranks", "latency of an iteration (s); triangle: mean", curves, log="")


def _losses(panel: str, records: Sequence[Measured]) -> Chart:
    from scipy.signal import butter, filtfilt

    curves = []
    for i, record in enumerate(records):
        losses = record.samples["losses"]
        iterations = range(1, len(losses) + 1)
        padding = min(3 * (FILTER_ORDER + 1), len(losses) - 1)
        smooth = filtfilt(*butter(FILTER_ORDER, CUTOFF), losses, padlen=padding).tolist()
        curves += [
            Curve("", iterations, losses, look="points", color=i),
            Curve(f"synchronised every {record.cell['interval']}", iterations, smooth, color=i),
        ]
    return Chart(panel, "iteration", "loss", curves, log="")


def _lanes(panel: str, records: Sequence[Measured]) -> Chart:
    ranks = [record.cell["ranks"] for record in records]
    curves = [
        _curve(series["name"], ranks, [usual_samples(record, i)["iteration"] for record in records])
        for i, series in enumerate(records[0].cell["series"])
    ]
    return _over_ranks(panel, ranks, "latency of an iteration (s)", curves)


def _over_ranks(panel: str, ranks: Sequence[int], y: str, curves: Sequence[Curve]) -> Chart:
    names = {number: "local" if number == 1 else str(number) for number in sorted(set(ranks))}
    return Chart(panel, "ranks", y, curves, log="x", x_names=names)


def _curve(name: str, at: Sequence[float], samples_ns: Sequence[Sequence[int]]) -> Curve:
    """Returns median, p10 and p90 of the samples at each place, in seconds."""
    return curve_of(name, zip(at, (Timing.of([samples]) for samples in samples_ns), strict=True), 1e6)


_PHASE_NAMES = {
    "forward": "forward",
    "backward": "backward computation",
    "communication": "communication",
    "step": "optimizer",
}

_CHARTS: Mapping[str, Callable[[str, Sequence[Measured]], Chart]] = {
    "fig2": _bucketing,
    "fig6": _breakdown,
    "fig7": _buckets,
    "fig8": _buckets,
    "fig9": _scaling,
    "fig10": _intervals,
    "fig11": _losses,
    "fig12": _lanes,
}


SAME = ("cpu", "cores_usable", "torch", "collectives", "gpus")
"""What must not differ among the samples of a file, nor among the files of a report."""


class Report(BaseReport[Measured]):
    """A figure: all its cells that are done, and what the command line asked for as its options."""

    __slots__ = ()

    def tables(self) -> Sequence[Table]:
        """Returns the tables of the cells."""
        return list(figure_tables(self.records))

    @property
    def wrong(self) -> int:
        """Elements of results that were wrong."""
        return sum(record.samples.get("wrong", 0) for record in self.records)

    def command(self) -> str:
        """Returns the command line that measures the figure."""
        words = [f"collectives bench {self.program}"]
        for option, value in self.options.items():
            if isinstance(value, (list, tuple)):
                words += [f"--{option} {','.join(map(str, value))}"] if value else []
            elif value is True:
                words.append(f"--{option}")
            elif value not in {None, False} and (option, value) != ("machines", 1):
                words.append(f"--{option} {value:g}" if isinstance(value, float) else f"--{option} {value}")
        return " ".join([*words, "--json DIR"])


def read_records(plain: Mapping[str, Any]) -> list[Measured]:
    """Returns the cells in the plain values of a file."""
    return [Measured(record["cell"], record["samples"]) for record in plain["records"]]


def read_folder(folder: Path) -> dict[str, Report]:
    """Returns the figures that a folder keeps, by name.

    Raises:
        ValueError: there is none, or they were measured on different machines.
        OSError: one cannot be read.
        KeyError: one is no figure.
    """
    found = {}
    for name in FIGURES:
        file = folder / f"{name}.json"
        if file.exists():
            plain = json.loads(file.read_text(encoding="utf-8"))
            records = read_records(plain)
            found[name] = Report(f"paper {name}", plain["environment"], plain["options"], records)
    if not found:
        raise ValueError(f"{folder} keeps no figure; measure some with --json {folder}")
    for key in SAME:
        values = {str(kept.environment.get(key)) for kept in found.values()}
        if len(values) > 1:
            raise ValueError(f"the figures in {folder} differ in {key}: {', '.join(sorted(values))}")
    return found


@dataclass(kw_only=True)
class FiguresReport(Report):
    """Several figures, as medians and spread.

    Attributes:
        figures: by name.
        with_systems: whether table 1 is one of them.
    """

    figures: Mapping[str, Report]
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
