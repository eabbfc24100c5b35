"""What do the figures of the paper's evaluation (PyTorch Distributed, VLDB 2020) look like on these ranks?

fig2    total time of 60 M float32 by parameters per all-reduce; when gradients of ResNet-152 are ready
fig6    phases of an iteration; with overlap, without, an all-reduce a parameter, averaged parameters
fig7    latency of an iteration by bucket size, with the smallest number of ranks
fig8    the same with the largest
fig9    latency by ranks
fig10   mean latency by ranks, synchronised every 1, 2, 4 and 8 iterations
fig11   loss, synchronised every 1, 2, 4 and 8 iterations, of a residual network on images of digits
fig12   latency over 1, 3 and 5 groups in turn
table1  training systems by scheme, those of today too; nothing is measured
all     all of them, but for fig8 where there is one number of ranks, as of fig7
report  what the paper says of the figures beside those that --json DIR keeps, in Markdown

Models are classifiers, trained by cross entropy on random labelled samples; the wrapper and the samples are
made anew every 100 iterations, and iterations that include that are told apart. Ranks begin an iteration
together; the slowest one counts. Series of a panel take turns. Each rank has one thread.

With --json DIR each figure's raw samples are kept in DIR/NAME.json as they come; what is there already is not
measured again, so that a run can be interrupted and taken up. A figure takes about its budget where the least
number of iterations fits into it, longer elsewhere, as where ranks share cores. fig7 and fig8 add the bucket
size that DIR/fig2.json shows to be enough. --html FILE has all figures of a run, or all of report.

Without a launcher the ranks are started on this machine. Under a launcher its processes are the ranks, on all
of its machines:

    torchrun --nproc-per-node 8 --no-python collectives bench paper fig9 --device cuda --json DIR
    mpirun -n 4 collectives bench paper fig12 --json DIR
    srun collectives bench paper all --device cuda --json DIR
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from collectives.bench.comparison.peers import TORCH, why_no_torch
from collectives.bench.core.arguments import (
    add_options,
    add_page,
    at_least,
    failing_as_command,
    parse_counts,
    parse_names,
    telling_how_long,
    write_html,
)
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.machine import describe_machine, usable_cores
from collectives.bench.core.namespaces import Machines, NamespacesUnavailableError, check_machines
from collectives.bench.core.ranks import PlacementOptions, why_no_group
from collectives.bench.core.records import SCHEMA, Skipped, write_json
from collectives.bench.core.text import header_lines, lines_of, number_of_ranks, skipped_lines
from collectives.bench.models import MODELS, install_command, why_unavailable
from collectives.bench.paper.cells import Cell, Measured, load_images
from collectives.bench.paper.figures import (
    BUCKETS_MB,
    CPU_LENGTHS,
    FIGURES,
    INTERVALS,
    LOSS_ITERATIONS,
    QUICK_LOSS_ITERATIONS,
    Request,
)
from collectives.bench.paper.report import report_lines
from collectives.bench.paper.team import LaunchedTeam, Team, launched_ranks, local_team
from collectives.bench.paper.views import (
    SAME,
    FiguresReport,
    Report,
    best_bucket_mb,
    draw,
    figure_charts,
    read_folder,
    read_records,
    systems_json,
    systems_table,
)
from collectives.cli import CommandError, mpi_job
from collectives.cli.output_files import output_file, output_folder
from collectives.ranks.processes import RankFailedError

TABLE = "table1"
REPORT = "report"

EVERY_RANK = True
"""Every process of a launcher carries the command out."""

BACKENDS = {"cpu": ("host", "gloo", "mpi"), "cuda": ("nccl",)}
"""Backends where the user names none, as far as they can be used."""

PAPER_MODELS = ("resnet50", "bert-base")
QUICK_MODELS = ("small",)
READY_MODEL = "resnet152"

RANKS = (2, 4)

CUDA_BATCH = 32
"""Samples of a rank on a GPU where the user names no number."""

BUDGET_S = 240.0
QUICK_BUDGET_S = 7.0

EXTRA = "python -m pip install 'torch-collectives[paper]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument("figure", choices=[*FIGURES, TABLE, "all", REPORT], help="what to measure; see above")
    parser.add_argument("--quick", action="store_true", help="a small model, few sizes, a small budget")
    parser.add_argument(
        "--backends",
        type=parse_names,
        metavar="NAME,...",
        help="backends, round_robin:LANES[:BACKEND], and torch:NAME for torch's wrapper over its backend "
        "(default: host,gloo,mpi or nccl, as far as they can be used)",
    )
    parser.add_argument(
        "--models",
        type=parse_names,
        metavar="NAME,...",
        help=f"of {', '.join(MODELS)} (default: {','.join(PAPER_MODELS)}, quick: {','.join(QUICK_MODELS)}; "
        f"fig2 looks at the first one, by default at {READY_MODEL})",
    )
    parser.add_argument(
        "--nproc",
        type=parse_counts(2),
        metavar="N,...",
        help="numbers of ranks (default: 2,4, quick: 2; under a launcher powers of two up to all)",
    )
    parser.add_argument("--batch", type=at_least(1), metavar="N", help="samples of each rank")
    parser.add_argument(
        "--lengths",
        type=_parse_lengths,
        default={},
        metavar="MODEL=N,...",
        help="pixels of an image's side, or tokens of a text (default: each model's own, but on CPUs "
        f"{','.join(f'{name}={length}' for name, length in CPU_LENGTHS.items())})",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"for each figure (default: {BUDGET_S:g}, quick: {QUICK_BUDGET_S:g})",
    )
    parser.add_argument(
        "--iterations",
        type=at_least(max(INTERVALS)),
        metavar="N",
        help=f"of fig11 (default: {LOSS_ITERATIONS}, quick: {QUICK_LOSS_ITERATIONS})",
    )
    parser.add_argument(
        "--images",
        type=Path,
        metavar="FILE",
        help="mnist.npz or the like for fig11: x_train and y_train (default: scikit-learn's digits)",
    )
    add_options(parser, PlacementOptions, ("device", "machines", "link"))
    parser.add_argument(
        "--json", type=Path, metavar="DIR", help="keep samples in DIR, and go on with those there"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the report to FILE (Markdown)")
    add_page(parser)
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the figures into DIR (PNG)")


def _parse_lengths(text: str) -> dict[str, int]:
    """Returns the length of a sample by model."""
    lengths = {}
    for part in parse_names(text):
        model, _, length = part.partition("=")
        if model not in MODELS or not length.isdecimal() or not int(length):
            raise argparse.ArgumentTypeError(
                f"{part!r} must be MODEL=N with a model of {', '.join(MODELS)} and a number from 1 on"
            )
        lengths[model] = int(length)
    return lengths


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; called by every process of a launcher.

    Returns:
        1 where results are wrong, else 0.

    Raises:
        CommandError: the arguments do not fit together, a package is missing, or a rank failed.
    """
    names = [*FIGURES, TABLE] if arguments.figure == "all" else [arguments.figure]
    launched = launched_ranks()
    job = None
    if names == [REPORT] and arguments.json is None:
        raise CommandError("the report is made of kept figures; name their folder with --json DIR")
    if names != [REPORT] and arguments.page is not None:
        raise CommandError(f"--page is for the report, but {arguments.figure} is asked for")
    _check_packages(names, arguments)
    _check_outputs(names, arguments, launched)
    if names not in ([TABLE], [REPORT]):
        job = _job(arguments, names, launched)
    with ExitStack() as stack, failing_as_command(RankFailedError, NamespacesUnavailableError):
        team = None
        if launched is not None and job is not None:
            team = LaunchedTeam(job.request.device)
            stack.enter_context(team)
            if not team.leads:
                team.follow()
                return 0
        elif launched is not None and not _is_first():
            return 0
        status = 0
        if job is not None and len(names) > 1 and len(job.request.ranks) == 1:
            names.remove("fig8")
        figures: dict[str, Report] = {}
        for number, name in enumerate(names, start=1):
            if name == TABLE:
                run_table(arguments.json)
            elif name == REPORT:
                figures = run_report(arguments.json, arguments.page)
            elif job is not None:
                figures[name] = run_figure(name, job, team)
                status = max(status, int(figures[name].wrong > 0))
            page = _page(figures, job, with_systems=TABLE in names[:number])
            write_html(page, arguments)  # what there is, should the run be interrupted
    return status


def _page(figures: Mapping[str, Report], job: Job | None, *, with_systems: bool) -> FiguresReport:
    environment = next((figure.environment for figure in figures.values()), None)
    return FiguresReport(
        "collectives bench paper",
        environment or describe_machine(),
        {name: figure.command() for name, figure in figures.items()},
        skipped=job.skipped if job is not None else [],
        figures=figures,
        with_systems=with_systems,
    )


def _is_first() -> bool:
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    job = mpi_job.current()
    return rank in {None, "0"} and (job is None or job.rank == 0)


# ---- what is to be done --------------------------------------------------------------------------------


def _job(arguments: argparse.Namespace, names: Sequence[str], launched: int | None) -> Job:
    quick: bool = arguments.quick
    device: str = arguments.device
    reason = DEVICES[device].why_unavailable()
    if reason is not None:
        raise CommandError(f"--device {device}: {reason}")
    ranks = _ranks(arguments, launched)
    with failing_as_command(ValueError, OSError):
        check_machines(ranks[-1], arguments.machines, arguments.link)
        skipped: list[Skipped] = []
        backends = _backends(arguments, launched, skipped)
        models = tuple(
            name for name in arguments.models or (QUICK_MODELS if quick else PAPER_MODELS)
            if _has_model(name, skipped)
        )  # fmt: skip
        if arguments.images is not None:
            load_images(str(arguments.images))
        ready = models[0] if models and (arguments.models or quick) else READY_MODEL
        if "fig2" in names and not _has_model(ready, skipped):
            models = ()
    if not backends or not models:
        raise CommandError("nothing can be measured: " + "; ".join(skipped_lines(skipped)))
    request = Request(
        device,
        backends,
        models,
        ready,
        ranks,
        _main_ranks(ranks, launched),
        arguments.batch or (CUDA_BATCH if device == "cuda" else None),
        quick,
        "" if arguments.images is None else str(arguments.images.resolve()),
        lengths=arguments.lengths,
        loss_iterations=arguments.iterations,
    )
    budget_s = arguments.budget or (QUICK_BUDGET_S if quick else BUDGET_S)
    return Job(
        request, skipped, budget_s, arguments.machines, arguments.link, arguments.json, arguments.plot,
    )  # fmt: skip


def _check_packages(names: Sequence[str], arguments: argparse.Namespace) -> None:
    drawn = arguments.plot is not None or arguments.html is not None
    wanted = ["matplotlib"] if arguments.plot is not None else []
    wanted += ["scipy"] if drawn and not {"fig11", REPORT}.isdisjoint(names) else []
    wanted += ["sklearn"] if "fig11" in names and arguments.images is None else []
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"this needs {', '.join(missing)}, not installed; install the extra: {EXTRA}")


def _check_outputs(names: Sequence[str], arguments: argparse.Namespace, launched: int | None) -> None:
    """Checks, before anything is measured, that files can be written where they are asked for."""
    if launched is not None and not _is_first():
        return
    with failing_as_command(argparse.ArgumentTypeError):
        for folder in (None if names == [REPORT] else arguments.json, arguments.plot):
            if folder is not None:
                output_folder(folder)
        if arguments.page is not None:
            output_file(arguments.page)


def _ranks(arguments: argparse.Namespace, launched: int | None) -> tuple[int, ...]:
    if launched is not None and launched < 2:
        raise CommandError("the launcher started one process; the figures need 2 ranks or more")
    if arguments.nproc is not None:
        ranks = tuple(sorted(set(arguments.nproc)))
    elif launched is None:
        ranks = RANKS[:1] if arguments.quick else RANKS
    else:
        ranks = tuple(dict.fromkeys([*(1 << k for k in range(1, launched.bit_length())), launched]))
    if launched is not None and ranks[-1] > launched:
        raise CommandError(f"--nproc asks for {ranks[-1]} ranks, but the launcher started {launched}")
    if launched is not None and arguments.machines > 1:
        raise CommandError("--machines plays machines on this one; a launcher has its own")
    return ranks


def _main_ranks(ranks: Sequence[int], launched: int | None) -> int:
    """Returns the most ranks that have a core each; all of a launcher's do."""
    fitting = [number for number in ranks if launched is not None or number <= usable_cores()]
    return fitting[-1] if fitting else ranks[0]


def _backends(arguments: argparse.Namespace, launched: int | None, skipped: list[Skipped]) -> tuple[str, ...]:
    usable = []
    for name in dict.fromkeys(arguments.backends or BACKENDS[arguments.device]):
        if name.startswith(TORCH):
            reason, install = why_no_torch(name, arguments.device), ""
        else:
            reason, install = why_no_group(name, arguments.device)
            if reason is None and "mpi" in name.split(":"):
                if launched is not None and mpi_job.current() is None:
                    reason = "only mpirun can start its ranks"
                elif arguments.machines > 1:
                    reason = "mpirun would start its ranks on one machine only"
        if reason is None:
            usable.append(name)
        else:
            skipped.append(Skipped(name, reason, install))
    return tuple(usable)


def _has_model(name: str, skipped: list[Skipped]) -> bool:
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(MODELS)}")
    reason = why_unavailable(MODELS[name].package)
    if reason is not None:
        skipped.append(Skipped(name, reason, f"{EXTRA}, or {install_command(MODELS[name].package)}"))
    return reason is None


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


def run_figure(name: str, job: Job, team: Team | None) -> Report:
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
    report.records = sorted(
        (record for record in report.records if record.cell in wanted),
        key=lambda record: wanted.index(dict(record.cell)),
    )
    tables = lines_of(report.tables())
    print("\n".join([*header_lines(report), *tables, *skipped_lines(report.skipped)]))
    if job.plot_folder is not None and report.records:
        charts = figure_charts(name, report.records)
        draw(name, charts, report.environment, report.options, job.plot_folder / f"{name}.png")
    if report.wrong:
        print(f"# {report.wrong} elements of results were WRONG")
    return report


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
                machines = None
                if job.machines > 1:
                    machines = stack.enter_context(Machines(job.machines, job.link))
                team = stack.enter_context(local_team(size, needed, cells[0].device, machines))
        end = time.monotonic() + job.budget_s
        for number, cell in enumerate(missing):
            left_s = max(0.0, end - time.monotonic())
            at = len(cells) - len(missing) + number + 1
            share_s = left_s / (len(missing) - number)
            with _under_way(f"{name}: {at} of {len(cells)}: {cell.panel}, {number_of_ranks(cell.ranks)}"):
                samples = cell.combine(team.ask((cell, share_s))[: cell.ranks])
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
        return read_records(plain)


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
        records = read_records(plain)
        return {
            backend: best
            for backend, best in best_bucket_mb(records).items()
            if all(abs(best - size) > 0.1 * size for size in BUCKETS_MB)
        }


def run_report(folder: Path, page: Path | None) -> dict[str, Report]:
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
