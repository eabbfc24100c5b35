"""What ranks run for a row, as programs of their own of which the end counts.

Each is an interpreter that runs one body, answers into a file, and exits as a user's program does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch._C import _distributed_c10d as c10d

from collectives import ProcessGroup
from collectives.bench.acceptance.platform import Platform
from collectives.bench.acceptance.report import CheckFailedError
from collectives.bench.core.ranks import parent_store
from collectives.errors import DistError

_POLL_S = 0.02
_TAIL = 2000
"""Characters of the output that are kept."""


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        status: its exit status, negative for a signal; ``None`` where it did not end by itself.
        answer: its answer; ``None`` where it gave none.
        exit_seconds: from its answer to its end.
        output: the end of what it printed.
    """

    status: int | None
    answer: Mapping[str, Any] | None
    exit_seconds: float
    output: str


def write_answer(folder: str, rank: int, values: Mapping[str, Any]) -> None:
    """Leaves a rank's answer for the parent; the last one counts."""
    new = Path(folder, f"{rank}.new")
    new.write_text(json.dumps({"values": values, "at": time.monotonic()}), encoding="utf-8")
    new.replace(Path(folder, f"{rank}.json"))


def run_ranks(
    platform: str,
    body: str,
    size: int,
    limit_s: float,
    *,
    environment: Mapping[str, str],
    without: Collection[int] = (),
) -> list[RankEnd]:
    """Runs a body on every rank; blocks until they have ended, and leaves no process.

    Args:
        platform: name of the platform's module.
        body: name of one of the cases.
        size: number of ranks.
        limit_s: seconds after which those that still run are killed.
        environment: what to add to theirs.
        without: ranks that are not waited for.
    """
    store = parent_store()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-accept-"))
        command = [sys.executable, "-m", "collectives.bench.acceptance", platform, body]
        processes, outputs = [], []
        for rank in range(size):
            outputs.append(stack.enter_context(Path(folder, f"{rank}.output").open("w+b")))
            process = subprocess.Popen(
                [*command, str(rank), str(size), str(store.port), folder],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=outputs[rank],
                stderr=subprocess.STDOUT,
            )
            stack.callback(_kill, process)
            processes.append(process)
        ended = _wait_for([one for rank, one in enumerate(processes) if rank not in without], limit_s)
        statuses = [process.poll() for process in processes]
        for process in processes:
            _kill(process)
        ends = []
        for rank, process in enumerate(processes):
            answer, seconds = None, 0.0
            with suppress(FileNotFoundError):
                told = json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8"))
                answer, seconds = told["values"], ended.get(process.pid, time.monotonic()) - told["at"]
            outputs[rank].seek(0)
            text = outputs[rank].read().decode(errors="replace")[-_TAIL:]
            ends.append(RankEnd(statuses[rank], answer, seconds, text))
        return ends


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _wait_for(processes: list[subprocess.Popen[bytes]], limit_s: float) -> dict[int, float]:
    """Waits for processes; returns when each ended, by its number."""
    deadline = time.monotonic() + limit_s
    ended: dict[int, float] = {}
    while len(ended) < len(processes) and time.monotonic() < deadline:
        for process in processes:
            if process.pid not in ended and process.poll() is not None:
                ended[process.pid] = time.monotonic()
        time.sleep(_POLL_S)
    return ended


class Context:
    """A rank of a check.

    Args:
        platform: where the tensors are.
        rank: this rank.
        size: number of ranks.
        store: shared by the ranks.
        folder: where answers go.

    Attributes:
        platform: where the tensors are.
        rank: this rank.
        size: number of ranks.
        last: whether this is the rank that something happens to.
        kept: what lives as long as the process.
    """

    def __init__(self, platform: Platform, rank: int, size: int, store: Any, folder: str) -> None:
        self.platform = platform
        self.rank = rank
        self.size = size
        self.last = rank == size - 1
        self.kept: list[object] = []
        self._store = store
        self._folder = folder

    def group(self, limit_s: float = 30.0, name: str = "accepted") -> ProcessGroup:
        """Returns a new group; called by all ranks, which give each of their groups another name."""
        store = c10d.PrefixStore(name, self._store)
        return self.platform.make_group(store, self.rank, self.size, timedelta(seconds=limit_s), name)

    def connected(self, limit_s: float = 30.0, name: str = "accepted") -> ProcessGroup:
        """Returns a new group whose ranks have reduced a tensor."""
        group = self.group(limit_s, name)
        group.allreduce(self.ones(1)).wait()
        group.barrier().wait()
        return group

    def ones(self, count: int) -> torch.Tensor:
        """Returns a tensor on the device."""
        return self.full(count, 1.0)

    def full(self, count: int, value: float) -> torch.Tensor:
        """Returns a tensor of equal values on the device."""
        return torch.full((count,), value, device=self.platform.kind)

    def meet(self, name: str) -> None:
        """Waits for all ranks without communication; each name is used once."""
        self._store.set(f"{name}/{self.rank}", "here")
        self._store.wait([f"{name}/{rank}" for rank in range(self.size)])

    def tell(self, name: str) -> None:
        """Lets :meth:`hear` return on other ranks."""
        self._store.set(name, "told")

    def hear(self, name: str) -> None:
        """Waits until a rank has told."""
        self._store.wait([name])

    def answer(self, **values: Any) -> None:
        """Leaves plain values for the parent."""
        write_answer(self._folder, self.rank, values)

    def answer_error_of(self, call: Callable[[], object]) -> None:
        """Answers with the error that a call raises, and how long that took."""
        began = time.monotonic()
        try:
            call()
        except DistError as error:
            seconds = time.monotonic() - began
            self.answer(error=type(error).__name__, said=str(error), seconds=seconds)
        else:
            self.answer(error=None, said="", seconds=time.monotonic() - began)


_EXIT_WITHIN_S: Final = 30.0

Judge = Callable[[Sequence[RankEnd]], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """What is run for a row.

    Attributes:
        title: what happens, in words.
        body: what each rank runs.
        judge: returns figures of how the ranks ended, or raises ``CheckFailedError``.
        leaves: whether the last rank may never end by itself.
    """

    title: str
    body: Callable[[Context], None]
    judge: Judge
    leaves: bool = False


def case(
    cases: dict[str, Case], title: str, judge: Judge, *, leaves: bool = False
) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """Returns a decorator that adds a body to some cases by its name; arguments as of :class:`Case`."""

    def add(body: Callable[[Context], None]) -> Callable[[Context], None]:
        cases[body.__name__.removeprefix("_")] = Case(title, body, judge, leaves)
        return body

    return add


def answers_of(ends: Sequence[RankEnd], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the answers of ranks that must have answered and exited with status 0, in time.

    Args:
        ends: how all ranks ended.
        ranks: those that are meant.

    Raises:
        CheckFailedError: one has not.
    """
    answers = []
    for rank in ranks:
        end = ends[rank]
        if end.status != 0 or end.answer is None:
            how = "had to be killed" if end.status is None else f"ended with status {end.status}"
            raise CheckFailedError(f"rank {rank} {how}; it said: {end.output.strip() or 'nothing'}")
        exits_in_time(rank, end)
        answers.append(dict(end.answer))
    return answers


def right_values(ends: Sequence[RankEnd]) -> Mapping[str, Any]:
    """Returns the number of ranks, each of which must have answered with what was wanted.

    Raises:
        CheckFailedError: one has not.
    """
    for rank, answer in enumerate(answers_of(ends, range(len(ends)))):
        if answer["found"] != answer["wanted"]:
            raise CheckFailedError(f"rank {rank} has {answer['found']} instead of {answer['wanted']}")
    return {"ranks": len(ends)}


def exits_in_time(rank: int, end: RankEnd) -> None:
    """Checks how long a rank took to exit.

    Raises:
        CheckFailedError: too long.
    """
    if end.exit_seconds > _EXIT_WITHIN_S:
        raise CheckFailedError(f"rank {rank} took {end.exit_seconds:.1f} s to exit")
