"""Ranks as processes of this machine that a parent gives commands and that answer them.

Commands and answers travel through a unix socket in a private directory and never through a group that is
being measured or tested. The parent either needs an answer of every rank, so that a rank that raises or dies
ends all of them (:meth:`RankProcesses.ask`, :meth:`RankProcesses.gather`), or takes what comes within a time
(:meth:`RankProcesses.collect`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import IO, Any, TextIO

import cloudpickle
from torch.distributed import DistError

from collectives.ranks.cores import starting_on

_SET_PDEATHSIG = 1

GRACE_S = 2.0
"""How long a rank that was told to end may take before it is ended, and then before it is killed."""

FOLLOWERS_S = 1.0
"""How long to wait for further ranks after one has failed: the first that tells may not be the cause."""


class RankFailedError(RuntimeError):
    """A rank raised an exception or died; the message holds the traceback of the first that failed.

    Attributes:
        rank: that rank; -1 where it is not known.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Stands for the answer of a rank that gave none.

    Attributes:
        ended: whether its process has ended; otherwise the time was over.
    """

    ended: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer of a rank that has failed.

    Attributes:
        rank: the rank; -1 where it is not known.
        when_ns: when it failed, on the clock that all ranks of a machine share.
        message: what became of it.
        error: the exception, pickled; ``None`` where it cannot be, and where there is none.
        follows: whether it may only be a consequence of another rank's failure.
    """

    rank: int
    when_ns: int
    message: str
    error: bytes | None = None
    follows: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failed:
        """Returns the answer of a rank that has raised an error."""
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:  # noqa: BLE001 - an exception may hold anything
            pickled = None
        message = f"rank {rank} failed:\n\n{''.join(traceback.format_exception(error))}"
        return cls(rank, time.monotonic_ns(), message, pickled, isinstance(error, DistError))


def connect(address: str, rank: int) -> Connection:
    """Returns a rank's connection to the parent.

    Args:
        address: path of the parent's socket.
        rank: the rank that this process is.
    """
    with socket.socket(socket.AF_UNIX) as plug:
        plug.connect(address)
        connection = Connection(plug.detach())
    connection.send(rank)
    return connection


def signal_at_end_of_parent(number: int) -> None:
    """Has the kernel send this process a signal when its parent ends, though it be stopped then."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(number), 0, 0, 0)


def commands(connection: Connection) -> Iterator[Any]:
    """Yields the parent's commands until it closes the connection; each is answered by one ``send``."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield connection.recv()


@dataclass(frozen=True, slots=True)
class _Started:
    """A process that is some ranks or starts them, and a handle that becomes readable when it ends."""

    process: subprocess.Popen[bytes]
    handle: int
    ranks: Sequence[int]
    leads_session: bool

    def reap(self) -> None:
        """Waits for its end, and ends what it has started and left behind in its session."""
        if self.process.returncode is None:
            wait([self.handle])
            if self.leads_session:
                with contextlib.suppress(
                    ProcessLookupError
                ):  # not later: the number would be free for others
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class RankProcesses(ABC):
    """Ranks ``0`` to ``size - 1`` under one parent; a context manager that leaves no process behind.

    A subclass starts the processes, each of which calls :func:`connect` with :attr:`address`.

    Args:
        size: number of ranks.

    Attributes:
        size: number of ranks.
        address: path of the parent's socket.
        grace_s: how long ranks that were told to end may take before they are ended.
    """

    grace_s = GRACE_S

    def __init__(self, size: int) -> None:
        self.size = size
        # The socket is reached by a descriptor, so that who is killed leaves no file behind.
        files = f"/proc/{os.getpid()}/fd"
        self._listener = socket.socket(socket.AF_UNIX)
        with tempfile.TemporaryDirectory(prefix="collectives-") as directory:
            inside = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                path = f"{files}/{inside}/parent"  # a long TMPDIR has no room in the address of a socket
                self._listener.bind(path)
                self._descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            finally:
                os.close(inside)
        self.address = f"{files}/{self._descriptor}"
        self._listener.listen(size)
        self._connections: dict[int, Connection] = {}
        self._processes: list[_Started] = []

    def __enter__(self) -> RankProcesses:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def _start(
        self, words: Sequence[str], ranks: Sequence[int], leads_session: bool = False, **about: Any
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # noqa: S603 - the caller's command
            words, stdin=subprocess.DEVNULL, start_new_session=leads_session, **about
        )
        self._processes.append(_Started(process, os.pidfd_open(process.pid), ranks, leads_session))
        return process

    @abstractmethod
    def _how_it_ended(self, ended: _Started) -> Failed:
        """Returns what became of a process that has ended and told nothing."""

    def _begin(self, command: Any) -> None:
        """Waits until every rank has connected, and gives each its first command.

        Raises:
            RankFailedError: a rank failed before; all are ended.
        """
        try:
            while len(self._connections) < self.size:
                ready = wait([self._listener, *(one.handle for one in self._processes)])
                self._fail([self._ended(one) for one in self._processes if one.handle in ready])
                self._listener.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    plug, _ = self._listener.accept()
                    connection = Connection(plug.detach())
                    self._connections[connection.recv()] = connection
            self.send(command)
        except BaseException:
            self.close(at_once=True)
            raise

    def ask(self, command: Any) -> list[Any]:
        """Sends a command to all ranks and returns their answers in rank order; blocks until it has all.

        Raises:
            RankFailedError: a rank failed; the others are ended before this is raised.
        """
        self.send(command)
        return self.gather()

    def send(self, command: Any) -> None:
        """Sends a command to all ranks that still run."""
        for connection in self._connections.values():
            with contextlib.suppress(BrokenPipeError):  # the rank has ended; its handle tells
                connection.send(command)

    def gather(self) -> list[Any]:
        """Returns one answer of each rank, in rank order; blocks until all have answered.

        Raises:
            RankFailedError: a rank failed; the others are ended before this is raised. Of several, the first
                is taken, or the first whose failure does not follow from that of another.
        """
        answers: dict[int, Any] = {}
        failures: list[Failed] = []
        waiting, running = dict(self._connections), list(self._processes)
        deadline: float | None = None
        while len(answers) < self.size and running:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            ready = wait([*waiting.values(), *(one.handle for one in running)], left)
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                connection = waiting.pop(rank)
                with contextlib.suppress(EOFError, ConnectionResetError):  # it has ended; its handle tells
                    answers[rank] = connection.recv()
                    if isinstance(answers[rank], Failed):
                        failures.append(answers[rank])
            told = {failed.rank for failed in failures}
            for ended in [one for one in running if one.handle in ready and len(answers) < self.size]:
                if any(waiting[rank].poll() for rank in ended.ranks if rank in waiting):
                    continue  # what it has told last is read first
                running.remove(ended)
                if not told.intersection(ended.ranks) and not answers.keys() >= set(ended.ranks):
                    failures.append(self._ended(ended))
            if failures and deadline is None:
                deadline = time.monotonic() + FOLLOWERS_S
        self._fail(failures)
        return [answers[rank] for rank in range(self.size)]

    def collect(self, timeout_s: float) -> list[Any]:
        """Returns what each rank answers within ``timeout_s`` seconds, in rank order; ends no rank.

        That of a rank that ends or is late is an :class:`Unanswered`. After a late one the ranks can only be
        closed: its answer would count as that to the next command.
        """
        answers: list[Any] = [Unanswered(ended=False)] * self.size
        waiting: dict[Any, int] = {connection: rank for rank, connection in self._connections.items()}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait([*waiting], max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answer = connection.recv()  # type: ignore[union-attr, call-arg]
                except (EOFError, ConnectionResetError):
                    answer = Unanswered(ended=True)
                answers[rank] = Unanswered(ended=True) if isinstance(answer, Failed) else answer
        return answers

    def _ended(self, ended: _Started) -> Failed:
        """Returns what became of a process that has ended: what its ranks have told last, or its status."""
        ended.reap()
        for connection in [self._connections[rank] for rank in ended.ranks if rank in self._connections]:
            with contextlib.suppress(EOFError, ConnectionResetError):
                while connection.poll():
                    if isinstance(told := connection.recv(), Failed):
                        return told
        return self._how_it_ended(ended)

    def _fail(self, failures: Sequence[Failed]) -> None:
        """Ends the ranks and raises for the first of these, if there are any."""
        if not failures:
            return
        self._stop(0.0)
        first = min(failures, key=lambda failed: (failed.follows, failed.when_ns))
        error = None
        if first.error is not None:
            with contextlib.suppress(Exception):  # its class may exist on the ranks only
                error = pickle.loads(first.error)
        raise RankFailedError(first.message, first.rank) from error

    def _stop(self, grace_s: float) -> None:
        """Waits ``grace_s`` seconds for the processes to end, then ends those that remain."""
        for number, seconds in ((None, grace_s), (signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
            end = None if seconds is None else time.monotonic() + seconds
            alive = [one.handle for one in self._processes if not wait([one.handle], 0)]
            for handle in alive:
                if number is not None:
                    signal.pidfd_send_signal(handle, number)
            for handle in alive:
                wait([handle], None if end is None else max(0.0, end - time.monotonic()))
        for one in self._processes:
            one.reap()

    def close(self, *, at_once: bool = False) -> None:
        """Ends the ranks; they see that and have a moment to leave by themselves; idempotent.

        Args:
            at_once: gives them no time.
        """
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._listener.close()
        self._stop(0.0 if at_once else self.grace_s)
        for one in self._processes:
            os.close(one.handle)
        self._processes.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SpawnedRanks(RankProcesses):
    """Ranks that are interpreters of their own.

    Each runs ``body(rank, connection, *args)``, then waits for the parent to close. A rank whose parent is
    gone is killed.

    Args:
        size: number of ranks.
        body: what each runs; it and its arguments travel by ``cloudpickle``.
        args: its further arguments.
        environment: of all ranks; ``None`` for that of this process.
        labelled: whether what they print appears here line by line, behind ``[rank N]``.
        cores: those that each rank may run on; ``None`` for all that this process may.
    """

    def __init__(
        self,
        size: int,
        body: Callable[..., None],
        args: tuple[Any, ...] = (),
        *,
        environment: Mapping[str, str] | None = None,
        labelled: bool = False,
        cores: Sequence[Collection[int]] | None = None,
    ) -> None:
        work = work_of(body, args)
        super().__init__(size)
        self._readers: list[threading.Thread] = []
        pipe = subprocess.PIPE if labelled else None
        words = [sys.executable, "-m", "collectives.ranks.launched", self.address]
        try:
            for rank in range(size):
                # a session of its own: Ctrl-C is for the parent, which ends the ranks
                with starting_on(None if cores is None else cores[rank]):
                    process = self._start(
                        [*words, str(rank)], [rank], True, env=environment, stdout=pipe, stderr=pipe
                    )
                for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    if source is not None:
                        about = source, target, f"[rank {rank}] "
                        self._readers.append(threading.Thread(target=_pass_on, args=about, daemon=True))
                        self._readers[-1].start()
        except BaseException:
            self.close(at_once=True)
            raise
        self._begin(work)

    def _how_it_ended(self, ended: _Started) -> Failed:
        (rank,), code = ended.ranks, ended.process.returncode
        names = {int(one): one.name for one in signal.Signals}  # not all of the real-time ones
        killed = f"was killed by {names.get(-code, f'signal {-code}')}"
        how = killed if code < 0 else f"exited with status {code}"
        return Failed(rank, time.monotonic_ns(), f"rank {rank} {how} before the function returned")

    def close(self, *, at_once: bool = False) -> None:
        """Ends the ranks, and passes on what they have printed."""
        super().close(at_once=at_once)
        for reader in self._readers:
            reader.join(GRACE_S)  # a process that a rank has left behind may hold the pipe
        self._readers.clear()


def _pass_on(source: IO[bytes], target: TextIO, prefix: str) -> None:
    """Writes the lines of a rank's output until it ends."""
    with source:
        for line in source:
            text = line.decode(errors="replace")
            target.write(f"{prefix}{text}" if text.endswith("\n") else f"{prefix}{text}\n")
            target.flush()


class CommandRanks(RankProcesses):
    """Ranks that one command starts, as ``mpirun`` does; each calls :func:`connect`.

    Args:
        size: number of ranks.
        command: the command; the address of the parent becomes its last word.
        environment: its environment.
        first: the first command to every rank.

    Raises:
        RankFailedError: the command ended before all ranks had connected.
    """

    grace_s = 20.0
    """Ranks of MPICH that are ended while they are in ``MPI_Finalize`` leave their memory in ``/dev/shm``."""

    def __init__(
        self, size: int, command: Sequence[str], environment: Mapping[str, str], first: object
    ) -> None:
        super().__init__(size)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._name = command[0]
        words = [*command, self.address]
        try:
            self._start(words, range(size), env=environment, stdout=self._output, stderr=subprocess.STDOUT)
        except BaseException:
            self.close(at_once=True)
            raise
        self._begin(first)

    def _how_it_ended(self, ended: _Started) -> Failed:
        self._output.seek(0)
        how = f"ended with status {ended.process.returncode} before its work was done"
        output = self._output.read().decode(errors="replace")
        return Failed(-1, time.monotonic_ns(), f"{self._name} {how}:\n\n{output}")

    def close(self, *, at_once: bool = False) -> None:
        """Ends the ranks and the command."""
        super().close(at_once=at_once)
        self._output.close()


def work_of(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[list[str], bytes]:
    """Returns what another interpreter needs to call a function: its search path, and function and arguments.

    A function is pickled as a whole where that would not find its module, as a test's.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    name = "__main__" if module is None else module.__name__
    if name == "__main__" or name in cloudpickle.list_registry_pickle_by_value() or _can_be_found(name):
        return sys.path, cloudpickle.dumps((function, args))
    cloudpickle.register_pickle_by_value(module)
    try:
        return sys.path, cloudpickle.dumps((function, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
