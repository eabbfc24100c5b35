"""What the paper says of its figures, beside what was measured: Markdown, from the kept samples alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.bench.core.image import made_with
from collectives.bench.paper.cells import Measured
from collectives.bench.paper.tables import best_bucket_mb, usual_samples

__all__ = ["STATEMENTS", "Finding", "Statement", "report_lines"]

NOTICEABLE = 0.1
"""Part by which two times must differ before one counts as longer."""

Figures = Mapping[str, Sequence[Measured]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured where a statement can be tried.

    Attributes:
        where: model, backend and ranks.
        here: the measurement in words.
        holds: whether the statement does; ``None`` where it says nothing of such a measurement.
        because: the measurement that shows why it does not; may be empty.
    """

    where: str
    here: str
    holds: bool | None
    because: str = ""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of the paper.

    Attributes:
        section: where it stands.
        figures: names of the figures that it needs.
        says: the statement.
        judge: returns what was found, given those figures.
    """

    section: str
    figures: tuple[str, ...]
    says: str
    judge: Callable[[Figures], Iterator[Finding]]


def report_lines(figures: Figures, environment: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report.

    Args:
        figures: the cells that are kept, by figure.
        environment: of their report.
    """
    yield "# The paper's evaluation, measured again"
    yield ""
    yield f"Measured on: {made_with(environment)}. Made by `collectives bench paper report --json DIR`."
    for statement in STATEMENTS:
        yield ""
        yield f"## {statement.says}"
        yield ""
        yield f"Section {statement.section}; {', '.join(statement.figures)}."
        yield ""
        missing = [name for name in statement.figures if not figures.get(name)]
        findings = [] if missing else list(statement.judge(figures))
        if not findings:
            yield f"Not measured{': no ' + ', '.join(missing) if missing else ' on these backends'}."
            continue
        yield "| where | measured | |"
        yield "|---|---|---|"
        for found in findings:
            yield f"| {found.where} | {found.here} | {_verdict(found)} |"
    yield from _advice(figures)


def _verdict(found: Finding) -> str:
    if found.holds is None:
        return ""
    if found.holds:
        return "holds"
    return f"does not, because {found.because}" if found.because else "does not"


def _advice(figures: Figures) -> Iterator[str]:
    """Yields what follows for a training job on these ranks."""
    yield from ["", "## What follows here", ""]
    for record in [*figures.get("fig7", ()), *figures.get("fig8", ())]:
        medians = _medians(record)
        best = min(medians, key=lambda name: medians[name])
        yield f"- {_where(record)}: buckets of {best}."
    for record in figures.get("fig10", ()):
        means = _means(record)
        gain = 1 - means["every 8"] / means["every 1"]
        say = "accumulate gradients" if gain > NOTICEABLE else "synchronise every iteration"
        yield f"- {_where(record)}: {say}; every 8 iterations saves {gain:.0%}."
    local = {record.cell["model"]: record for record in figures.get("fig9", ()) if record.cell["ranks"] == 1}
    for record in figures.get("fig9", ()):
        one = local.get(record.cell["model"])
        if one is not None and record.cell["ranks"] > 1:
            factor = record.cell["ranks"] * _median(one, 0) / _median(record, 0)
            yield f"- {_where(record)}: as fast as {factor:.1f} single ranks."
    yield ""
    yield "A GPU machine runs the same with"
    yield "`torchrun --nproc-per-node 8 --no-python collectives bench paper all --device cuda --json DIR`."


# ---- judges --------------------------------------------------------------------------------------------


def _bucketing(figures: Figures) -> Iterator[Finding]:
    enough = best_bucket_mb(figures["fig2"])
    for record in figures["fig2"]:
        if record.cell["kind"] == "AllReduceSweep":
            totals = [float(np.median(calls)) for calls in record.samples["total_ns"]]
            count = record.cell["counts"][0]
            ratio = totals[0] / min(totals)
            said = f"{count:,} parameters at a time take {ratio:.1f} times as long as the best"
            here = f"{said}; {enough[record.cell['backend']]:g} MB are enough"
            because = f"calls are cheap: {totals[0] / 1e3 / (record.cell['parameters'] / count):.0f} us each"
            yield Finding(_where(record), here, ratio > 1 + NOTICEABLE, because)


def _same_order(figures: Figures) -> Iterator[Finding]:
    ready = [record for record in figures["fig2"] if record.cell["kind"] == "ReadyGradients"]
    for record in figures["fig2"] if ready else ():
        if record.cell["kind"] == "AllReduceSweep":
            backward = float(np.median([times[-1] for times in ready[0].samples["ready_ns"]]))
            best = min(float(np.median(calls)) for calls in record.samples["total_ns"])
            best *= ready[0].samples["parameters"] / record.cell["parameters"]
            here = f"backward {backward / 1e6:.0f} ms, its all-reduces {best / 1e6:.0f} ms"
            because = f"one is {max(backward / best, best / backward):.0f} times the other"
            yield Finding(_where(record), here, 0.1 < backward / best < 10, because)


def _communication_share(record: Measured) -> float:
    """Returns how much of an iteration without overlap, the record's first series, communication takes."""
    phases = usual_samples(record, 0)
    return float(np.median(phases["communication"]) / np.median(phases["iteration"]))


def _overlap(figures: Figures) -> Iterator[Finding]:
    for record in figures["fig6"]:
        medians = _medians(record)
        gain = 1 - medians["overlap"] / medians["no overlap"]
        share = _communication_share(record)
        because = f"communication is {share:.0%} of an iteration without overlap: no more can be saved"
        yield Finding(_where(record), f"{gain:.1%} faster", gain > _spread(record, 0), because)


def _backward_largest(figures: Figures) -> Iterator[Finding]:
    for record in figures["fig6"]:
        phases = {name: float(np.median(times)) for name, times in usual_samples(record, 0).items()}
        backward = phases["backward"] + phases["communication"]
        share = phases["communication"] / backward
        here = f"backward is {backward / phases['iteration']:.0%} of an iteration, of that {share:.0%} sent"
        because = f"the ranks compute for {phases['backward'] / 1e6:.0f} ms of {backward / 1e6:.0f} ms"
        yield Finding(_where(record), here, share > 0.5, because)


def _bucket_size(figures: Figures) -> Iterator[Finding]:
    for record in figures["fig7"]:
        medians = _medians(record)
        best, worst = (pick(medians, key=lambda name: medians[name]) for pick in (min, max))
        ratio = medians[worst] / medians[best]
        share = _communication_share(record)
        because = f"what overlap leaves of communication is {share:.0%} even with an all-reduce a gradient"
        yield Finding(_where(record), f"{best} is {ratio:.2f} times as fast as {worst}", ratio > 2, because)


def _more_ranks(figures: Figures) -> Iterator[Finding]:
    fewer = {record.cell["panel"]: record for record in figures["fig7"]}
    for record in figures["fig8"]:
        other = fewer.get(record.cell["panel"])
        if other is not None and other.cell["ranks"] < record.cell["ranks"]:
            few, many = _medians(other), _medians(record)
            zero, most = (many[name] / few[name] - 1 for name in ("0 MB", "25 MB"))
            here = f"from {other.cell['ranks']} ranks on: 0 MB {zero:+.0%}, 25 MB {most:+.0%}"
            forward = [float(np.median(usual_samples(each, 0)["forward"])) for each in (other, record)]
            because = f"forward, which sends nothing, takes {forward[1] / forward[0]:.1f} times as long, too"
            yield Finding(_where(record), here, zero > NOTICEABLE > most, because)


def _scaling(figures: Figures) -> Iterator[Finding]:
    local = {record.cell["model"]: record for record in figures["fig9"] if record.cell["ranks"] == 1}
    for record in figures["fig9"]:
        one = local.get(record.cell["model"])
        if one is not None and record.cell["ranks"] > 1:
            yield Finding(_where(record), f"{_median(record, 0) / _median(one, 0):.2f} times local", None)


def _skipping(figures: Figures) -> Iterator[Finding]:
    for record in figures["fig10"]:
        means = _means(record)
        gain = 1 - means["every 8"] / means["every 1"]
        share = _communication_share(record)
        because = f"overlap leaves {share:.0%} of an iteration to save"
        yield Finding(_where(record), f"{gain:.1%} faster", gain > NOTICEABLE, because)


def _convergence(figures: Figures) -> Iterator[Finding]:
    finals: dict[str, dict[int, float]] = {}
    for record in figures["fig11"]:
        losses = record.samples["losses"]
        last = float(np.mean(losses[-max(1, len(losses) // 10) :]))
        finals.setdefault(record.cell["panel"], {})[record.cell["interval"]] = last
    for panel, losses in finals.items():
        first, last = losses[min(losses)], losses[max(losses)]
        here = f"loss at the end {first:.3f} every iteration, {last:.3f} every {max(losses)}"
        is_worse = last > first * (1 + NOTICEABLE)
        yield Finding(panel, here, is_worse == panel.startswith("(b)"))


def _lanes(figures: Figures) -> Iterator[Finding]:
    for record in figures["fig12"]:
        medians = _medians(record)
        gain = 1 - medians["rr3"] / medians["rr1"]
        share = _communication_share(record)
        because = f"overlap leaves {share:.0%} of an iteration to save with one group"
        here = f"rr3 takes {1 - gain:.2f} times as long as rr1"
        yield Finding(_where(record), here, gain > _spread(record, 0), because)


def _where(record: Measured) -> str:
    return f"{record.cell['panel']}, {record.cell['ranks']} ranks"


def _median(record: Measured, number: int) -> float:
    return float(np.median(usual_samples(record, number)["iteration"]))


def _spread(record: Measured, number: int) -> float:
    """Returns half of the range from p10 to p90, as part of the median; no smaller difference counts."""
    p10, median, p90 = np.percentile(usual_samples(record, number)["iteration"], (10, 50, 90))
    return float((p90 - p10) / median / 2)


def _medians(record: Measured) -> dict[str, float]:
    return {series["name"]: _median(record, i) for i, series in enumerate(record.cell["series"])}


def _means(record: Measured) -> dict[str, float]:
    return {
        series["name"]: float(np.mean(usual_samples(record, i)["iteration"]))
        for i, series in enumerate(record.cell["series"])
    }


STATEMENTS = (
    Statement("3.2.2", ("fig2",), "Larger all-reduces take less time in all (Gloo: up to 500 K)", _bucketing),
    Statement(
        "3.2.2", ("fig2",), "Backward takes as long as communication, in order of magnitude", _same_order
    ),
    Statement(
        "5.1",
        ("fig6",),
        "Overlap makes iterations faster: NCCL 38.0 and 35.2 %, Gloo 26.8 and 21.5 %",
        _overlap,
    ),
    Statement("5.1", ("fig6",), "Communication is more than half of backward's delay", _backward_largest),
    Statement("1, 5.2", ("fig7",), "The bucket size can make training twice as fast", _bucket_size),
    Statement(
        "5.2", ("fig7", "fig8"), "With more ranks 0 MB is slower, and above 5 MB nothing is", _more_ranks
    ),
    Statement("5.3", ("fig9",), "256 GPUs take 2 times local with NCCL, 3 and 6 times with Gloo", _scaling),
    Statement("5.3", ("fig10",), "Every 8 iterations is faster: 38 % with NCCL, 57 % with Gloo", _skipping),
    Statement(
        "5.3",
        ("fig11",),
        "Skipping costs no loss at rate 0.02, batch 8, but at 0.06, batch 256",
        _convergence,
    ),
    Statement("5.4", ("fig12",), "Three groups in turn are faster: 33 % for BERT with NCCL", _lanes),
)
"""Those that figures can show, in the paper's order."""
