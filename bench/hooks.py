"""What does each communication hook cost and save: bytes, time of an iteration, and loss after equal steps?

Each hook trains the same model from the same beginning on the same data, one after the other, on ranks that
stay for the whole run; one thread on each rank. The ranks leave a barrier of the bench's own together before
every iteration (zero_grad, forward, loss, backward, the optimizer's step), and the slowest rank's time
counts.

Tasks with a meaning: ``digits`` (a small convolutional network on real images, SGD with momentum) and
``language`` (a transformer on texts of a Markov chain, Adam; needs transformers). For the times of models of
the field, on random data: the names of ``collectives bench ddp``.

With ``--machines`` each rank is on a network of its own, joined by a link of the speed ``--link``.

- *sent*: what a rank sends in an iteration, counted from its messages as the best algorithms send them;
- *link*: what a machine's interface has sent in an iteration, headers and warm-up included;
- *loss*: mean of the last tenth of the steps over all ranks; *acc*: on held-out images.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from collectives.bench.core.arguments import (
    add_json,
    add_ranks,
    at_least,
    conclude,
    failing_as_command,
    parse_names,
    show_progress,
)
from collectives.bench.core.barrier import create_barrier_memory
from collectives.bench.core.groups import LOCALHOST, parent_store
from collectives.bench.core.machine import describe_machine
from collectives.bench.core.namespaces import Machines, NamespacesUnavailableError, burst_bytes
from collectives.bench.core.records import BaseReport, Skipped, Timing
from collectives.bench.core.text import skipped_lines
from collectives.bench.training.hook_worker import HOOKS, TASKS, Job, Outcome, Place, train
from collectives.bench.training.models import MODELS, install_command, why_unavailable
from collectives.ranks.processes import RankFailedError, SpawnedRanks
from collectives.registry.backends import backend_spec

__all__ = ["HookRecord", "HookReport", "Options", "add_arguments", "measure", "report_lines", "run"]

BASELINE = "none"
"""The hook that others are compared with: none, which is plain averaging."""

STEPS = {"digits": 300, "language": 300}
"""Steps of the tasks with a meaning where the user names none, and of the others:"""
OTHER_STEPS = 10

EXACT_SHARE = 10
"""Part of the steps that hooks with a state average exactly at first: one in so many, and two at least."""

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        tasks: names of tasks.
        hooks: names of hooks; the first one that is ``none`` is what others are compared with.
        ranks: number of ranks.
        steps: optimizer steps; ``None`` for 300 of the tasks with a meaning and 10 of others.
        backend: name of the backend.
        machines: number of network namespaces that play machines, with equal shares of the ranks; 1 for none.
        link: what each of them can send, in the units of ``tc``; ``None`` does not limit it.

    Raises:
        ValueError: a name is not known, the machines do not fit the ranks, or there are too few steps.
    """

    tasks: tuple[str, ...] = ("digits", "language")
    hooks: tuple[str, ...] = tuple(HOOKS)
    ranks: int = 2
    steps: int | None = None
    backend: str = "host"
    machines: int = 1
    link: str | None = None

    def __post_init__(self) -> None:
        backend_spec(self.backend)
        for what, names, known in (("task", self.tasks, TASKS), ("hook", self.hooks, HOOKS)):
            for name in names:
                if name not in known:
                    raise ValueError(f"unknown {what} {name!r}; known are {', '.join(known)}")
        if self.ranks % self.machines:
            raise ValueError(f"{self.ranks} ranks cannot be shared equally among {self.machines} machines")
        if self.link is not None and self.machines == 1:
            raise ValueError("a link joins machines; name a number of them with --machines")
        if self.link is not None:
            burst_bytes(self.link)  # refuses what is no rate
        if self.steps is not None and self.steps < 6:
            raise ValueError(f"steps must be 6 or more, but is {self.steps}")

    def job(self, task: str, hook: str) -> Job:
        """Returns what the ranks are told: compression begins early enough to be timed."""
        steps = self.steps or STEPS.get(task, OTHER_STEPS)
        exact = max(2, steps // EXACT_SHARE)
        return Job(task, hook, steps, exact, warmup=exact + 2)


@dataclass(frozen=True, slots=True)
class HookRecord:
    """One hook with one task.

    Attributes:
        task: name of the task.
        hook: name of the hook.
        backend: name of the backend.
        ranks: number of ranks.
        parameters: number of trained parameters.
        steps: optimizer steps.
        iteration: those after the warm-up.
        sent_bytes: what a rank sends in one of them.
        link_bytes: what a machine sends in an iteration, over all steps; ``None`` without machines.
        first_loss: mean over the ranks at the first step.
        final_loss: mean over the ranks in the last tenth of the steps.
        accuracy: part of the held-out samples that the model reads right; ``None`` where there are none.
        ranks_identical: whether all ranks ended with bitwise the same parameters.
    """

    task: str
    hook: str
    backend: str
    ranks: int
    parameters: int
    steps: int
    iteration: Timing
    sent_bytes: float
    link_bytes: float | None
    first_loss: float
    final_loss: float
    accuracy: float | None
    ranks_identical: bool

    @property
    def right(self) -> bool:
        """Whether the ranks stayed together, as they must with a hook that communicates."""
        return self.ranks_identical or self.hook == "noop" or self.ranks == 1


class HookReport(BaseReport[HookRecord]):
    """All that the program found out."""

    def record_as_json(self, record: HookRecord) -> dict[str, Any]:
        """Returns a record as plain values, with its ratio."""
        return {**asdict(record), "time_over_none": self.time_ratio(record)}

    def time_ratio(self, record: HookRecord) -> float | None:
        """Returns a record's iteration over that without a hook; ``None`` where that is missing."""
        for other in self.records:
            if (other.task, other.hook) == (record.task, BASELINE):
                return record.iteration.median_us / other.iteration.median_us
        return None


def measure(options: Options, progress: Progress | None = None) -> HookReport:
    """Runs the measurement and returns its report; what cannot run here is in it as skipped.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.

    Raises:
        RankFailedError: a rank failed.
        NamespacesUnavailableError: there can be no network namespaces here.
    """
    report = HookReport("hooks", describe_machine(), asdict(options))
    tasks = [task for task in options.tasks if not _missing(task, report.skipped)]
    if not tasks:
        return report
    with ExitStack() as stack:
        machines: Machines | None = None
        host = LOCALHOST
        namespaces: tuple[str, ...] = ()
        if options.machines > 1:
            machines = stack.enter_context(Machines(options.machines, options.link))
            host = machines.host
            share = options.ranks // options.machines
            namespaces = tuple(machines.namespace(rank // share) for rank in range(options.ranks))
        descriptor, board = create_barrier_memory(options.ranks)
        stack.callback(os.close, descriptor)
        store = parent_store(host)
        stack.callback(store.close)
        place = Place(options.backend, board, store.port, host, namespaces)
        team = stack.enter_context(SpawnedRanks(options.ranks, train, (options.ranks, place)))
        for task in tasks:
            for number, hook in enumerate(options.hooks, 1):
                if progress is not None:
                    progress(f"{task}: {hook} ({number} of {len(options.hooks)})")
                job = options.job(task, hook)
                before = machines.sent_bytes(0) if machines else 0
                outcomes: list[Outcome] = team.ask(job)
                link = (machines.sent_bytes(0) - before) / job.steps if machines else None
                report.records.append(_record(options, job, outcomes, link))
    return report


def _missing(task: str, skipped: list[Skipped]) -> bool:
    """Returns whether a task cannot be built, and notes why."""
    model = MODELS.get(task, MODELS["bert-mini"] if task == "language" else MODELS["small"])
    reason = why_unavailable(model)
    if reason is not None:
        skipped.append(Skipped(task, reason, install_command(model)))
    return reason is not None


def _record(options: Options, job: Job, outcomes: Sequence[Outcome], link: float | None) -> HookRecord:
    last = max(1, job.steps // EXACT_SHARE)
    finals = [loss for outcome in outcomes for loss in outcome.losses[-last:]]
    firsts = [outcome.losses[0] for outcome in outcomes]
    return HookRecord(
        task=job.task,
        hook=job.hook,
        backend=options.backend,
        ranks=options.ranks,
        parameters=outcomes[0].parameters,
        steps=job.steps,
        iteration=Timing.of([outcome.iteration_ns for outcome in outcomes]),
        sent_bytes=max(outcome.sent_bytes for outcome in outcomes) / (job.steps - job.warmup),
        link_bytes=link,
        first_loss=sum(firsts) / len(firsts),
        final_loss=sum(finals) / len(finals),
        accuracy=outcomes[0].accuracy,
        ranks_identical=len({outcome.checksum for outcome in outcomes}) == 1,
    )


_COLUMNS = (
    ("median (ms)", 12), ("p10", 9), ("p90", 9), ("/none", 8), ("sent (MB)", 11), ("link (MB)", 11),
    ("loss before", 13), ("after", 9), ("acc", 7),
)  # fmt: skip


def _times(timing: Timing) -> tuple[float, float, float]:
    return timing.median_us, timing.p10_us, timing.p90_us


def _or_dash(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def report_lines(report: HookReport) -> Iterator[str]:
    """Yields a table for each task, then what was skipped."""
    for task in dict.fromkeys(record.task for record in report.records):
        records = [record for record in report.records if record.task == task]
        first = records[0]
        yield ""
        yield (
            f"# {task}: {first.parameters / 1e6:.2f} M parameters, {first.ranks} ranks over {first.backend}, "
            f"{first.steps} steps, {first.iteration.calls} of them timed; slowest rank"
        )
        yield "#" + "hook".ljust(17) + "".join(name.rjust(width) for name, width in _COLUMNS) + "  right"
        for record in records:
            ratio = report.time_ratio(record)
            cells = [
                *(f"{us / 1e3:.2f}" for us in _times(record.iteration)),
                _or_dash(ratio, 3),
                f"{record.sent_bytes / 1e6:.3f}",
                _or_dash(None if record.link_bytes is None else record.link_bytes / 1e6, 3),
                f"{record.first_loss:.4f}",
                f"{record.final_loss:.4f}",
                _or_dash(record.accuracy, 3),
            ]
            right = "-" if record.hook == "noop" else "yes" if record.right else "NO"
            columns = zip(cells, _COLUMNS, strict=True)
            yield (
                f" {record.hook:17}"
                + "".join(cell.rjust(width) for cell, (_, width) in columns)
                + f"  {right}"
            )
    if report.skipped:
        yield ""
        yield from skipped_lines(report.skipped)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument(
        "--tasks",
        type=parse_names,
        default=("digits", "language"),
        metavar="NAME,...",
        help=f"of {', '.join(TASKS)} (default: digits,language)",
    )
    parser.add_argument(
        "--hooks",
        type=parse_names,
        default=tuple(HOOKS),
        metavar="NAME,...",
        help=f"default: {','.join(HOOKS)}",
    )
    add_ranks(parser)
    parser.add_argument(
        "--steps", type=at_least(6), metavar="N", help="optimizer steps (default: 300, or 10 on random data)"
    )
    parser.add_argument("--backend", default="host", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--machines",
        type=at_least(1),
        default=1,
        metavar="N",
        help="network namespaces that play machines, with equal shares of the ranks (needs root)",
    )
    parser.add_argument("--link", metavar="RATE", help="what each of them can send, such as 1gbit")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where ranks differ or nothing was measured.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    with failing_as_command(ValueError):
        options = Options(
            tasks=arguments.tasks,
            hooks=arguments.hooks,
            ranks=arguments.nproc,
            steps=arguments.steps,
            backend=arguments.backend,
            machines=arguments.machines,
            link=arguments.link,
        )
    with failing_as_command(RankFailedError, NamespacesUnavailableError):
        report = measure(options, show_progress)
    return conclude(report, report_lines(report), lambda record: record.right, arguments.json)
