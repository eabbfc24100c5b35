"""What the paper says of its evaluation, beside what kept samples show: a page in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collectives.bench.core.records import grouped, lines_of, made_with
from collectives.bench.paper.cells import Measured
from collectives.bench.paper.figures import INTERVALS, Report, figure_tables, usual_samples
from collectives.bench.peers import TORCH

NOTICEABLE = 0.1
"""Part by which two times must differ before one counts as longer."""

Figures = Mapping[str, Sequence[Measured]]
"""The cells that are kept, by figure."""


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

    @property
    def result(self) -> str:
        """What is said of the statement here; nothing where it says nothing of this."""
        if self.holds is None or self.holds:
            return "holds" if self.holds else ""
        return f"does not, because {self.because}" if self.because else "does not"


Judge = Callable[[Figures], Iterator[Finding]]
"""Yields what was found, given the figures that a statement needs."""


# ---- which cell ----------------------------------------------------------------------------------------


def where(record: Measured) -> str:
    """Returns panel and ranks of a cell."""
    return f"{record.cell['panel']}, {record.cell['ranks']} ranks"


def backend_of(record: Measured) -> str:
    """Returns the backend of a cell without whose wrapper it was; empty of a rank by itself."""
    name = record.cell.get("backend") or record.cell["panel"].partition(", ")[2]
    return str(name).removeprefix(TORCH)


def parameters_of(record: Measured) -> int:
    """Returns the number of trained parameters of a cell's model."""
    return sum(record.samples["sizes"])


def sweeps(figures: Figures) -> Iterator[tuple[Measured, list[float]]]:
    """Yields the all-reduces of figure 2, with the median total time in nanoseconds of each count."""
    for record in figures["fig2"]:
        if record.cell["kind"] == "AllReduceSweep":
            yield record, [float(np.median(calls)) for calls in record.samples["total_ns"]]


# ---- times of a cell -----------------------------------------------------------------------------------


def times_of(
    record: Measured, statistic: Callable[[Sequence[int]], np.floating[Any]] = np.median
) -> dict[str, float]:
    """Returns the nanoseconds of an iteration by series: medians, or what another statistic says of them."""
    return {
        series["name"]: float(statistic(usual_samples(record, i)["iteration"]))
        for i, series in enumerate(record.cell["series"])
    }


def median_of(record: Measured) -> float:
    """Returns the median nanoseconds of an iteration of the first series."""
    return phases(record)["iteration"]


def phases(record: Measured, number: int = 0) -> dict[str, float]:
    """Returns the median nanoseconds of a series by phase, with those of the iteration."""
    return {name: float(np.median(times)) for name, times in usual_samples(record, number).items()}


def spread(record: Measured, number: int = 0) -> float:
    """Returns half of the range from p10 to p90 of a series, as part of its median."""
    p10, median, p90 = np.percentile(usual_samples(record, number)["iteration"], (10, 50, 90))
    return float((p90 - p10) / median / 2)


def communication_share(record: Measured) -> float:
    """Returns the part of an iteration that communication takes in the first series."""
    times = phases(record)
    return times["communication"] / times["iteration"]


def gain(times: Mapping[str, float], fast: str, slow: str) -> float:
    """Returns the part of a slow series' time that a fast one saves; less than 0 where it takes longer."""
    return 1 - times[fast] / times[slow]


def saved_in_words(saved: float) -> str:
    """Returns the part of the time that something saves, or takes in addition."""
    return f"{abs(saved):.1%} {'less' if saved >= 0 else 'more'} time"


def is_faster(record: Measured, fast: str, slow: str) -> bool:
    """Returns whether a series is faster than another by more than noise."""
    names = [series["name"] for series in record.cell["series"]]
    noise = max(NOTICEABLE, spread(record, names.index(slow)))
    return gain(times_of(record), fast, slow) > noise


BYTES = 4
"""Of a parameter."""

SATURATED = (200_000, 1_000_000)
"""Neighbours of 500 K in the sweep: top speed that begins between the two begins near it."""

FLAT_FROM_BYTES = 512 << 10
FLAT = 1.25
"""Largest ratio of totals that still counts as one level."""

SAME_ORDER = 10


def top_speed(figures: Figures) -> Iterator[Finding]:
    """Looks for the size from which larger all-reduces gain no more."""
    for record, totals in sweeps(figures):
        counts, best = record.cell["counts"], min(totals)
        enough = next(i for i, total in enumerate(totals) if total <= best * (1 + NOTICEABLE))
        each_us = totals[0] / 1e3 / (record.cell["parameters"] / counts[0])
        here = (
            f"within {NOTICEABLE:.0%} of the best from {counts[enough]:,} parameters on; {counts[0]:,} at a "
            f"time take {totals[0] / best:.1f} times as long"
        )
        holds, because = None, ""
        if backend_of(record) == "gloo":
            holds = SATURATED[0] <= counts[enough] <= SATURATED[1]
            because = f"each all-reduce of {counts[0]:,} takes {each_us:.0f} us, many under way at once"
        elif backend_of(record) == "nccl":
            holds = totals[-1] == best
            because = f"{counts[totals.index(best)]:,} are faster than {counts[-1]:,}"
        yield Finding(where(record), here, holds, because)


def same_order(figures: Figures) -> Iterator[Finding]:
    """Compares backward with the best all-reduces of as many parameters."""
    ready = [record for record in figures["fig2"] if record.cell["kind"] == "ReadyGradients"]
    for record, totals in sweeps(figures) if ready else ():
        backward = float(np.median([times[-1] for times in ready[0].samples["ready_ns"]]))
        best = min(totals) * ready[0].samples["parameters"] / record.cell["parameters"]
        here = f"backward {backward / 1e6:.0f} ms, its all-reduces {best / 1e6:.0f} ms"
        because = f"one is {max(backward / best, best / backward):.0f} times the other"
        yield Finding(where(record), here, 1 / SAME_ORDER < backward / best < SAME_ORDER, because)


def flat_and_wide(figures: Figures) -> Iterator[Finding]:
    """Looks whether Gloo's totals are level from 512 KB on, and whether its iterations spread more."""
    for record, totals in sweeps(figures):
        large = {
            count: total
            for count, total in zip(record.cell["counts"], totals, strict=True)
            if count * BYTES >= FLAT_FROM_BYTES
        }
        if len(large) > 1:
            ratio = max(large.values()) / min(large.values())
            slowest = max(large, key=lambda count: large[count])
            holds = ratio <= FLAT if backend_of(record) == "gloo" else None
            here = f"totals beyond 512 KB differ by {ratio - 1:.0%}"
            yield Finding(where(record), here, holds, f"{slowest:,} parameters at a time take longest")
    found: dict[str, dict[str, float]] = {}
    for record in figures["fig7"]:
        widths = [spread(record, i) for i in range(len(record.cell["series"]))]
        found.setdefault(record.cell["model"], {})[backend_of(record)] = float(np.median(widths))
    for model, widths_by in found.items():
        shown = ", ".join(f"{name} {width:.0%}" for name, width in widths_by.items())
        both = {"gloo", "nccl"} <= set(widths_by)
        holds = widths_by["gloo"] > widths_by["nccl"] if both else None
        yield Finding(model, f"spread of an iteration: {shown}", holds)


def overlap_saves(device: str) -> Judge:
    """Returns the judge of what overlap saves with tensors on a device."""

    def judge(figures: Figures) -> Iterator[Finding]:
        for record in figures["fig6"]:
            if record.cell["device"] == device:
                here = saved_in_words(gain(times_of(record), "overlap", "no overlap"))
                yield Finding(
                    where(record), here, is_faster(record, "overlap", "no overlap"), _what_changes(record)
                )

    return judge


def _what_changes(record: Measured) -> str:
    """Returns what overlap does to communication that is waited for, and to backward beside it."""
    names = [series["name"] for series in record.cell["series"]]
    apart, beside = (phases(record, names.index(name)) for name in ("no overlap", "overlap"))
    changes = {"waiting for communication": "communication", "backward beside it": "backward"}
    return ", ".join(
        f"{what} takes {apart[phase] / 1e6:.0f} ms without overlap and {beside[phase] / 1e6:.0f} ms with it"
        for what, phase in changes.items()
    )


def backward_largest(figures: Figures) -> Iterator[Finding]:
    """Looks at backward and communication without overlap, then at how both depend on the model."""
    for record in figures["fig6"]:
        times = phases(record)
        backward = times["backward"] + times["communication"]
        largest = backward > max(times["forward"], times["step"])
        here = f"backward with communication is {backward / times['iteration']:.0%} of an iteration"
        yield Finding(f"{where(record)}: largest step", here, largest)
        share = times["communication"] / backward
        because = f"the ranks compute for {times['backward'] / 1e6:.0f} ms of {backward / 1e6:.0f} ms"
        yield Finding(
            f"{where(record)}: more than half", f"communication is {share:.0%} of it", share > 0.5, because
        )
    for backend, records in grouped(figures["fig6"], backend_of).items():
        if len({parameters_of(record) for record in records}) > 1:
            yield from _by_model(backend, sorted(records, key=parameters_of))


def _by_model(backend: str, records: Sequence[Measured]) -> Iterator[Finding]:
    """Yields what grows from the smallest model to the largest one, and where overlap saves most."""
    models = [record.cell["model"] for record in records]
    shares = [communication_share(record) for record in records]
    here = ", ".join(f"{model} {share:.0%}" for model, share in zip(models, shares, strict=True))
    grows = shares[-1] > shares[0]
    yield Finding(f"{backend}: grows with the model", here, grows, "computation grows more")
    balances, gains = [], []
    for record in records:
        times = phases(record)
        ratio = times["communication"] / times["backward"]
        balances.append(min(ratio, 1 / ratio) if ratio else 0.0)
        gains.append(gain(times_of(record), "overlap", "no overlap"))
    most, nearest = gains.index(max(gains)), balances.index(max(balances))
    here = f"overlap saves most with {models[most]}, {models[nearest]} is nearest to balance"
    shown = zip(models, balances, gains, strict=True)
    because = "; ".join(f"{model}: balance {balance:.2f}, {saved:.0%}" for model, balance, saved in shown)
    yield Finding(f"{backend}: most where balanced", here, most == nearest, because)


TIE = 0.02
"""Part by which a size may be slower than the best one and still count as the best."""

TWICE = 2.0

_DEFAULT = "25 MB"

LARGE_MB = 5
"""Size from which on the paper finds buckets large enough."""

PAPERS_BEST = {
    ("resnet", "nccl"): ("10 MB", "25 MB"),
    ("resnet", "gloo"): ("5 MB",),
    ("bert", "nccl"): ("50 MB",),
    ("bert", "gloo"): ("5 MB",),
}
"""Best sizes in the paper, by the beginning of the model's name, and by backend."""

PARAMETER_RATIO = (12, 18)
"""Ratios of parameters that count as 15."""

SHARED_CORES = 1.5
"""Ratio of forwards, which send nothing, from which on the ranks do not have a core each."""


def twice(figures: Figures) -> Iterator[Finding]:
    """Compares the best size with the worst one."""
    for record in figures["fig7"]:
        times = times_of(record)
        best, worst = (pick(times, key=lambda name: times[name]) for pick in (min, max))
        ratio = times[worst] / times[best]
        share = communication_share(record)
        because = f"what overlap leaves of communication is {share:.0%} even with an all-reduce a gradient"
        yield Finding(
            where(record), f"{best} is {ratio:.2f} times as fast as {worst}", ratio > TWICE, because
        )


def default_size(figures: Figures) -> Iterator[Finding]:
    """Compares the default with the best size."""
    for record in figures["fig7"]:
        times = times_of(record)
        best = min(times, key=lambda name: times[name])
        excess = times[_DEFAULT] / times[best] - 1
        here = f"{excess:.1%} more time than {best}"
        yield Finding(where(record), here, excess <= NOTICEABLE, f"{best} takes that much less")


def best_sizes(figures: Figures) -> Iterator[Finding]:
    """Compares the best size with that of the paper."""
    for record in figures["fig7"]:
        times = times_of(record)
        best = min(times, key=lambda name: times[name])
        here = f"{best}: " + ", ".join(f"{name} {ns / 1e6:.0f} ms" for name, ns in times.items())
        papers = PAPERS_BEST.get(
            (record.cell["model"].rstrip("0123456789").split("-")[0], backend_of(record))
        )
        holds, because = None, ""
        if papers is not None:
            near = min(times[name] for name in papers) <= times[best] * (1 + TIE)
            holds = near and _matters(record)
            differ = "no size from 5 MB on is noticeably faster than another"
            because = f"{best} is faster than {' or '.join(papers)}" if not near else differ
        yield Finding(where(record), here, holds, because)


def _matters(record: Measured) -> bool:
    """Returns whether sizes from 5 MB on differ noticeably."""
    times = [ns for name, ns in times_of(record).items() if float(name.split()[0]) >= LARGE_MB]
    return max(times) / min(times) > 1 + NOTICEABLE


def more_ranks(figures: Figures) -> Iterator[Finding]:
    """Compares the fewest ranks with the most, with buckets and without."""
    fewer = {record.cell["panel"]: record for record in figures["fig7"]}
    for record in figures["fig8"]:
        other = fewer.get(record.cell["panel"])
        if other is not None and other.cell["ranks"] < record.cell["ranks"]:
            few, many = times_of(other), times_of(record)
            zero, most = (many[name] / few[name] - 1 for name in ("0 MB", _DEFAULT))
            here = f"from {other.cell['ranks']} ranks on: 0 MB {zero:+.0%}, {_DEFAULT} {most:+.0%}"
            slower = phases(record)["forward"] / phases(other)["forward"]
            if slower > SHARED_CORES:
                here += f"; ranks share cores: forward, which sends nothing, {slower - 1:+.0%}"
                yield Finding(where(record), here, None)
                continue
            because = "0 MB is not slower" if zero <= NOTICEABLE else f"{_DEFAULT} is slower, too"
            yield Finding(where(record), here, zero > NOTICEABLE > most, because)


def sublinear(figures: Figures) -> Iterator[Finding]:
    """Compares the best sizes of the smallest and the largest model."""
    for backend, records in grouped(figures["fig7"], backend_of).items():
        few, *_, many = sorted([*records, records[0]], key=parameters_of)
        if parameters_of(few) == parameters_of(many):
            continue
        sizes = []
        for record in (few, many):
            times = times_of(record)
            sizes.append(float(min(times, key=lambda name: times[name]).split()[0]))
        growth = parameters_of(many) / parameters_of(few)
        here = (
            f"{sizes[0]:g} MB for {few.cell['model']}, {sizes[1]:g} MB for {many.cell['model']} of "
            f"{growth:.1f} times the parameters"
        )
        if not (_matters(few) or _matters(many)):
            yield Finding(backend, f"{here}; sizes from 5 MB on do not differ noticeably", None)
            continue
        because = "the larger model wants smaller buckets" if sizes[1] < sizes[0] else "the size grows more"
        yield Finding(backend, here, sizes[0] <= sizes[1] <= growth * sizes[0], because)


def times_parameters(figures: Figures) -> Iterator[Finding]:
    """Counts the parameters of the two models."""
    counts = {record.cell["model"]: parameters_of(record) for record in figures["fig6"]}
    if {"resnet50", "bert-base"} <= set(counts):
        ratio = counts["bert-base"] / counts["resnet50"]
        bert, resnet = (counts[name] / 1e6 for name in ("bert-base", "resnet50"))
        here = f"{bert:.1f} M against {resnet:.1f} M parameters: {ratio:.1f} times"
        because = "this is BERT-base; BERT-large, about three times as large, would come near"
        yield Finding("bert-base, resnet50", here, PARAMETER_RATIO[0] <= ratio <= PARAMETER_RATIO[1], because)


MOST_RANKS = 256
"""Those of the paper's largest run."""

NEAR_LINEAR = 0.5
"""Part of the ranks that the paper's 256 were worth."""

JUMP = 0.25
"""Part by which iterations must take longer at once to count as a jump."""

TIMES_LOCAL = {
    ("resnet50", "nccl"): (1.5, 2.5),
    ("resnet50", "gloo"): (2.0, 4.5),
    ("bert-base", "gloo"): (4.5, 9.0),
}
"""Times of local training that count as the paper's 2, 3 and 6, by model and backend."""


def speedups(figures: Figures) -> Iterator[tuple[Measured, float]]:
    """Yields cells of figure 9 with several ranks, and how many single ranks they are worth."""
    local = {record.cell["model"]: record for record in figures["fig9"] if record.cell["ranks"] == 1}
    for record in figures["fig9"]:
        one = local.get(record.cell["model"])
        if one is not None and record.cell["ranks"] > 1:
            yield record, record.cell["ranks"] * median_of(one) / median_of(record)


def near_linear(figures: Figures) -> Iterator[Finding]:
    """Compares all ranks with a single one."""
    for record, worth in speedups(figures):
        ranks = record.cell["ranks"]
        holds = worth >= NEAR_LINEAR * ranks if ranks >= MOST_RANKS else None
        yield Finding(where(record), f"worth {worth:.2f} single ranks", holds, f"{worth / ranks:.0%} of them")


def slowdown(backend: str) -> Judge:
    """Returns the judge of how much longer iterations take than those of a rank by itself."""

    def judge(figures: Figures) -> Iterator[Finding]:
        for record, worth in speedups(figures):
            if backend_of(record) == backend:
                ranks, times = record.cell["ranks"], record.cell["ranks"] / worth
                bounds = TIMES_LOCAL.get((record.cell["model"], backend))
                tried = ranks >= MOST_RANKS and bounds is not None
                holds = bounds[0] <= times <= bounds[1] if tried and bounds is not None else None
                share = communication_share(record)
                because = f"overlap leaves {share:.0%} of an iteration to communication"
                yield Finding(where(record), f"{times:.2f} times local", holds, because)

    return judge


def dearer_link(figures: Figures) -> Iterator[Finding]:
    """Compares BERT over NCCL on 16 and on 32 GPUs."""
    found = _by_ranks(figures, "fig9", "bert-base", "nccl")
    if {16, 32} <= set(found):
        few, many = (median_of(found[ranks]) for ranks in (16, 32))
        here = f"16 GPUs {few / 1e6:.0f} ms, 32 GPUs {many / 1e6:.0f} ms"
        because = "these links are alike, and more ranks take longer"
        yield Finding("bert-base, nccl", here, few > many * (1 + NOTICEABLE), because)


def skipping_saves(figures: Figures) -> Iterator[Finding]:
    """Compares synchronisation at every 8th iteration with that at each."""
    for record in figures["fig10"]:
        saved = gain(times_of(record, np.mean), "every 8", "every 1")
        share = communication_share(record)
        because = f"overlap leaves {share:.0%} of an iteration to communication and waiting"
        yield Finding(where(record), saved_in_words(saved), saved > NOTICEABLE, because)


def jump(figures: Figures) -> Iterator[Finding]:
    """Compares 128 GPUs with 256 in all series."""
    for model in sorted({record.cell["model"] for record in figures["fig10"]}):
        found = _by_ranks(figures, "fig10", model, "nccl")
        if {MOST_RANKS // 2, MOST_RANKS} <= set(found):
            few, many = (times_of(found[ranks], np.mean) for ranks in (MOST_RANKS // 2, MOST_RANKS))
            steps = {name: many[name] / few[name] - 1 for name in few}
            here = ", ".join(f"{name} {step:+.0%}" for name, step in steps.items())
            because = "iterations grow by less than a jump with some of the intervals"
            yield Finding(f"{model}, nccl", here, min(steps.values()) > JUMP, because)


def _by_ranks(figures: Figures, figure: str, model: str, backend: str) -> Mapping[int, Measured]:
    return {
        record.cell["ranks"]: record
        for record in figures[figure]
        if record.cell["model"] == model and backend_of(record) == backend
    }


def nccl_or_gloo(figures: Figures) -> Iterator[Finding]:
    """Compares NCCL with Gloo on the same model and ranks."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for record, _ in speedups(figures):
        key = (record.cell["model"], record.cell["ranks"])
        found.setdefault(key, {})[backend_of(record)] = median_of(record)
    for (model, ranks), times in found.items():
        here = ", ".join(f"{name} {ns / 1e6:.0f} ms" for name, ns in times.items())
        tried = {"nccl", "gloo"} <= set(times)
        holds = times["nccl"] < times["gloo"] * (1 - NOTICEABLE) if tried else None
        yield Finding(f"{model}, {ranks} ranks", here, holds, "computation takes most of both")


def lanes_in_turn(figures: Figures) -> Iterator[Finding]:
    """Compares three groups in turn with one."""
    for record in figures["fig12"]:
        model, backend = record.cell["model"], backend_of(record)
        saved = gain(times_of(record), "rr3", "rr1")
        faster = is_faster(record, "rr3", "rr1")
        share = communication_share(record)
        because = f"overlap leaves {share:.0%} of an iteration to save with one group"
        holds = None
        if (model, backend) in {("resnet50", "gloo"), ("bert-base", "nccl")}:
            holds = faster
        elif (model, backend) == ("resnet50", "nccl"):
            holds, because = abs(saved) <= NOTICEABLE, "the groups' times differ noticeably"
        yield Finding(where(record), f"three groups take {saved_in_words(saved)} than one", holds, because)


LAST = 0.1
"""Part of the iterations whose mean is the loss at the end."""


def loss_at_the_end(figures: Figures) -> Iterator[Finding]:
    """Compares the losses at the end; panel (a) should show no harm, panel (b) should."""
    finals: dict[str, dict[int, float]] = {}
    for record in figures["fig11"]:
        losses = record.samples["losses"]
        last = float(np.mean(losses[-max(1, int(LAST * len(losses))) :]))
        finals.setdefault(record.cell["panel"], {})[record.cell["interval"]] = last
    for panel, by_interval in finals.items():
        first, last = by_interval[min(by_interval)], by_interval[max(by_interval)]
        here = "; ".join(f"every {interval}: {loss:.3f}" for interval, loss in by_interval.items())
        is_worse = last > first * (1 + NOTICEABLE)
        change = f"{last / first - 1:+.0%}"
        because = f"the loss of every {max(by_interval)} is {change} from that of every {min(by_interval)}"
        yield Finding(panel, here, is_worse == panel.startswith("(b)"), because)


JUDGES = (
    top_speed, same_order, flat_and_wide, overlap_saves, backward_largest, twice, default_size, best_sizes,
    more_ranks, sublinear, times_parameters, near_linear, slowdown, dearer_link, skipping_saves, jump,
    nccl_or_gloo, lanes_in_turn, loss_at_the_end,
)  # fmt: skip
"""What the statements of the page name."""


def report_text(kept: Mapping[str, Report]) -> str:
    """Returns the report in Markdown.

    Args:
        kept: the figures that were measured, by name; at least one.
    """
    import jinja2

    figures: Figures = {name: figure.records for name, figure in kept.items() if figure.records}
    environment = next(iter(kept.values())).environment
    system = f"{environment['system']}, {environment['memory_bytes'] / 2**30:.0f} GiB"
    markdown = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - no HTML
    markdown.globals.update({judge.__name__: judge for judge in JUDGES})
    page = markdown.from_string(Path(__file__).with_name("report.md.jinja").read_text("utf-8"))
    return page.render(
        kept=kept,
        figures=figures,
        quick=any(figure.options.get("quick") for figure in kept.values()),
        noticeable=f"{NOTICEABLE:.0%}",
        machine=f"{made_with(environment, {})}; {system}",
        found=lambda judges: [found for judge in judges for found in judge(figures)],
        advice=list(advice_lines(figures)),
        measurements={name: list(lines_of(figure_tables(records)))[1:] for name, records in figures.items()},
    )


def advice_lines(figures: Figures) -> Iterator[str]:
    """Yields a line for each choice that the figures decide."""
    buckets = [*figures.get("fig7", ()), *figures.get("fig8", ())]
    yield from dict.fromkeys(f"- {where(record)}: {_size(record)}." for record in buckets)
    for record in figures.get("fig10", ()):
        saved = gain(times_of(record, np.mean), f"every {INTERVALS[-1]}", f"every {INTERVALS[0]}")
        say = "accumulate gradients" if saved > NOTICEABLE else "synchronise every iteration"
        yield f"- {where(record)}: {say}; every {INTERVALS[-1]} iterations saves {saved:.0%}."
    for record, worth in speedups(figures) if "fig9" in figures else ():
        yield f"- {where(record)}: worth {worth:.2f} single ranks."


def _size(record: Measured) -> str:
    """Returns the size of buckets to take: the default one, where none saves more than noise over it."""
    times = times_of(record)
    best = min(times, key=lambda name: times[name])
    if is_faster(record, best, _DEFAULT):
        return f"buckets of {best}, which save {gain(times, best, _DEFAULT):.0%} over {_DEFAULT}"
    slower = [
        f"{name} takes {times[name] / times[_DEFAULT] - 1:.0%} longer"
        for name in times
        if is_faster(record, _DEFAULT, name)
    ]
    return "; ".join([f"buckets of {_DEFAULT}, the default, as no size is noticeably faster", *slower])
