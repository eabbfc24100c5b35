"""Processes that play ranks, and the wait for what becomes of them: results, errors, stacks."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import Any

import pytest
from rank_server import Outcome, Task

_GRACE_SECONDS = 5.0
"""How long the other ranks may still report their own errors after the first one failed."""

_END_SECONDS = 5.0
"""How long a process may take to end after it closed its connection: a core may have to be written."""

_LOG_TAIL = 6000


class RankFailedError(AssertionError):
    """A rank raised or died; the message has its traceback and what the other ranks did.

    Attributes:
        rank: the first rank that failed.
        errors: texts by rank.
    """

    def __init__(self, message: str, rank: int, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.errors = errors


class RankTimeoutError(RankFailedError):
    """The ranks did not finish in time; the message has the stacks of those that had not."""


@dataclass(frozen=True)
class Died:
    """Stands in the results for a rank of ``lost`` that did not answer.

    Attributes:
        exitcode: its exit status, or the negative number of the signal that ended it.
    """

    exitcode: int


class RankProcess:
    """A process that plays ranks, seen from here.

    Args:
        connection: where it gets tasks and answers.
        pid: its number.
        log: file with its output.
    """

    def __init__(self, connection: mp_connection.Connection, pid: int, log: Path) -> None:
        self.connection = connection
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._log = log
        self._seen = 0

    def start(self, task: Task) -> None:
        self._seen = self._log.stat().st_size
        self.connection.send_bytes(pickle.dumps(task))

    def output(self) -> str:
        """Returns what the rank wrote to stdout and stderr since its task began."""
        with self._log.open("rb") as log:
            log.seek(self._seen)
            return log.read().decode(errors="replace")[-_LOG_TAIL:]

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def has_ended(self, patience: float = 0.0) -> bool:
        """Returns whether the process has ended, or does within so many seconds."""
        ends = select.poll()  # select() takes no descriptor above 1023
        ends.register(self.pidfd, select.POLLIN)
        return bool(ends.poll(1000 * patience))

    def exit_status(self) -> int | None:
        """Returns how it ended, as in :class:`Died`; ``None`` where only another process can tell."""
        return None


class Watch:
    """Waits for the outcomes of one call."""

    def __init__(self, what: str, ranks: Sequence[RankProcess], lost: set[int]) -> None:
        self._what = what
        self._ranks = ranks
        self._lost = lost
        self._waiting = set(range(len(ranks)))
        self._results: list[Any] = [None] * len(ranks)
        self._errors: dict[int, str] = {}
        self._raised: BaseException | None = None
        self._skipped: str | None = None

    def until(self, deadline: float, timeout: float) -> list[Any]:
        """Returns the results."""
        __tracebackhide__ = True
        while self._waiting - self._lost:
            left = deadline - time.monotonic()
            if left <= 0 or not self._receive(left):
                if not self._errors:
                    self._fail_late(timeout)
                break
            if self._errors:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        for rank in self._waiting & self._lost:
            self._results[rank] = Died(0)
        self._show_output()
        if self._errors:
            self._fail()
        if self._skipped is not None:
            pytest.skip(self._skipped)
        return self._results

    def _receive(self, left: float) -> bool:
        sources: dict[Any, int] = {}
        for rank in self._waiting:
            sources[self._ranks[rank].connection] = rank
            sources[self._ranks[rank].pidfd] = rank
        ready = mp_connection.wait(list(sources), timeout=left)
        for rank in {sources[source] for source in ready}:
            self._note(rank)
        return bool(ready)

    def _note(self, rank: int) -> None:
        self._waiting.discard(rank)
        outcome = _answer(self._ranks[rank].connection)
        if outcome is None:
            if rank in self._lost:
                self._results[rank] = Died(0)
            else:
                self._errors[rank] = _how_it_ended(rank, self._ranks[rank])
            return
        self._results[rank] = outcome.value
        self._skipped = outcome.skipped or self._skipped
        if outcome.error is not None:
            if not self._errors and outcome.raised is not None:
                self._raised = _unpickled(outcome.raised)
            self._errors[rank] = outcome.error

    def _show_output(self) -> None:
        for number, rank in enumerate(self._ranks):
            text = rank.output()
            if text:
                sys.stdout.write(f"--- output of rank {number}\n{text}\n")

    def _fail(self) -> None:
        __tracebackhide__ = True
        first = next(iter(self._errors))
        stuck = f"; still running: {sorted(self._waiting)}" if self._waiting else ""
        parts = [f"{self._what}: rank {first} failed{stuck}"]
        shown: dict[str, int] = {}
        for rank, text in self._errors.items():
            same = shown.setdefault(text, rank)
            parts.append(f"--- rank {rank}\n{text if same == rank else f'the same as rank {same}'}")
        if self._waiting:
            parts += self._stacks()
        raise RankFailedError("\n".join(parts), first, self._errors) from self._raised

    def _fail_late(self, timeout: float) -> None:
        __tracebackhide__ = True
        parts = [
            f"{self._what}: ranks {sorted(self._waiting)} did not finish within {timeout:g} s",
            *self._stacks(),
        ]
        raise RankTimeoutError("\n".join(parts), min(self._waiting), {})

    def _stacks(self) -> list[str]:
        """Returns where the ranks that have not answered are."""
        for rank in self._waiting:
            with contextlib.suppress(ProcessLookupError):
                self._ranks[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        late = [(rank, self._ranks[rank]) for rank in sorted(self._waiting)]
        return [
            f"--- rank {rank} (pid {process.pid}) is here, after its output\n{process.output()}"
            for rank, process in late
        ]


def _answer(connection: mp_connection.Connection) -> Outcome | None:
    """Returns what a rank has answered; ``None`` where it never will."""
    try:
        # A process that the rank forked may keep the other end open.
        answer = connection.recv_bytes() if connection.poll() else None
    except (EOFError, ConnectionError):
        return None
    return None if answer is None else pickle.loads(answer)


def _how_it_ended(rank: int, process: RankProcess) -> str:
    """Returns the error of a rank that did not answer."""
    if process.has_ended(_END_SECONDS):
        manner = _manner(process.exit_status())
    else:
        manner = "closed its connection and still runs"
    output = process.output()
    said = f"its last output:\n{output}" if output else "it wrote no output"
    return f"the process of rank {rank} (pid {process.pid}) {manner}; {said}"


def _manner(status: int | None) -> str:
    if status is None:
        return "died"
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-status}"


def _unpickled(raised: bytes) -> BaseException | None:
    try:
        value = pickle.loads(raised)
    except Exception:  # noqa: BLE001 - its text is shown anyway
        return None
    return value if isinstance(value, BaseException) else None
