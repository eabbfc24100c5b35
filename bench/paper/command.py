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
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from collectives.bench.comparison.torch_peer import PREFIX
from collectives.bench.comparison.torch_peer import why_unavailable as why_no_torch_backend
from collectives.bench.core.arguments import (
    add_machines,
    add_page,
    at_least,
    failing_as_command,
    parse_counts,
    parse_names,
    write_html,
)
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.groups import split_lanes
from collectives.bench.core.machine import describe_machine, usable_cores
from collectives.bench.core.namespaces import NamespacesUnavailableError, check_machines
from collectives.bench.core.records import Skipped
from collectives.bench.core.text import skipped_lines
from collectives.bench.paper.convergence import load_images
from collectives.bench.paper.figures import (
    CPU_LENGTHS,
    FIGURES,
    INTERVALS,
    LOSS_ITERATIONS,
    QUICK_LOSS_ITERATIONS,
    Request,
)
from collectives.bench.paper.report.kept import KeptFigure
from collectives.bench.paper.report.records import FiguresReport
from collectives.bench.paper.running import REPORT, TABLE, Job, run_figure, run_report, run_table
from collectives.bench.paper.team import LaunchedTeam, launched_ranks
from collectives.bench.training.models import MODELS, install_command, why_unavailable
from collectives.cli import CommandError, mpi_job
from collectives.cli.output_files import output_file, output_folder
from collectives.ranks.processes import RankFailedError
from collectives.registry.backends import backend_spec
from collectives.registry.backends import why_unavailable as why_no_backend

__all__ = ["EVERY_RANK", "add_arguments", "run"]

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
    parser.add_argument("--device", choices=tuple(DEVICES), default="cpu", help="default: %(default)s")
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
    add_machines(parser)
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
        figures: dict[str, KeptFigure] = {}
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


def _page(figures: Mapping[str, KeptFigure], job: Job | None, *, with_systems: bool) -> FiguresReport:
    environment = next((figure.environment for figure in figures.values()), None)
    return FiguresReport(
        "collectives bench paper",
        environment or describe_machine(),
        {name: figure.command(name) for name, figure in figures.items()},
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
        install = ""
        if name.startswith(PREFIX):
            reason = why_no_torch_backend(name, arguments.device)
        else:
            backend = split_lanes(name)[0]
            reason, install = why_no_backend(backend), backend_spec(backend).install
            if reason is None and arguments.device not in backend_spec(backend).devices:
                reason = f"serves no tensors on {arguments.device}"
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
