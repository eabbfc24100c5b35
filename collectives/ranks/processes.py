"""Ranks as processes of this machine that a parent gives commands and that answer them.

Commands and answers travel through a unix socket in a private directory and never through a group that is
being measured or tested. The parent either needs an answer of every rank, so that a rank that raises or dies
ends all of them (:meth:`RankProcesses.ask`, :meth:`RankProcesses.gather`), or takes what comes within a time
(:meth:`RankProcesses.collect`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.multiprocessing.spawn import ProcessContext, start_processes

__all__ = [
    "CommandRanks",
    "NoAnswer",
    "RankFailedError",
    "RankProcesses",
    "SpawnedRanks",
    "commands",
    "connect",
    "run_body",
    "signal_at_end_of_parent",
]

_SET_PDEATHSIG = 1

GRACE_S = 2.0
"""How long a rank that was told to end may take before it is killed."""


class RankFailedError(RuntimeError):
    """A rank raised an exception or died; the message holds the traceback of the first that failed.

    Attributes:
        rank: that rank; -1 where it is not known.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Stands for the answer of a rank that gave none.

    Attributes:
        ended: whether its process has ended; otherwise the time was over.
    """

    ended: bool


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


class RankProcesses(ABC):
    """Ranks ``0`` to ``size - 1`` under one parent; a context manager that leaves no process behind.

    A subclass starts the processes, each of which calls :func:`connect` with :attr:`address`, and ends them.

    Args:
        size: number of ranks.

    Attributes:
        size: number of ranks.
        address: path of the parent's socket.
    """

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

    def __enter__(self) -> RankProcesses:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    @abstractmethod
    def _sentinels(self) -> Sequence[int]:
        """Returns handles, each of which becomes readable when a process ends."""

    @abstractmethod
    def _failure(self, ended: AbstractSet[object]) -> RankFailedError:
        """Returns what went wrong, given the handles of the processes that have ended."""

    @abstractmethod
    def _stop(self, grace_s: float) -> None:
        """Waits ``grace_s`` seconds for the processes to end, then ends those that remain."""

    def gather_connections(self) -> None:
        """Waits until every rank has connected.

        Raises:
            RankFailedError: a rank failed before.
        """
        while len(self._connections) < self.size:
            self._check(wait([self._listener, *self._sentinels()]))
            self._listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                plug, _ = self._listener.accept()
                connection = Connection(plug.detach())
                self._connections[connection.recv()] = connection

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
            with contextlib.suppress(BrokenPipeError):  # the rank has ended; its sentinel tells
                connection.send(command)

    def gather(self) -> list[Any]:
        """Returns one answer of each rank, in rank order; blocks until all have answered.

        Raises:
            RankFailedError: a rank failed; the others are ended before this is raised.
        """
        answers: dict[int, Any] = {}
        waiting = {connection: rank for rank, connection in self._connections.items()}
        while waiting:
            ready = wait([*waiting, *self._sentinels()])
            for connection in [connection for connection in waiting if connection in ready]:
                rank = waiting.pop(connection)
                with contextlib.suppress(EOFError, ConnectionResetError):  # it has ended; its sentinel tells
                    answers[rank] = connection.recv()
            if waiting or len(answers) < self.size:
                self._check(ready)
        while len(answers) < self.size:
            self._check(wait(self._sentinels()))
        return [answers[rank] for rank in range(self.size)]

    def collect(self, timeout_s: float) -> list[Any]:
        """Returns what each rank answers within ``timeout_s`` seconds, in rank order; ends no rank.

        The answer of a rank that ends or is late is a :class:`NoAnswer`. After a late one the ranks can only
        be closed: its answer would count as that to the next command.
        """
        answers: list[Any] = [NoAnswer(ended=False)] * self.size
        waiting: dict[Any, int] = {connection: rank for rank, connection in self._connections.items()}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait([*waiting], max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr, call-arg]
                except (EOFError, ConnectionResetError):
                    answers[rank] = NoAnswer(ended=True)
        return answers

    def _check(self, ready: Sequence[object]) -> None:
        """Raises when a process has ended among the handles in ``ready``, after it has ended all others."""
        ended = set(ready) & set(self._sentinels())
        if ended:
            error = self._failure(ended)
            self._stop(0.0)
            raise error

    def close(self, *, at_once: bool = False) -> None:
        """Ends the ranks; they see that and have a moment to leave by themselves; idempotent.

        Args:
            at_once: gives them no time.
        """
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._listener.close()
        self._stop(0.0 if at_once else GRACE_S)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SpawnedRanks(RankProcesses):
    """Ranks started by ``torch.multiprocessing``.

    Each runs ``body(rank, connection, *args)``, then waits for the parent to close. A rank whose parent is
    gone is killed.

    Args:
        size: number of ranks.
        body: function at the top level of a module.
        args: its further arguments; pickled.
    """

    def __init__(self, size: int, body: Callable[..., None], args: tuple[Any, ...] = ()) -> None:
        super().__init__(size)
        self._context: ProcessContext = start_processes(  # type: ignore[no-untyped-call]
            _spawned,
            (self.address, body, args),
            nprocs=size,
            join=False,
            daemon=True,
            start_method="spawn",
        )
        try:
            self.gather_connections()
        except BaseException:
            self.close(at_once=True)
            raise

    def _sentinels(self) -> Sequence[int]:
        return [process.sentinel for process in self._context.processes]

    def _failure(self, ended: AbstractSet[object]) -> RankFailedError:
        for process in self._context.processes:
            if process.sentinel in ended:
                process.join()  # its handle tells a moment before its status can be had
        failed = [
            (Path(file).stat().st_mtime_ns, rank)
            for rank, file in enumerate(self._context.error_files)
            if Path(file).exists()
        ]
        if failed:  # the first is the cause: others fail because it has gone
            rank = min(failed)[1]
            with Path(self._context.error_files[rank]).open("rb") as file:
                return RankFailedError(f"rank {rank} failed:\n\n{pickle.load(file)}", rank)
        for rank, process in enumerate(self._context.processes):
            code = process.exitcode
            if code is not None:
                how = (
                    f"was killed by {signal.Signals(-code).name}"
                    if code < 0
                    else f"exited with status {code}"
                )
                return RankFailedError(f"rank {rank} {how} before its work was done", rank)
        raise AssertionError("a process has ended, but none has an exit status")

    def _stop(self, grace_s: float) -> None:
        processes = self._context.processes
        for end_it, seconds in ((None, grace_s), ("terminate", GRACE_S), ("kill", GRACE_S)):
            alive = [process for process in processes if process.is_alive()]
            for process in alive:
                if end_it is not None:
                    getattr(process, end_it)()
            end = time.monotonic() + seconds
            for process in alive:
                process.join(max(0.0, end - time.monotonic()))

    def close(self, *, at_once: bool = False) -> None:
        """Ends the ranks and removes the files that carried tracebacks."""
        super().close(at_once=at_once)
        for file in self._context.error_files:
            Path(file).unlink(missing_ok=True)


class CommandRanks(RankProcesses):
    """Ranks that one command starts, such as ``mpirun``; each calls :func:`connect`.

    Args:
        size: number of ranks.
        command: the command; the address of the parent becomes its last word.
        environment: its environment.
        args: sent to every rank first.

    Raises:
        RankFailedError: the command ended before all ranks had connected.
    """

    def __init__(
        self, size: int, command: Sequence[str], environment: Mapping[str, str], args: tuple[Any, ...]
    ) -> None:
        super().__init__(size)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._name = command[0]
        self._process = subprocess.Popen(  # noqa: S603 - the caller's command
            [*command, self.address],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self._handle = os.pidfd_open(self._process.pid)
        try:
            self.gather_connections()
            for connection in self._connections.values():
                connection.send(args)
        except BaseException:
            self.close(at_once=True)
            raise

    def _sentinels(self) -> Sequence[int]:
        return [self._handle]

    def _failure(self, ended: AbstractSet[object]) -> RankFailedError:  # noqa: ARG002
        status = self._process.wait()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")
        return RankFailedError(
            f"{self._name} ended with status {status} before its work was done:\n\n{output}", -1
        )

    def _stop(self, grace_s: float) -> None:
        for end_it, seconds in (
            (None, grace_s),
            (self._process.terminate, GRACE_S),
            (self._process.kill, None),
        ):
            if end_it is not None:
                end_it()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                return

    def close(self, *, at_once: bool = False) -> None:
        """Ends the ranks and the command."""
        super().close(at_once=at_once)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._output.close()


def run_body(rank: int, connection: Connection, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Runs ``body(rank, connection, *args)`` and waits for the parent to close: an earlier end is a failure.

    Raises:
        RuntimeError: the parent gives another command after the body has returned.
    """
    body(rank, connection, *args)
    for command in commands(connection):
        raise RuntimeError(f"rank {rank} has done its work, but was given another command: {command!r}")


def _spawned(rank: int, address: str, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    signal_at_end_of_parent(signal.SIGKILL)  # torch's is one that a stopped process does not get
    with connect(address, rank) as connection:
        run_body(rank, connection, body, args)
