"""The report as a page in Markdown, from kept samples alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from collectives.bench.core.image import made_with
from collectives.bench.core.text import lines_of
from collectives.bench.paper.report.advice import advice_lines
from collectives.bench.paper.report.findings import NOTICEABLE, Figures, Finding
from collectives.bench.paper.report.kept import KeptFigure
from collectives.bench.paper.report.priorities import priority_lines
from collectives.bench.paper.report.statements import STATEMENTS, Statement
from collectives.bench.paper.tables import figure_tables

__all__ = ["report_lines"]


def report_lines(kept: Mapping[str, KeptFigure]) -> Iterator[str]:
    """Yields the report.

    Args:
        kept: the figures that were measured, by name; at least one.
    """
    figures: Figures = {name: figure.records for name, figure in kept.items()}
    yield "# The paper's evaluation, measured again"
    yield ""
    yield (
        "What *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (VLDB 2020) says "
        "with a number, and what the ranks below show of it. `collectives bench paper report --json DIR` "
        "makes this page of the samples that DIR keeps, and of nothing else; [The paper's "
        "figures](guide/paper-figures.md) tells how they are measured."
    )
    yield ""
    if any(figure.options.get("quick") for figure in kept.values()):
        yield (
            "**These samples are of a trial with `--quick` on a machine with the load below: small models "
            "and few iterations. They show the form of the page; what holds there says nothing.**"
        )
        yield ""
    yield from _rules()
    yield from _measured_with(kept)
    yield "## The statements"
    for number, statement in enumerate(STATEMENTS, start=1):
        yield from ["", f"### {number}. {statement.says}", ""]
        yield from _statement(statement, figures)
    yield from ["", "## What follows for a training job", ""]
    yield from advice_lines(figures)
    yield from ["", "## What priorities among gradients could save", ""]
    yield (
        "Section 7 names schedulers that send first what the next forward needs first. This bounds what "
        "they could save here: communication takes nothing from computation, forward takes half as long as"
        f" backward, and a wrapper could wait layer by layer at no cost. Above {NOTICEABLE:.0%} it is worth"
        " a trial."
    )
    yield ""
    yield from priority_lines(figures)
    yield from ["", "## The measurements"]
    for name, records in figures.items():
        yield from ["", f"`{name}`:", "", "```text"]
        yield from list(lines_of(figure_tables(records)))[1:]
        yield "```"


def _rules() -> Iterator[str]:
    yield "## How a statement is judged"
    yield ""
    yield (
        "The rules are part of the program, which was written before it had samples to judge. Each "
        "statement has its own, stated with it; for all of them:"
    )
    yield ""
    yield (
        "- A time is the slowest rank's, and the median over iterations or calls, without the iterations "
        "in which wrapper and samples were made anew."
    )
    yield (
        f"- Two times differ where one is more than {NOTICEABLE:.0%} longer. Where a rule speaks of noise, "
        "the difference also exceeds half of the range from p10 to p90 of the slower series."
    )
    yield (
        "- The paper's percentages are of 16 to 256 GPUs. On other ranks a rule asks for the direction, "
        "and not for the number."
    )
    yield (
        "- *Holds* and *does not* are said of each model and backend. Of a measurement that a statement "
        "says nothing of, none is said."
    )
    yield ""


def _measured_with(kept: Mapping[str, KeptFigure]) -> Iterator[str]:
    yield "## What was measured"
    yield ""
    environment = next(iter(kept.values())).environment
    system = f"{environment['system']}, {environment['memory_bytes'] / 2**30:.0f} GiB"
    yield f"On: {made_with(environment, {})}; {system}. The load is that of the machine just before."
    yield ""
    yield "| figure | load | command |"
    yield "|---|---|---|"
    for name, figure in kept.items():
        yield f"| {name} | {figure.environment['load_average_1min']:.1f} | `{figure.command(name)}` |"
    yield ""


def _statement(statement: Statement, figures: Figures) -> Iterator[str]:
    if not statement.judges:
        yield f"Section {statement.section}. Nothing is measured: {statement.rule}"
        return
    yield f"Section {statement.section}; {', '.join(statement.figures)}. Holds where: {statement.rule}"
    yield ""
    missing = [name for name in statement.figures if not figures.get(name)]
    findings = [] if missing else [found for judge in statement.judges for found in judge(figures)]
    if findings:
        yield "| where | measured | |"
        yield "|---|---|---|"
        for found in findings:
            yield f"| {found.where} | {found.here} | {_result(found)} |"
    if all(found.holds is None for found in findings):
        if findings:
            yield ""
        why = f"no samples of {', '.join(missing)}" if missing else f"needs {statement.needs}"
        yield f"Cannot be tried on these ranks: {why}. There:"
        yield ""
        yield f"    {statement.command}"


def _result(found: Finding) -> str:
    if found.holds is None:
        return ""
    if found.holds:
        return "holds"
    return f"does not, because {found.because}" if found.because else "does not"
