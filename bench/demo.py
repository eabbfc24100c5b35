"""Trains a network on real data over round-robin groups, then compares the all-reduce of all backends.

The data are the 1,797 handwritten digits that ship with scikit-learn; a fifth is held out for the test. Every
rank begins with other random parameters, so that the wrapper must bring them together. Two things are
checked: the test accuracy, and how far the parameters after 50 steps are from those of training on the same
batches in one process. Leaves collectives-demo.json and collectives-demo.html.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import asdict, dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import collectives
from collectives.backends.round_robin import round_robin_process_groups
from collectives.bench.allreduce import SIZES, Options, measure
from collectives.bench.core.arguments import (
    add_options,
    at_least,
    failing_as_command,
    option,
    parse_sizes_argument,
    show_progress,
)
from collectives.bench.core.devices import usable_cores
from collectives.bench.core.page import write_page
from collectives.bench.core.ranks import Placement, PlacementOptions
from collectives.bench.core.records import header_lines, report_lines, write_json
from collectives.bench.models import (
    accuracy,
    batches,
    build_model,
    flat_parameters,
    install_command,
    load_digits,
    train_digits,
)
from collectives.cli import CommandError
from collectives.cli.mpi_job import usual_ranks
from collectives.cli.output_files import output_folder
from collectives.ddp import DistributedDataParallel
from collectives.ranks.processes import RankFailedError

COMPARED_STEPS = 50
"""Steps after which parameters are compared with those of one process."""

MAX_DIFFERENCE = 1e-5
MIN_ACCURACY = 0.95

LANES = 3
"""Host groups that collectives go to in turn: the best number in the paper (VLDB 2020, section 5.4)."""

GLOBAL_BATCH = 64
"""Images in a step of all ranks together, where that is 8 or more on each."""

BUCKET_MB = 0.05
"""Small buckets, so that this small model has several in flight over the lanes."""

SWEEP_BUDGET_S = 25.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the training.

    Attributes:
        ranks: number of ranks.
        lanes: number of groups that the round-robin composition goes through.
        steps: optimizer steps.
        train_images: images trained on.
        test_images: images held out.
        test_accuracy: part of the held-out images that are read right.
        compared_steps: steps before the parameters were compared.
        max_abs_difference: largest difference of any parameter from training in one process.
        ranks_identical: whether all ranks ended with bitwise the same parameters.
        train_s: seconds that the steps took.
    """

    ranks: int
    lanes: int
    steps: int
    train_images: int
    test_images: int
    test_accuracy: float
    compared_steps: int
    max_abs_difference: float
    ranks_identical: bool
    train_s: float


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo does.

    Attributes:
        ranks: number of ranks.
        steps: optimizer steps.
        sizes: sizes of the all-reduce.
        out: where to leave the JSON file and the page.
    """

    ranks: int = option(2, "--nproc", type=at_least(1), default=usual_ranks, metavar="N")
    steps: int = option(300, "--steps", type=at_least(1), metavar="N")
    sizes: tuple[int, ...] = option(SIZES, "--sizes", type=parse_sizes_argument, metavar="SIZES")
    out: Path = option(".", "--out", type=output_folder, metavar="DIR")  # noqa: RUF009 - a field


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options to a parser."""
    add_options(parser, DemoOptions, ranks="2, or what mpirun started", out="here")


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns 0, or 1 where a check failed.

    Raises:
        CommandError: a package is missing, the sizes do not fit, or a rank failed.
    """
    _check_packages()
    begin = time.monotonic()
    with failing_as_command(ValueError):
        options = Options(ranks=(arguments.ranks,), sizes=arguments.sizes, budget_s=SWEEP_BUDGET_S)
    with failing_as_command(RankFailedError):
        outcome = train_in_parallel(arguments.ranks, arguments.steps)
        print(
            f"\nTrained {outcome.steps} steps on {outcome.train_images} images, {outcome.ranks} ranks, "
            f"{outcome.lanes} host groups in turn, {outcome.train_s:.1f} s."
        )
        for name, found, _ in checks(outcome):
            print(f"  {name:36} {found}", flush=True)
        complaints = [f"{name}: {found}" for name, found, holds in checks(outcome) if not holds]
        report = measure(options, show_progress, "demo")
    print("\n".join([*header_lines(report), *report_lines(report)]))
    wrong = sum(record.wrong_elements for record in report.records)
    if wrong:
        complaints.append(f"{wrong} elements of all-reduce results were wrong")
    if not report.records:
        complaints.append("no backend could be measured")
    left = [arguments.out / "collectives-demo.json", arguments.out / "collectives-demo.html"]
    write_json(left[0], {**report.as_json(), "training": asdict(outcome)})
    write_page(left[1], report, "collectives demo")
    print(f"\nLeft {left[0]} and {left[1]}; took {time.monotonic() - begin:.0f} s.")
    for complaint in complaints:
        print(f"collectives demo: FAILED: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def train_in_parallel(ranks: int, steps: int) -> Outcome:
    """Trains on so many ranks, trains the first steps again in this process, and returns the comparison.

    Raises:
        RankFailedError: a rank failed.
    """
    batch = max(8, GLOBAL_BATCH // ranks)
    compared = min(steps, COMPARED_STEPS)
    print(f"Training on {ranks} ranks ...", flush=True)
    # Ranks of the benches have this process's stderr, and so a terminal to show how far they are.
    with PlacementOptions().start(_train_rank, ranks, steps, batch, compared) as processes:
        results = processes.gather()
    show_progress("")
    first = results[0]
    torch.set_num_threads(usable_cores())
    difference = np.abs(first["compared"] - train_alone(ranks, batch, compared).numpy()).max()
    digits = load_digits()
    return Outcome(
        ranks=ranks,
        lanes=LANES,
        steps=steps,
        train_images=len(digits.train),
        test_images=len(digits.test),
        test_accuracy=first["accuracy"],
        compared_steps=compared,
        max_abs_difference=float(difference),
        ranks_identical=all(np.array_equal(result["final"], first["final"]) for result in results),
        train_s=max(result["train_s"] for result in results),
    )


def _train_rank(
    rank: int, connection: Connection, placement: Placement, steps: int, batch: int, compared: int
) -> None:
    """Trains on one rank, and sends what is compared."""
    placement.take(rank)
    torch.set_num_threads(max(1, usable_cores() // placement.size))
    placement.initialize(rank, "host")
    digits = load_digits()
    group = round_robin_process_groups([collectives.new_group() for _ in range(LANES)])
    model = build_model(seed=rank)
    parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB)
    result: dict[str, Any] = {}

    def after_step(step: int, loss: float) -> None:
        if step == compared:
            result["compared"] = flat_parameters(model).numpy()
        if rank == 0:
            show_progress(f"training: step {step} of {steps}, loss={loss:.3f}")

    begin = time.monotonic()
    shares = islice(batches(digits.train, batch, rank, placement.size), steps)
    train_digits(parallel, digits.train, shares, after_step)
    result["train_s"] = time.monotonic() - begin
    result["final"] = flat_parameters(model).numpy()
    result["accuracy"] = accuracy(model, digits.test)
    collectives.barrier()
    collectives.destroy_process_group()
    connection.send(result)


def train_alone(ranks: int, batch: int, steps: int) -> torch.Tensor:
    """Returns the parameters after training the ranks' shares of each step together in this process."""
    data = load_digits().train
    model = build_model(seed=0)  # as on rank 0, whose parameters all ranks begin with
    shares = [batches(data, batch, rank, ranks) for rank in range(ranks)]
    together = ([*chain(*step)] for step in islice(zip(*shares, strict=True), steps))
    train_digits(model, data, together)
    return flat_parameters(model)


def checks(outcome: Outcome) -> list[tuple[str, str, bool]]:
    """Returns what is checked of a training, what was found with what is wanted, and whether it is so."""
    accuracy_, difference = outcome.test_accuracy, outcome.max_abs_difference
    read = f"{accuracy_:.2%} of {outcome.test_images} images (must be {MIN_ACCURACY:.0%} or more)"
    steps = f"{outcome.compared_steps} steps (at most {MAX_DIFFERENCE:.0e} is rounding)"
    same = "bitwise the same" if outcome.ranks_identical else "DIFFERENT"
    return [
        ("test accuracy", read, accuracy_ >= MIN_ACCURACY),
        ("difference from one process", f"{difference:.2e} after {steps}", difference <= MAX_DIFFERENCE),
        ("parameters on all ranks", same, outcome.ranks_identical),
    ]


def _check_packages() -> None:
    """Raises unless the packages of the extra ``demo`` are installed."""
    modules = {"scikit-learn": "sklearn", "plotly": "plotly"}
    missing = [name for name, module in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(
            f"the demo needs {', '.join(missing)}, not installed; install with: {install_command(*missing)}"
        )
