"""What do the figures of the paper's evaluation (PyTorch Distributed, VLDB 2020) look like on these ranks?

fig2    total time of 60 M float32 by parameters per all-reduce; when gradients of ResNet-152 are ready
fig6    phases of an iteration; with overlap, without, an all-reduce a parameter, averaged parameters
fig7    latency of an iteration by bucket size, with the smallest number of ranks
fig8    the same with the largest
fig9    latency by ranks
fig10   mean latency by ranks, synchronised every 1, 2, 4 and 8 iterations
fig11   loss, synchronised every 1, 2, 4 and 8 iterations, of a residual network on images of digits
fig12   latency over 1, 3 and 5 groups in turn
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
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

import collectives
from collectives.bench.core.arguments import (
    add_options,
    add_page,
    failing_as_command,
    options_from,
    telling_how_long,
    write_html,
)
from collectives.bench.core.devices import DEVICES, usable_cores
from collectives.bench.core.namespaces import NamespacesUnavailableError
from collectives.bench.core.ranks import TIMEOUT, Placement, new_group, why_no_group
from collectives.bench.core.records import (
    Skipped,
    check_known,
    header_lines,
    lines_of,
    number_of_ranks,
    skipped_lines,
    usable,
    write_json,
)
from collectives.bench.models import MODELS, install_command, why_unavailable
from collectives.bench.paper.cells import Cell, Iterations, Measured, Place, Series, load_images
from collectives.bench.paper.figures import (
    BUCKETS_MB,
    BUDGET_S,
    CPU_LENGTHS,
    FIGURES,
    LOSS_ITERATIONS,
    PAPER_MODELS,
    QUICK_BUDGET_S,
    QUICK_LOSS_ITERATIONS,
    QUICK_MODELS,
    READY_MODEL,
    SAME,
    FiguresReport,
    Options,
    Report,
    best_bucket_mb,
    read_figure,
    read_folder,
)
from collectives.bench.paper.report import report_text
from collectives.bench.peers import TORCH, why_no_torch
from collectives.cli import CommandError, mpi_job
from collectives.cli.output_files import output_file, output_folder
from collectives.ddp.default_group import resolve_group
from collectives.ranks.processes import RankFailedError, RankProcesses, commands
from collectives.store import PrefixStore

LEADER_LIMIT = timedelta(hours=2)
"""How long ranks of a launcher wait for the next cell."""

_SRUN_PORT = 29500


def serve(rank: int, connection: Connection, placement: Placement) -> None:
    """Body of a rank: answers every order until the parent closes."""
    placement.take(rank)
    placement.initialize(rank, "host")
    for cell, budget_s in commands(connection):
        connection.send(_carry_out(cell, budget_s))
    _leave()


class LaunchedTeam:
    """This process and all others that a launcher started; a context manager, made by every one of them.

    Args:
        device: type of the device.

    Attributes:
        leads: whether this process is rank 0, which alone calls :meth:`ask`; the others call :meth:`follow`.
    """

    def __init__(self, device: str) -> None:
        _read_srun()
        local = {name: os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        torch.set_num_threads(1)
        method = "mpi://" if mpi_job.current() is not None and "RANK" not in os.environ else "env://"
        collectives.init_process_group("host", init_method=method, timeout=LEADER_LIMIT)
        self._rank, self._size = collectives.get_rank(), collectives.get_world_size()
        names: list[Any] = [None] * self._size
        collectives.all_gather_object(names, os.uname().nodename)
        beside = [other for other, name in enumerate(names) if name == names[self._rank]]
        place, count = beside.index(self._rank), len(beside)
        if all(text.isdecimal() for text in local.values()):
            place, count = int(local["LOCAL_RANK"]), int(local["LOCAL_WORLD_SIZE"])
        DEVICES[device].take(place, count)
        self.leads = self._rank == 0

    def __enter__(self) -> LaunchedTeam:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Ends the world; the leader tells the others first, unless it failed."""
        if kind is None and self.leads:
            collectives.broadcast_object_list([None], src=0)
        elif kind is not None and collectives.is_initialized():
            resolve_group(None).abort()  # else the others would wait for this rank's next word
        _leave()

    def ask(self, command: Any) -> list[Any]:
        """Has a cell measured within a budget; returns the answers of all ranks, this one's too.

        Raises:
            RankFailedError: a rank failed.
        """
        with self._naming_the_rank():
            collectives.broadcast_object_list([command], src=0)
            answers: list[Any] = [None] * self._size
            collectives.gather_object(_carry_out(*command), answers, dst=0)
        return answers

    def follow(self) -> None:
        """Measures what the leader asks for, until it closes.

        Raises:
            RankFailedError: this rank failed, or another did.
        """
        while True:
            told: list[Any] = [None]
            with self._naming_the_rank():
                collectives.broadcast_object_list(told, src=0)
                if told[0] is None:
                    return
                collectives.gather_object(_carry_out(*told[0]), None, dst=0)

    @contextmanager
    def _naming_the_rank(self) -> Iterator[None]:
        """Context that tells errors as those of this rank; those that another rank caused in a line."""
        try:
            yield
        except (collectives.GroupAbortedError, collectives.PeerLostError) as error:
            raise RankFailedError(f"rank {self._rank} ended with another: {error}", self._rank) from error
        except Exception as error:
            text = f"rank {self._rank} failed:\n\n{traceback.format_exc()}"
            raise RankFailedError(text, self._rank) from error


Team = RankProcesses | LaunchedTeam
"""Ranks that measure cells: each is asked with a cell and a budget, and answers as :func:`_carry_out`."""


def launched_as() -> tuple[int, int] | None:
    """Returns this process's rank among those that a launcher started, and their number; ``None`` without."""
    if all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank, steps = (os.environ.get(f"SLURM_{name}", "") for name in ("PROCID", "STEP_NUM_TASKS"))
    if rank.isdecimal() and steps.isdecimal() and int(steps) > 1:
        return int(rank), int(steps)
    job = mpi_job.current()
    return None if job is None else (job.rank, job.size)


def _read_srun() -> None:
    """Tells the rendezvous what ``srun`` tells this process, unless another launcher did.

    Raises:
        CommandError: the nodes of the step cannot be read.
    """
    step = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if "RANK" in os.environ or mpi_job.current() is not None or not step.isdecimal():
        return
    os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": step}
    os.environ.setdefault("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    job = int(os.environ.get("SLURM_JOB_ID", "0"))
    os.environ.setdefault("MASTER_PORT", str(_SRUN_PORT + job % 1000))
    if "MASTER_ADDR" not in os.environ:
        words = ["scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")]
        try:
            found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise CommandError(
                f"cannot find the first node of this srun ({error}); set MASTER_ADDR to its address"
            ) from error
        os.environ["MASTER_ADDR"] = found[0]


# ---- on every rank -------------------------------------------------------------------------------------


def _carry_out(cell: Cell, budget_s: float) -> Any:
    """Returns what this rank measured, ``None`` where the cell leaves it out; called by all ranks."""
    rank, members = collectives.get_rank(), list(range(cell.ranks))
    with _groups(("host", *cell.groups), members) as (own, *groups):
        if rank not in members:
            return None
        place = Place(rank, DEVICES[cell.device], dict(zip(cell.groups, groups, strict=True)), own)
        return cell.measure(place, budget_s)


@contextmanager
def _groups(names: Sequence[str], members: list[int]) -> Iterator[list[Any]]:
    """Context with groups of some ranks; called by all ranks."""
    made = [_torch_group(name, members) if name.startswith(TORCH) else new_group(name, members)
            for name in names]  # fmt: skip
    try:
        yield made
    except BaseException:  # the others of the cell are told at once, and not by their time limit
        for group in made:
            with suppress(Exception):
                group.abort()
        raise
    if collectives.get_rank() in members:
        for name, group in zip(names, made, strict=True):
            (torch_dist if name.startswith(TORCH) else collectives).destroy_process_group(group)


def _torch_group(name: str, members: list[int]) -> Any:
    if not torch_dist.is_initialized():
        store = PrefixStore("torch", resolve_group(None).get_group_store())
        torch_dist.init_process_group(
            "gloo",
            store=store,
            rank=collectives.get_rank(),
            world_size=collectives.get_world_size(),
            timeout=TIMEOUT,
        )
    return torch_dist.new_group(members, backend=name.removeprefix(TORCH), timeout=TIMEOUT)


def _leave() -> None:
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    collectives.destroy_process_group()


REPORT = "report"

EVERY_RANK = True
"""Every process of a launcher carries the command out."""

BACKENDS = {"cpu": ("host", "gloo", "mpi"), "cuda": ("nccl",)}
"""Backends where the user names none, as far as they can be used."""

RANKS = (2, 4)

EXTRA = "python -m pip install 'torch-collectives[paper]'"

UNREADABLE = (OSError, ValueError, KeyError, TypeError)
"""What reading kept samples raises."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument("figure", choices=[*FIGURES, "all", REPORT], help="what to measure; see above")
    add_options(
        parser,
        Options,
        without=("imports", "bind"),
        backends="host,gloo,mpi or nccl, as far as they can be used",
        models=f"{','.join(PAPER_MODELS)}, for fig2 {READY_MODEL}, quick: {','.join(QUICK_MODELS)}; "
        f"known are {', '.join(MODELS)}",
        ranks="2,4, quick: 2; under a launcher powers of two up to all",
        lengths="each model's own, but on CPUs "
        f"{','.join(f'{name}={length}' for name, length in CPU_LENGTHS.items())}",
        budget_s=f"{BUDGET_S:g}, quick: {QUICK_BUDGET_S:g}",
        iterations=f"{LOSS_ITERATIONS}, quick: {QUICK_LOSS_ITERATIONS}",
        images="scikit-learn's digits",
    )
    parser.add_argument(
        "--json", type=Path, metavar="DIR", help="keep samples in DIR, and go on with those there"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the report to FILE (Markdown)")
    add_page(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; called by every process of a launcher.

    Returns:
        1 where results are wrong, else 0.

    Raises:
        CommandError: the arguments do not fit together, a package is missing, or a rank failed.
    """
    names = [*FIGURES] if arguments.figure == "all" else [arguments.figure]
    _check_packages(names, arguments)
    rank, size = launched_as() or (0, None)
    if rank == 0:
        _check_outputs(names, arguments)
    with failing_as_command(RankFailedError, NamespacesUnavailableError):
        if names == [REPORT]:
            return _report(arguments) if rank == 0 else 0
        options, skipped = _options(arguments, names, size)
        if size is None:
            return _run_figures(names, options, skipped, arguments, None)
        with LaunchedTeam(options.device) as team:
            if team.leads:
                return _run_figures(names, options, skipped, arguments, team)
            team.follow()
    return 0


def _run_figures(
    names: Sequence[str],
    options: Options,
    skipped: list[Skipped],
    arguments: argparse.Namespace,
    team: Team | None,
) -> int:
    figures: dict[str, Report] = {}
    for name in names:
        if name != "fig8" or len(names) == 1 or len(options.ranks) > 1:
            figures[name] = _run_figure(name, options, skipped, arguments.json, team)
            # What there is, should the run be interrupted.
            _write_page(figures, skipped, arguments)
    return int(any(figure.wrong for figure in figures.values()))


def _write_page(figures: dict[str, Report], skipped: list[Skipped], arguments: argparse.Namespace) -> None:
    environment = next(iter(figures.values())).environment
    commands = {name: figure.command() for name, figure in figures.items()}
    page = FiguresReport("collectives bench paper", environment, commands, skipped=skipped, figures=figures)
    write_html(page, arguments)


# ---- what is to be done --------------------------------------------------------------------------------


def _options(
    arguments: argparse.Namespace, names: Sequence[str], launched: int | None
) -> tuple[Options, list[Skipped]]:
    """Returns what is measured, with all that the user left to the program, and what cannot be."""
    options = options_from(Options, arguments)
    skipped: list[Skipped] = []
    with failing_as_command(ValueError, OSError):
        ranks = _ranks(options, launched)
        options.check_placement(ranks[-1])
        if options.images:
            load_images(options.images)
        budget_s = options.budget_s or (QUICK_BUDGET_S if options.quick else BUDGET_S)
        asked = dict.fromkeys(options.backends or BACKENDS[options.device])
        backends = usable(asked, lambda name: _why_no_backend(name, options, launched), skipped)
        models = usable(options.trained, _why_no_model, skipped)
        if "fig2" in names and not usable([options.ready_model], _why_no_model, skipped):
            models = []
    if not backends or not models:
        raise CommandError("nothing can be measured: " + "; ".join(skipped_lines(skipped)))
    named = tuple(models) if len(models) < len(options.trained) else options.models
    options = replace(options, ranks=ranks, budget_s=budget_s, backends=tuple(backends), models=named)
    return options, skipped


def _check_packages(names: Sequence[str], arguments: argparse.Namespace) -> None:
    wanted = ["scipy"] if arguments.html is not None and not {"fig11", REPORT}.isdisjoint(names) else []
    wanted += ["sklearn"] if "fig11" in names and not arguments.images else []
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"this needs {', '.join(missing)}, not installed; install the extra: {EXTRA}")


def _check_outputs(names: Sequence[str], arguments: argparse.Namespace) -> None:
    """Checks, before anything is measured, that files can be written where they are asked for."""
    if names == [REPORT] and arguments.json is None:
        raise CommandError("the report is made of kept figures; name their folder with --json DIR")
    if names != [REPORT] and arguments.page is not None:
        raise CommandError(f"--page is for the report, but {arguments.figure} is asked for")
    with failing_as_command(argparse.ArgumentTypeError):
        if names != [REPORT] and arguments.json is not None:
            output_folder(arguments.json)
        if arguments.page is not None:
            output_file(arguments.page)


def _ranks(options: Options, launched: int | None) -> tuple[int, ...]:
    if launched is not None and launched < 2:
        raise ValueError("the launcher started one process; the figures need 2 ranks or more")
    if options.ranks:
        ranks = tuple(sorted(set(options.ranks)))
    elif launched is None:
        ranks = RANKS[:1] if options.quick else RANKS
    else:
        ranks = tuple(dict.fromkeys([*(1 << k for k in range(1, launched.bit_length())), launched]))
    if launched is not None and ranks[-1] > launched:
        raise ValueError(f"--nproc asks for {ranks[-1]} ranks, but the launcher started {launched}")
    if launched is not None and options.machines > 1:
        raise ValueError("--machines plays machines on this one; a launcher has its own")
    return ranks


def _why_no_backend(name: str, options: Options, launched: int | None) -> tuple[str | None, str]:
    if name.startswith(TORCH):
        return why_no_torch(name, options.device), ""
    reason, install = why_no_group(name, options.device)
    if reason is None and "mpi" in name.split(":"):
        if launched is not None and mpi_job.current() is None:
            reason = "only mpirun can start its ranks"
        elif options.machines > 1:
            reason = "mpirun would start its ranks on one machine only"
    return reason, install


def _why_no_model(name: str) -> tuple[str | None, str]:
    check_known("model", [name], MODELS)
    package = MODELS[name].package
    return why_unavailable(package), f"{EXTRA}, or {install_command(package)}"


def cells_of(
    name: str, options: Options, folder: Path | None = None, *, launched: bool = False
) -> list[Cell]:
    """Returns the cells of a figure.

    Args:
        name: of the figure.
        options: with the numbers of ranks.
        folder: keeps figures; of figure 2 fig7 and fig8 take the bucket sizes that are enough.
        launched: whether a launcher started the ranks, which have a core each then.
    """
    figure, ranks = FIGURES[name], options.ranks
    fitting = [number for number in ranks if launched or number <= usable_cores()]
    numbers = {
        "main": (fitting or ranks[:1])[-1:], "fewest": ranks[:1], "most": ranks[-1:], "all": ranks
    }[figure.ranks]  # fmt: skip
    cells = [cell for number in numbers for cell in figure.cells(options, number)]
    optima: dict[str, float] = {}
    if name in {"fig7", "fig8"} and folder is not None and (file := folder / "fig2.json").exists():
        with failing_as_command(*UNREADABLE):
            optima = best_bucket_mb(read_figure(file).records)
    return [_with_size(cell, optima) if isinstance(cell, Iterations) else cell for cell in cells]


def _with_size(cell: Iterations, optima: dict[str, float]) -> Iterations:
    """Returns the cell with the bucket size that is enough for its backend, where that is a new one."""
    first = cell.series[0]
    size = optima.get(first.group)
    if size is None or any(abs(size - other) <= 0.1 * other for other in BUCKETS_MB):
        return cell
    more = [*cell.series, Series(f"{size:g} MB", first.group, first.wrapper, size)]
    return replace(cell, series=tuple(sorted(more, key=lambda series: series.bucket_mb or 0.0)))


def _run_figure(
    name: str, options: Options, skipped: list[Skipped], folder: Path | None, team: Team | None
) -> Report:
    """Measures what is missing of a figure and prints it; called by the leader.

    Raises:
        CommandError: what was kept of it does not fit.
        RankFailedError: a rank failed.
        NamespacesUnavailableError: there can be no network namespaces here.
    """
    cells = cells_of(name, options, folder, launched=team is not None)
    report = Report(f"paper {name}", options.environment(options.ranks), options.asked(), skipped=skipped)
    file = None if folder is None else folder / f"{name}.json"
    if file is not None and file.exists():
        report.records += _kept(file, report)
    _measure(name, cells, report, options, team, file)
    wanted = [cell.as_json() for cell in cells]
    report.records = sorted(
        (record for record in report.records if record.cell in wanted),
        key=lambda record: wanted.index(dict(record.cell)),
    )
    print("\n".join([*header_lines(report), *lines_of(report.tables()), *skipped_lines(skipped)]))
    if report.wrong:
        print(f"# {report.wrong} elements of results were WRONG")
    return report


def _measure(
    name: str, cells: Sequence[Cell], report: Report, options: Options, team: Team | None, file: Path | None
) -> None:
    """Measures the cells that are not in the report yet, and keeps each as soon as it is there."""
    kept = [record.cell for record in report.records]
    missing = [cell for cell in cells if cell.as_json() not in kept]
    if not missing:
        return
    with ExitStack() as stack:
        if team is None:
            groups = dict.fromkeys(group for cell in missing for group in cell.groups)
            needed = ["mpi" if "mpi" in group.split(":") else group for group in groups]
            size = -(-max(cell.ranks for cell in missing) // options.machines) * options.machines
            with _under_way(f"{name}: starting ranks"):
                machines = stack.enter_context(options.make_machines())
                team = stack.enter_context(options.start(serve, size, backends=needed, machines=machines))
        end = time.monotonic() + (options.budget_s or 0.0)
        for number, cell in enumerate(missing):
            share_s = max(0.0, end - time.monotonic()) / (len(missing) - number)
            at = len(cells) - len(missing) + number + 1
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
    with failing_as_command(*UNREADABLE):
        kept = read_figure(file)
        for what, mine, theirs in [
            *((key, report.environment.get(key), kept.environment.get(key)) for key in SAME),
            *((key, report.options[key], kept.options.get(key)) for key in ("machines", "link", "quick")),
        ]:
            if mine != theirs:
                raise ValueError(
                    f"{file} was measured with {what} {theirs}, but here it is {mine}; name another --json"
                )
    return kept.records


def _keep(file: Path, report: Report) -> None:
    """Writes the report in place of the file, which is whole at any time."""
    fresh = file.with_name(f".{file.name}.new")
    write_json(fresh, report.as_json(), indent=None)
    fresh.replace(file)


def _report(arguments: argparse.Namespace) -> int:
    """Prints the report on all figures that a folder keeps, or writes it to a file.

    Raises:
        CommandError: there is none, one cannot be read, or they were measured on different machines.
    """
    with failing_as_command(*UNREADABLE):
        kept = read_folder(arguments.json)
        text = report_text(kept)
        if arguments.page is None:
            print(text)
        else:
            arguments.page.write_text(text + "\n", encoding="utf-8")
        _write_page(kept, [], arguments)
    return 0
