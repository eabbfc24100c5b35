"""The figures: what the user asks for, the cells that each consists of, tables, charts, what is kept."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from collectives.bench.core.arguments import at_least, option, parse_counts, parse_names, positive
from collectives.bench.core.ranks import PlacementOptions
from collectives.bench.core.records import BaseReport, Chart, Curve, Table, Timing, curve_of, network_of
from collectives.bench.models import MODELS
from collectives.bench.paper.cells import (
    PHASES,
    AllReduceSweep,
    Cell,
    Iterations,
    Losses,
    Measured,
    ReadyGradients,
    Series,
)
from collectives.bench.peers import TORCH

COUNTS = (
    10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000,
    20_000_000,
)  # fmt: skip
"""Parameters of an all-reduce of figure 2, and all of them together:"""
PARAMETERS = 60_000_000
QUICK_COUNTS = (10_000, 100_000, 500_000, 2_000_000)
QUICK_PARAMETERS = 6_000_000

BUCKETS_MB = (0.0, 5.0, 10.0, 25.0, 50.0)
QUICK_LENGTHS = {"small": 32, "bert-mini": 16}
"""Pixels or tokens of the one sample of an iteration."""
CPU_LENGTHS = {"resnet50": 64, "resnet152": 64, "bert-base": 16}
"""Those on CPUs: on the paper's GPUs, too, computation took no longer than communication by far."""

INTERVALS = (1, 2, 4, 8)
LANES = (1, 3, 5)

RATES = {"a": (0.02, 8), "b": (0.06, 256)}
"""Learning rates and batches of figures 11(a) and 11(b)."""
LOSS_ITERATIONS = 400
QUICK_LOSS_ITERATIONS = 16

PAPER_MODELS = ("resnet50", "bert-base")
QUICK_MODELS = ("small",)
READY_MODEL = "resnet152"

CUDA_BATCH = 32
"""Samples of a rank on a GPU where the user names no number."""

BUDGET_S = 240.0
QUICK_BUDGET_S = 7.0


def _parse_lengths(text: str) -> tuple[tuple[str, int], ...]:
    """Returns the length of a sample by model."""
    lengths = []
    for part in parse_names(text):
        model, _, length = part.partition("=")
        if model not in MODELS or not length.isdecimal() or not int(length):
            raise argparse.ArgumentTypeError(
                f"{part!r} must be MODEL=N with a model of {', '.join(MODELS)} and a number from 1 on"
            )
        lengths.append((model, int(length)))
    return tuple(lengths)


def _path(text: str) -> str:
    return str(Path(text).resolve()) if text else ""  # argparse converts the default, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PlacementOptions):
    """What is measured, as the user asks.

    Attributes:
        quick: a small model, few sizes, a small budget.
        backends: backends, round_robin:LANES[:BACKEND], and torch:NAME for torch's wrapper over its backend.
        models: names of models; fig2 looks at the first one.
        ranks: numbers of ranks.
        batch: samples of each rank.
        lengths: pixels of an image's side, or tokens of a text.
        budget_s: seconds for each figure.
        iterations: of fig11.
        images: mnist.npz or the like for fig11, with x_train and y_train.

    Raises:
        ValueError: the machines do not fit the ranks, or there is no such device.
    """

    quick: bool = option(False, "--quick", action="store_true")
    backends: tuple[str, ...] = option((), "--backends", type=parse_names, metavar="NAME,...")
    models: tuple[str, ...] = option((), "--models", type=parse_names, metavar="NAME,...")
    ranks: tuple[int, ...] = option((), "--nproc", type=parse_counts(2), metavar="N,...")
    batch: int | None = option(None, "--batch", type=at_least(1), metavar="N")
    lengths: tuple[tuple[str, int], ...] = option((), "--lengths", type=_parse_lengths, metavar="MODEL=N,...")
    budget_s: float | None = option(None, "--budget", type=positive, metavar="SECONDS")
    iterations: int | None = option(None, "--iterations", type=at_least(max(INTERVALS)), metavar="N")
    images: str = option("", "--images", type=_path, metavar="FILE")

    @property
    def trained(self) -> tuple[str, ...]:
        """The models that are trained."""
        return self.models or (QUICK_MODELS if self.quick else PAPER_MODELS)

    @property
    def ready_model(self) -> str:
        """The model whose gradients figure 2 looks at."""
        return self.trained[0] if self.models or self.quick else READY_MODEL

    @property
    def own_backends(self) -> tuple[str, ...]:
        """Those of this package."""
        return tuple(name for name in self.backends if not name.startswith(TORCH))

    def shape(self, model: str) -> tuple[int, int]:
        """Returns the batch and the length of a model's samples."""
        quick = self.quick and model in QUICK_LENGTHS
        usual = QUICK_LENGTHS if quick else CPU_LENGTHS if self.device == "cpu" else {}
        length = dict(self.lengths).get(model) or usual.get(model, MODELS[model].length)
        batch = CUDA_BATCH if self.device == "cuda" else 1 if quick else MODELS[model].batch
        return self.batch or batch, length

    def asked(self) -> dict[str, Any]:
        """Returns what a command line asks for that measures the same, by the names of its options."""
        return {
            "device": self.device,
            "backends": self.backends,
            "models": self.models or None,
            "nproc": self.ranks,
            "batch": self.batch,
            "lengths": [f"{model}={length}" for model, length in self.lengths],
            "budget": self.budget_s,
            "iterations": self.iterations,
            "images": Path(self.images).name or None,
            "machines": self.machines,
            "link": self.link,
            "quick": self.quick,
        }


# ---- cells ---------------------------------------------------------------------------------------------


def _cells_of_2(options: Options, ranks: int) -> list[Cell]:
    counts, parameters = (QUICK_COUNTS, QUICK_PARAMETERS) if options.quick else (COUNTS, PARAMETERS)
    letters = ("(a)", "(c)") if options.device == "cuda" else ("(b)", "(d)")
    model = options.ready_model
    return [
        *(
            AllReduceSweep(f"{letters[0]} {name}", ranks, options.device, name, parameters, counts)
            for name in options.backends
        ),
        ReadyGradients(f"{letters[1]} {model}", 1, options.device, model, *options.shape(model)),
    ]


def _cells_of_11(options: Options, ranks: int) -> list[Cell]:
    usual = QUICK_LOSS_ITERATIONS if options.quick else LOSS_ITERATIONS
    return [
        Losses(
            f"({letter}) learning rate {lr:g}, batch {batch}", ranks, options.device, name, options.images,
            batch, lr, interval, options.iterations or usual,
        )
        for name in options.own_backends[:1]
        for letter, (lr, batch) in RATES.items()
        for interval in INTERVALS
    ]  # fmt: skip


def _training(
    series: Callable[[str], Sequence[Series]], *, ours: bool = False
) -> Callable[[Options, int], list[Cell]]:
    """Returns the cells of a figure that has one for each model and backend: a panel, of such series."""

    def cells(options: Options, ranks: int) -> list[Cell]:
        return [
            Iterations(
                f"{model}, {name}", ranks, options.device, model, *options.shape(model), tuple(series(name))
            )
            for model in options.trained
            for name in (options.own_backends if ours else options.backends)
        ]

    return cells


def _wrapper(name: str) -> str:
    return "torch" if name.startswith(TORCH) else "ours"


def _steps_to_overlap(name: str) -> list[Series]:
    return [
        Series("no overlap", name, "after backward"),
        Series("overlap", name, "ours"),
        Series("all-reduce a parameter", name, "per parameter"),
        Series("parameter averaging", name, "averaging"),
    ]


def _cells_of_9(options: Options, ranks: int) -> list[Cell]:
    """Returns the cells of one number of ranks, and before the fewest those of a rank by itself."""
    local = [
        Iterations(model, 1, options.device, model, *options.shape(model), (Series("local", "", "local"),))
        for model in options.trained
        if ranks == min(options.ranks)
    ]
    return [*local, *_training(lambda name: [Series(name, name, _wrapper(name))])(options, ranks)]


# ---- tables --------------------------------------------------------------------------------------------

WITHIN = 1.1
"""A total time so many times the best one counts as as good: all beyond is noise."""

_SPREAD = ("calls", "median\n(ms)", "p10\n(ms)", "p90\n(ms)")


def figure_tables(records: Sequence[Measured]) -> Iterator[Table]:
    """Yields the tables of a figure's cells, one for each kind."""
    for kind, (title, heads, rows) in _KINDS.items():
        chosen = [record for record in records if record.cell["kind"] == kind]
        cells = [
            [str(record.cell["panel"]), str(record.cell["ranks"]), *row]
            for record in chosen
            for row in rows(record)
        ]
        if cells:
            yield Table(title, ["panel", "ranks", *heads], cells)


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
    for part in (0.1, 0.25, 0.5, 0.75, 1.0):
        place = max(0, round(part * len(passes[0])) - 1)
        yield [str(place + 1), *_spread([times[place] for times in passes])]


def _iteration_rows(record: Measured) -> Iterator[list[str]]:
    for i, series in enumerate(record.cell["series"]):
        times = usual_samples(record, i)
        phases = [f"{np.median(times[name]) / 1e6:.2f}" for name in PHASES]
        yield [series["name"], *_spread(times["iteration"]), *phases]


def _loss_rows(record: Measured) -> Iterator[list[str]]:
    losses = record.samples["losses"]
    last = np.mean(losses[-max(1, len(losses) // 10) :])
    yield [str(record.cell["interval"]), str(len(losses)), f"{losses[0]:.3f}", f"{last:.3f}"]


def _spread(ns: Sequence[int]) -> list[str]:
    took = Timing.of([ns])
    return [str(took.calls), *(f"{us / 1e3:.2f}" for us in (took.median_us, took.p10_us, took.p90_us))]


_KINDS: Mapping[str, tuple[str, Sequence[str], Callable[[Measured], Iterator[list[str]]]]] = {
    "AllReduceSweep": ("all-reduces", ["parameters", "all-reduces", *_SPREAD, "#wrong"], _sweep_rows),
    "ReadyGradients": ("ready gradients", ["ready", *_SPREAD], _ready_rows),
    "Iterations": (
        "iterations",
        ["series", *_SPREAD, *(f"{name}\n(ms)" for name in PHASES)],
        _iteration_rows,
    ),
    "Losses": ("losses", ["interval", "iterations", "first", "last tenth"], _loss_rows),
}
"""Title, columns and rows by kind of cell."""


# ---- charts --------------------------------------------------------------------------------------------

CUTOFF = 0.05
"""Of figure 11's filter, as part of half the sampling rate."""

FILTER_ORDER = 3

_LATENCY = "latency of an iteration (s)"


def _bucketing(panel: str, records: Sequence[Measured]) -> Chart:
    if records[0].cell["kind"] == "AllReduceSweep":
        title = f"{panel[:3]} all-reduces of {records[0].cell['parameters'] / 1e6:g} M parameters in all"
        curves = [
            _curve(record.cell["backend"], record.cell["counts"], record.samples["total_ns"])
            for record in records
        ]
        return Chart(title, "parameters per all-reduce", "total time (s)", curves)
    passes = records[0].samples["ready_ns"]
    gradients = range(1, len(passes[0]) + 1)
    curve = _curve(f"median of {len(passes)} passes, p10 to p90", gradients, [*zip(*passes, strict=True)])
    return Chart(panel, "ready gradients", "time since backward began (s)", [curve], log="")


def _breakdown(panel: str, records: Sequence[Measured]) -> Chart:
    names = [series["name"] for series in records[0].cell["series"]]
    bars = [usual_samples(records[0], i) for i in range(len(names))]
    medians = np.array([[np.median(times[phase]) for phase in PHASES] for times in bars])
    medians /= medians[names.index("no overlap")].sum()
    curves = [Curve(phase, names, heights.tolist()) for phase, heights in zip(PHASES, medians.T, strict=True)]
    return Chart(panel, "", "time of an iteration (no overlap = 1)", curves, log="", stacked=True)


def _buckets(panel: str, records: Sequence[Measured]) -> Chart:
    """Returns a box for each bucket size, and the iterations that it leaves out."""
    found: dict[str, list[tuple[str, int]]] = {"": [], "wrapper made anew": []}
    for series, times in zip(records[0].cell["series"], records[0].samples["series"], strict=True):
        for i, ns in enumerate(times["iteration"]):
            found["wrapper made anew" if i in times["rebuilt"] else ""].append(
                (f"{series['bucket_mb']:g}", ns)
            )
    usual, rebuilt = (
        Curve(name, [size for size, _ in taken], [ns / 1e9 for _, ns in taken], look="boxes")
        for name, taken in found.items()
    )
    return Chart(
        panel, "bucket size (MB)", _LATENCY, [usual, replace(rebuilt, look="points", color=3)], log=""
    )


def _intervals(panel: str, records: Sequence[Measured]) -> Chart:
    """Returns boxes with their means, which skipped synchronisations lower; medians would show none."""
    curves = []
    for i, series in enumerate(records[0].cell["series"]):
        taken = [(str(one.cell["ranks"]), ns) for one in records for ns in usual_samples(one, i)["iteration"]]
        at, values = [ranks for ranks, _ in taken], [ns / 1e9 for _, ns in taken]
        curves.append(Curve(series["name"], at, values, look="boxes"))
    return Chart(panel, "ranks", f"{_LATENCY}; dashed line: mean", curves, log="")


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


def _over_ranks(panel: str, records: Sequence[Measured]) -> Chart:
    ranks = [record.cell["ranks"] for record in records]
    curves = [
        _curve(series["name"], ranks, [usual_samples(record, i)["iteration"] for record in records])
        for i, series in enumerate(records[-1].cell["series"])
    ]
    names = {number: "local" if number == 1 else str(number) for number in sorted(set(ranks))}
    return Chart(panel, "ranks", _LATENCY, curves, log="x", x_names=names, from_zero=True)


def _curve(name: str, at: Sequence[float], samples_ns: Sequence[Sequence[int]]) -> Curve:
    """Returns median, p10 and p90 of the samples at each place, in seconds."""
    return curve_of(name, zip(at, (Timing.of([samples]) for samples in samples_ns), strict=True), 1e6)


# ---- figures -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure.

    Attributes:
        title: what it shows.
        cells: returns what it consists of with a number of ranks.
        chart: draws a panel, of the cells with one such name.
        ranks: which numbers of ranks: the most that have a core each (main), the fewest, the most, or all.
    """

    title: str
    cells: Callable[[Options, int], Sequence[Cell]]
    chart: Callable[[str, Sequence[Measured]], Chart]
    ranks: str = "all"


def _bucket_series(name: str) -> list[Series]:
    return [Series(f"{size:g} MB", name, _wrapper(name), size) for size in BUCKETS_MB]


FIGURES: Mapping[str, Figure] = {
    "fig2": Figure("communication and computation", _cells_of_2, _bucketing, "main"),
    "fig6": Figure(
        "latency breakdown of an iteration", _training(_steps_to_overlap, ours=True), _breakdown, "main"
    ),
    "fig7": Figure("latency of an iteration by bucket size", _training(_bucket_series), _buckets, "fewest"),
    "fig8": Figure(
        "latency of an iteration by bucket size, more ranks", _training(_bucket_series), _buckets, "most"
    ),
    "fig9": Figure("scalability", _cells_of_9, _over_ranks),
    "fig10": Figure(
        "skipped synchronisations",
        _training(lambda name: [Series(f"every {n}", name, _wrapper(name), interval=n) for n in INTERVALS]),
        _intervals,
    ),
    "fig11": Figure("loss with skipped synchronisations", _cells_of_11, _losses, "main"),
    "fig12": Figure(
        "round-robin groups",
        _training(
            lambda name: [Series(f"rr{n}", f"round_robin:{n}:{name}", "ours") for n in LANES], ours=True
        ),
        _over_ranks,
    ),
}
"""All that are measured, by name."""


def figure_charts(name: str, records: Sequence[Measured]) -> list[Chart]:
    """Returns the panels of a figure.

    Args:
        name: of the figure.
        records: its cells.

    Raises:
        ModuleNotFoundError: scipy is not installed, which figure 11 needs.
    """
    panels: dict[str, list[Measured]] = {}
    for record in sorted(records, key=lambda record: int(record.cell["ranks"])):
        panel = record.cell["panel"]
        if record.cell["kind"] == "AllReduceSweep":  # all backends in one
            panel = panel[:3]
        elif record.cell["kind"] == "Iterations" and FIGURES[name].ranks != "all":
            panel = f"{panel}, {record.cell['ranks']} ranks"
        panels.setdefault(panel, []).append(record)
    if name == "fig9":  # each backend's line begins with the iteration of one rank
        local = {
            panel: panels.pop(panel) for panel, found in [*panels.items()] if found[0].cell["ranks"] == 1
        }
        panels = {
            panel: [*local.get(found[0].cell["model"], ()), *found] for panel, found in panels.items()
        } or local
    return [FIGURES[name].chart(panel, chosen) for panel, chosen in panels.items()]


# ---- what is kept --------------------------------------------------------------------------------------

SAME = ("cpu", "cores_usable", "torch", "collectives", "gpus")
"""What must not differ among the samples of a file, nor among the files of a report."""


class Report(BaseReport[Measured]):
    """A figure: all its cells that are done, and what the command line asked for as its options."""

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
        for option_, value in self.options.items():
            if isinstance(value, (list, tuple)):
                words += [f"--{option_} {','.join(map(str, value))}"] if value else []
            elif value is True:
                words.append(f"--{option_}")
            elif value not in {None, False} and (option_, value) != ("machines", 1):
                words.append(f"--{option_} {value:g}" if isinstance(value, float) else f"--{option_} {value}")
        return " ".join([*words, "--json DIR"])


def read_figure(file: Path) -> Report:
    """Returns the figure that a file keeps.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else, as KeyError and TypeError say too.
    """
    plain = json.loads(file.read_text(encoding="utf-8"))
    if plain.get("schema", Report.SCHEMA) != Report.SCHEMA:
        raise ValueError(f"{file} has schema {plain['schema']}, but this version reads {Report.SCHEMA}")
    records = [Measured(record["cell"], record["samples"]) for record in plain["records"]]
    return Report(f"paper {file.stem}", plain["environment"], plain["options"], records)


def read_folder(folder: Path) -> dict[str, Report]:
    """Returns the figures that a folder keeps, by name.

    Raises:
        ValueError: there is none, or they were measured on different machines.
        OSError: one cannot be read.
        KeyError: one is no figure.
    """
    files = {name: folder / f"{name}.json" for name in FIGURES}
    found = {name: read_figure(file) for name, file in files.items() if file.exists()}
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
    """

    figures: Mapping[str, Report]

    def tables(self) -> Sequence[Table]:
        """Returns the tables of each figure."""
        return [
            replace(table, heading=f"{name}: {table.heading}")
            for name, figure in self.figures.items()
            for table in figure_tables(figure.records)
        ]

    def charts(self) -> Sequence[Chart]:
        """Returns the panels of each figure."""
        return [
            replace(chart, title=", ".join([f"{name}: {chart.title}", *network_of(figure.options)]))
            for name, figure in self.figures.items()
            for chart in figure_charts(name, figure.records)
        ]
