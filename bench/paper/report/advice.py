"""What follows from the measurements for a training job (section 6.1): buckets, accumulation, machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from collectives.bench.cost_model.parameters import Parameters, Scale
from collectives.bench.paper.cells import Measured
from collectives.bench.paper.figures import BUCKETS_MB, INTERVALS
from collectives.bench.paper.report.bucket_sizes import TIE
from collectives.bench.paper.report.findings import NOTICEABLE, Figures, gain, medians, where
from collectives.bench.paper.report.scaling import means, speedups
from collectives.bench.paper.scaling import predicted_s

__all__ = ["advice_lines"]

LINKS_GBIT = (1, 10, 25, 100)
MACHINES = 2


def advice_lines(figures: Figures) -> Iterator[str]:
    """Yields what was measured here, then what the cost model says of two machines."""
    yield from _measured(figures)
    yield from _by_link(figures)


def _measured(figures: Figures) -> Iterator[str]:
    best: dict[str, str] = {}
    for record in [*figures.get("fig7", ()), *figures.get("fig8", ())]:
        times = medians(record)
        size = min(times, key=lambda name: times[name])
        best[f"- {where(record)}: buckets of {size}."] = ""
    yield from best
    for record in figures.get("fig10", ()):
        saved = gain(means(record), f"every {INTERVALS[-1]}", f"every {INTERVALS[0]}")
        say = "accumulate gradients" if saved > NOTICEABLE else "synchronise every iteration"
        yield f"- {where(record)}: {say}; every {INTERVALS[-1]} iterations saves {saved:.0%}."
    for record, worth in speedups(figures) if "fig9" in figures else ():
        yield f"- {where(record)}: worth {worth:.2f} single ranks."


@dataclass(frozen=True, slots=True)
class _Job:
    """A model that is trained on some ranks of each machine."""

    local: Measured
    ranks: int

    def seconds(self, bucket_mb: float, machines: int, gbit: float) -> float:
        """Returns the predicted time of an iteration."""
        parameters = Parameters(cores=self.ranks, link_us_per_byte=8e-3 / gbit)
        series: Mapping[str, Sequence[int]] = self.local.samples["series"][0]
        sizes = self.local.samples["sizes"]
        return predicted_s(series, sizes, bucket_mb, Scale(machines, self.ranks), parameters, host=True)


def _by_link(figures: Figures) -> Iterator[str]:
    """Yields a row for each model and link, of the cost model alone."""
    local = [record for record in figures.get("fig9", ()) if record.cell["ranks"] == 1]
    if not local or any(record.cell["device"] != "cpu" for record in local):
        return
    ranks = max(record.cell["ranks"] for record in figures["fig9"])
    yield ""
    yield (
        f"By the link between {MACHINES} machines of {ranks} ranks each. **Predicted, not measured**: "
        "computation of one rank by itself, all-reduces of `host` by the [cost "
        "model](guide/benchmarks.md), latency 20 us."
    )
    yield ""
    yield (
        f"- *Machines*: {MACHINES} where they train more samples a second than one; else the job stays in "
        "one."
    )
    yield (
        f"- *Synchronise*: the shortest interval that takes at most {NOTICEABLE:.0%} longer than one machine."
    )
    yield f"- *Buckets*: the smallest size within {TIE:.0%} of the best."
    yield ""
    yield "| model | link | iteration on one machine | on two | machines | synchronise | buckets |"
    yield "|---|---|---|---|---|---|---|"
    for record in local:
        job = _Job(record, ranks)
        for gbit in LINKS_GBIT:
            yield _row(job, gbit)
    yield ""
    yield (
        "`collectives bench paper all --machines 2 --link 1gbit --json DIR` measures such a link between "
        "network namespaces, a launcher the one that there is."
    )


def _row(job: _Job, gbit: float) -> str:
    times = {size: job.seconds(size, MACHINES, gbit) for size in BUCKETS_MB}
    bucket = min(size for size, s in times.items() if s <= min(times.values()) * (1 + TIE))
    one = min(job.seconds(size, 1, gbit) for size in BUCKETS_MB)
    two = times[bucket]
    fitting = [n for n in INTERVALS if one + (two - one) / n <= one * (1 + NOTICEABLE)]
    every = f"every {fitting[0]}" if fitting else f"more rarely than every {INTERVALS[-1]}"
    pays = "2" if MACHINES * one > two else "1"
    return (
        f"| {job.local.cell['model']} | {gbit} Gb/s | {one * 1e3:.0f} ms | {two * 1e3:.0f} ms | {pays} "
        f"| {every} | {bucket:g} MB |"
    )
