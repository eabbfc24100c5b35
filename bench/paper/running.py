"""A figure from its cells to its image: what is kept, what is measured, what is printed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from collectives.bench.core.arguments import failing_as_command, telling_how_long
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.machine import describe_machine
from collectives.bench.core.records import SCHEMA, Skipped, write_json
from collectives.bench.core.text import header_lines, lines_of, number_of_ranks, skipped_lines
from collectives.bench.paper.cells import Cell, Measured
from collectives.bench.paper.drawing import draw, figure_charts
from collectives.bench.paper.figures import BUCKETS_MB, FIGURES, Request
from collectives.bench.paper.report.kept import SAME, KeptFigure, read_folder
from collectives.bench.paper.report.page import report_lines
from collectives.bench.paper.report.records import Report
from collectives.bench.paper.systems import systems_json, systems_table
from collectives.bench.paper.tables import best_bucket_mb, figure_tables
from collectives.bench.paper.team import LocalTeam, Team

__all__ = ["REPORT", "TABLE", "Job", "run_figure", "run_report", "run_table"]

TABLE = "table1"
REPORT = "report"


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done, as far as it is the same for all figures.

    Attributes:
        request: what the user asks for.
        skipped: what cannot be measured here.
        budget_s: seconds for each figure.
        machines: number of network namespaces.
        link: what each can send.
        json_folder: where samples are kept; ``None`` for nowhere.
        plot_folder: where images are left; ``None`` for nowhere.
    """

    request: Request
    skipped: list[Skipped]
    budget_s: float
    machines: int
    link: str | None
    json_folder: Path | None
    plot_folder: Path | None


def run_figure(name: str, job: Job, team: Team | None) -> KeptFigure:
    """Measures what is missing of a figure, prints and draws it; called by the leader.

    Args:
        name: of the figure.
        job: what is to be done.
        team: the ranks of a launcher; ``None`` to start some.

    Returns:
        The figure.

    Raises:
        CommandError: what was kept of it does not fit, or a package is missing.
        RankFailedError: a rank failed.
        NamespacesUnavailableError: there can be no network namespaces here.
    """
    request = job.request
    if name in {"fig7", "fig8"}:
        request = replace(request, optima_mb=_optima(job))
    cells = FIGURES[name].cells(request)
    report = Report(
        f"paper {name}",
        {**describe_machine(), **DEVICES[request.device].describe(request.ranks)},
        _options(job),
        skipped=job.skipped,
    )
    file = None if job.json_folder is None else job.json_folder / f"{name}.json"
    if file is not None:
        report.records += _kept(file, report)
    _measure(name, cells, report, job, team, file)
    wanted = [cell.as_json() for cell in cells]
    done = sorted(
        (record for record in report.records if record.cell in wanted),
        key=lambda record: wanted.index(dict(record.cell)),
    )
    figure = KeptFigure(done, report.environment, report.options)
    print("\n".join([*header_lines(report), *lines_of(figure_tables(done)), *skipped_lines(report.skipped)]))
    if job.plot_folder is not None and done:
        charts = figure_charts(name, done)
        draw(name, charts, report.environment, report.options, job.plot_folder / f"{name}.png")
    if figure.wrong:
        print(f"# {figure.wrong} elements of results were WRONG")
    return figure


def _options(job: Job) -> dict[str, Any]:
    """Returns what the command line asked for, by the names of its options; ``None`` where it did not."""
    request = job.request
    named = request.ready_model == request.models[0]  # else figure 2 would look at another one than it did
    return {
        "device": request.device,
        "backends": request.backends,
        "models": request.models if named else None,
        "nproc": request.ranks,
        "batch": request.batch,
        "lengths": [f"{model}={length}" for model, length in request.lengths.items()],
        "budget": job.budget_s,
        "iterations": request.loss_iterations,
        "images": Path(request.images).name or None,
        "machines": job.machines,
        "link": job.link,
        "quick": request.quick,
    }


def _measure(
    name: str, cells: Sequence[Cell], report: Report, job: Job, team: Team | None, file: Path | None
) -> None:
    """Measures the cells that are not in the report yet, and keeps each as soon as it is there."""
    kept = [record.cell for record in report.records]
    missing = [cell for cell in cells if cell.as_json() not in kept]
    if not missing:
        return
    with ExitStack() as stack:
        if team is None:
            size = max(cell.ranks for cell in missing)
            groups = list(dict.fromkeys(group for cell in missing for group in cell.groups))
            needed = ["mpi" if "mpi" in group.split(":") else group for group in groups]
            with _under_way(f"{name}: starting ranks"):
                size = -(-size // job.machines) * job.machines
                team = LocalTeam(size, needed, cells[0].device, job.machines, job.link)
            stack.enter_context(team)
        end = time.monotonic() + job.budget_s
        for number, cell in enumerate(missing):
            left_s = max(0.0, end - time.monotonic())
            at = len(cells) - len(missing) + number + 1
            share_s = left_s / (len(missing) - number)
            with _under_way(f"{name}: {at} of {len(cells)}: {cell.panel}, {number_of_ranks(cell.ranks)}"):
                samples = team.run(cell, share_s)
            report.records.append(Measured(cell.as_json(), samples))
            if file is not None:
                _keep(file, report)


def _under_way(what: str) -> AbstractContextManager[None]:
    """Says what is done on stderr; returns a context that tells from time to time for how long."""
    print(f"# {what}", file=sys.stderr, flush=True)
    return telling_how_long(what)


# ---- what is kept --------------------------------------------------------------------------------------


def _kept(file: Path, report: Report) -> list[Measured]:
    """Returns the cells in a file.

    Raises:
        CommandError: they were measured elsewhere, or in another way, or the file cannot be read.
    """
    if not file.exists():
        return []
    with failing_as_command(OSError, ValueError, KeyError, TypeError):
        plain = json.loads(file.read_text(encoding="utf-8"))
        if plain["schema"] != SCHEMA or plain["program"] != report.program:
            raise ValueError(f"{file} is of {plain['program']}, schema {plain['schema']}")
        for what, mine, theirs in [
            *((key, report.environment.get(key), plain["environment"].get(key)) for key in SAME),
            *((key, report.options[key], plain["options"].get(key)) for key in ("machines", "link", "quick")),
        ]:
            if mine != theirs:
                raise ValueError(
                    f"{file} was measured with {what} {theirs}, but here it is {mine}; name another --json"
                )
        return [Measured(record["cell"], record["samples"]) for record in plain["records"]]


def _keep(file: Path, report: Report) -> None:
    """Writes the report in place of the file, which is whole at any time."""
    fresh = file.with_name(f".{file.name}.new")
    write_json(fresh, report.as_json(), indent=None)
    fresh.replace(file)


def _optima(job: Job) -> dict[str, float]:
    """Returns the bucket sizes that figure 2 shows to be enough, where it was measured and they are new."""
    file = None if job.json_folder is None else job.json_folder / "fig2.json"
    if file is None or not file.exists():
        return {}
    with failing_as_command(OSError, ValueError, KeyError, TypeError):
        plain = json.loads(file.read_text(encoding="utf-8"))
        records = [Measured(record["cell"], record["samples"]) for record in plain["records"]]
        return {
            backend: best
            for backend, best in best_bucket_mb(records).items()
            if all(abs(best - size) > 0.1 * size for size in BUCKETS_MB)
        }


def run_report(folder: Path, page: Path | None) -> dict[str, KeptFigure]:
    """Prints the report on all figures that a folder keeps, or writes it to a file.

    Args:
        folder: keeps the figures.
        page: the file; what it held is lost.

    Returns:
        The figures, by name.

    Raises:
        CommandError: there is none, one cannot be read, or they were measured on different machines.
    """
    with failing_as_command(OSError, ValueError, KeyError, TypeError):
        kept = read_folder(folder)
        text = "\n".join(report_lines(kept))
        if page is None:
            print(text)
        else:
            page.write_text(text + "\n", encoding="utf-8")
    return kept


def run_table(folder: Path | None) -> None:
    """Prints table 1, and keeps it in a folder where one is named."""
    print("\n".join(lines_of([systems_table()])).strip())
    if folder is not None:
        write_json(folder / f"{TABLE}.json", {"schema": SCHEMA, "program": TABLE, "systems": systems_json()})
