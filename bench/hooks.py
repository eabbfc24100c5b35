"""What does each communication hook cost and save: bytes, time of an iteration, and loss after equal steps?

The hooks train the same model from the same parameters on the same data, one after the other, with one
thread on each rank. Before every iteration (zero_grad, forward, loss, backward, the optimizer's step) the
ranks leave a barrier together; the slowest rank counts.

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from collectives.bench.core.arguments import (
    add_files,
    add_machines,
    add_ranks,
    at_least,
    conclude,
    failing_as_command,
    options_from,
    parse_names,
    show_progress,
)
from collectives.bench.core.barrier import barrier_memory
from collectives.bench.core.devices import DEVICES, check_device, why_not_on
from collectives.bench.core.groups import LOCALHOST, lane_of, parent_store
from collectives.bench.core.machine import describe_machine
from collectives.bench.core.namespaces import Machines, NamespacesUnavailableError, check_machines
from collectives.bench.core.records import Skipped, Timing
from collectives.bench.training.hook_report import HookRecord, HookReport, report_lines
from collectives.bench.training.hook_worker import HOOKS, TASKS, Job, Outcome, Place, train
from collectives.bench.training.models import MODELS, install_command, why_unavailable
from collectives.ranks.processes import RankFailedError, SpawnedRanks
from collectives.secret import provided

__all__ = ["Options", "add_arguments", "measure", "run"]

STEPS = {"digits": 300, "language": 300}
"""Steps of the tasks with a meaning where the user names none, and of the others:"""
OTHER_STEPS = 10

BACKENDS = {"cpu": "host", "cuda": "nccl"}
"""The backend by device where the user names none."""

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
        backend: name of the backend; ``None`` for the first of :data:`BACKENDS` on the device.
        machines: number of network namespaces that play machines, with equal shares of the ranks; 1 for none.
        link: what each of them can send, in the units of ``tc``; ``None`` does not limit it.
        device: type of the device that models and data are on.

    Raises:
        ValueError: a name is not known, the machines do not fit the ranks or the device, there is no such
            device, the backend does not serve it, or there are too few steps.
    """

    tasks: tuple[str, ...] = ("digits", "language")
    hooks: tuple[str, ...] = tuple(HOOKS)
    ranks: int = 2
    steps: int | None = None
    backend: str | None = None
    machines: int = 1
    link: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_device(self.device)
        reason = why_not_on(self.device, lane_of(self.backend_name))
        if reason is not None:
            raise ValueError(f"{self.backend_name} {reason}")
        for what, names, known in (("task", self.tasks, TASKS), ("hook", self.hooks, HOOKS)):
            for name in names:
                if name not in known:
                    raise ValueError(f"unknown {what} {name!r}; known are {', '.join(known)}")
        check_machines(self.ranks, self.machines, self.link)
        if self.machines > 1 and self.device != "cpu":
            raise ValueError(f"machines are played for tensors on the CPU, not on {self.device}")
        if self.steps is not None and self.steps < 6:
            raise ValueError(f"steps must be 6 or more, but is {self.steps}")

    @property
    def backend_name(self) -> str:
        """The backend's name."""
        return BACKENDS[self.device] if self.backend is None else self.backend

    def job(self, task: str, hook: str) -> Job:
        """Returns what the ranks are told: compression begins early enough to be timed."""
        steps = self.steps or STEPS.get(task, OTHER_STEPS)
        exact = max(2, steps // EXACT_SHARE)
        return Job(task, hook, steps, exact, warmup=exact + 2)


def measure(options: Options, progress: Progress | None = None) -> HookReport:
    """Runs the measurement and returns its report; what cannot run here is in it as skipped.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.

    Raises:
        RankFailedError: a rank failed.
        NamespacesUnavailableError: there can be no network namespaces here.
    """
    environment = {**describe_machine(), **DEVICES[options.device].describe((options.ranks,))}
    report = HookReport("hooks", environment, asdict(options) | {"backend": options.backend_name})
    tasks = [task for task in options.tasks if not _missing(task, report.skipped)]
    if not tasks:
        return report
    with provided(), ExitStack() as stack:
        machines: Machines | None = None
        host = LOCALHOST
        namespaces: tuple[str, ...] = ()
        if options.machines > 1:
            machines = stack.enter_context(Machines(options.machines, options.link))
            host = machines.host
            namespaces = machines.namespaces_of(options.ranks)
        memory = stack.enter_context(barrier_memory(options.ranks))
        store = parent_store(host)
        stack.callback(store.close)
        place = Place(options.backend_name, memory, store.port, host, namespaces, options.device)
        processes = stack.enter_context(SpawnedRanks(options.ranks, train, (options.ranks, place)))
        for task in tasks:
            for number, hook in enumerate(options.hooks, 1):
                if progress is not None:
                    progress(f"{task}: {hook} ({number} of {len(options.hooks)})")
                job = options.job(task, hook)
                before = machines.sent_bytes(0) if machines else 0
                outcomes: list[Outcome] = processes.ask(job)
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
        backend=options.backend_name,
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
    parser.add_argument(
        "--device",
        choices=tuple(DEVICES),
        default="cpu",
        help="where models and data are; on cuda, times are the stream's (default: %(default)s)",
    )
    parser.add_argument(
        "--backend", metavar="NAME", help=f"default: {BACKENDS['cpu']}; on cuda {BACKENDS['cuda']}"
    )
    add_machines(parser)
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where ranks differ or nothing was measured.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    options = options_from(Options, arguments, ranks="nproc")
    with failing_as_command(RankFailedError, NamespacesUnavailableError):
        report = measure(options, show_progress)
    return conclude(report, report_lines(report), lambda record: record.right, arguments)
