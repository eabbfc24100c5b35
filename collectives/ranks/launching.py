"""A function on several ranks of this machine, from a script, a test or a notebook.

Not here: programs (``torchrun``), and ranks on several machines.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import IO, Any, NoReturn, TextIO, TypeVar

import cloudpickle
import torch.distributed as torch_distributed

from collectives.ranks.processes import GRACE_S, RankFailedError, RankProcesses

__all__ = ["Ranks", "launch"]

_T = TypeVar("_T")

FOLLOWERS_S = 1.0
"""How long to wait for further ranks after one has failed: the first that tells may not be the cause."""


def launch(
    function: Callable[..., _T],
    args: Sequence[Any] = (),
    nproc: int = 2,
    *,
    environment: Mapping[str, str] | None = None,
) -> list[_T]:
    """Runs a function on several ranks, each a new process of this machine, and returns what they return.

    The function need not be importable: one of a notebook, of a script without ``if __name__ ==
    "__main__"``, or within another one will do. It finds the variables that ``torchrun`` sets (``RANK``,
    ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and so on), so that ``init_process_group()`` of this
    package and of torch need no arguments. ``OMP_NUM_THREADS`` is 1 where it is not set, as under
    ``torchrun``. Groups that it leaves are destroyed. What ranks print appears here line by line, behind
    ``[rank N]``.

    Blocks until all ranks have ended. None outlives the call, nor a caller that is killed; nor do processes
    that a rank has started, unless they have a session of their own.

    Args:
        function: what each rank calls. It, its arguments and what it returns travel by ``cloudpickle``; a
            tensor is copied.
        args: its arguments, the same on all ranks.
        nproc: number of ranks.
        environment: further environment variables of the ranks.

    Returns:
        What the function returned, by rank.

    Raises:
        ValueError: ``nproc`` is less than 1.
        RankFailedError: the function raised an exception on a rank, or a rank died; the others are ended.
            The message holds that rank's traceback, ``rank`` its number, ``__cause__`` the exception where
            it can be pickled. Of several ranks the first is taken, or the first whose exception is no
            ``DistError``: those follow from the failure of another rank.

    Example:
        In a script::

            def total(n):
                collectives.init_process_group("host")
                tensor = torch.tensor(n + collectives.get_rank())
                collectives.all_reduce(tensor)
                collectives.destroy_process_group()
                return tensor.item()

            assert collectives.launch(total, (10,), nproc=2) == [21, 21]
    """
    with Ranks(nproc, environment=environment) as ranks:
        return ranks.run(function, *args)


class Ranks:
    """Ranks of this machine that run one function after the other; a context manager.

    They start when they are first needed, and anew after one has failed, so that the interpreters and what
    they have imported serve many functions. Each function finds a rendezvous of its own and makes its own
    process groups; those that it leaves are destroyed.

    Args:
        nproc: number of ranks.
        environment: as of :func:`launch`.

    Raises:
        ValueError: ``nproc`` is less than 1.
    """

    def __init__(self, nproc: int = 2, *, environment: Mapping[str, str] | None = None) -> None:
        if nproc < 1:
            raise ValueError(f"nproc must be at least 1, but is {nproc}")
        self._size = nproc
        self._environment = {
            **_ADDED,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            **(environment or {}),
        }
        self._processes: _LaunchedRanks | None = None

    def __enter__(self) -> Ranks:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def run(self, function: Callable[..., _T], *args: Any) -> list[_T]:
        """Runs a function on all ranks; blocks until it has returned on all.

        Args:
            function: as of :func:`launch`.
            args: its arguments.

        Returns:
            What the function returned, by rank.

        Raises:
            RankFailedError: as of :func:`launch`; the ranks are ended.
        """
        with _by_value(function):
            called = cloudpickle.dumps((function, args))
        store = torch_distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        if self._processes is None:
            self._processes = _LaunchedRanks(self._size, {**os.environ, **self._environment})
        try:
            return self._processes.run(pickle.dumps((sys.path, {"MASTER_PORT": str(store.port)}, called)))
        except BaseException:
            self.close(at_once=True)
            raise

    def close(self, *, at_once: bool = False) -> None:
        """Ends the ranks; idempotent.

        Args:
            at_once: gives them no time.
        """
        if self._processes is not None:
            self._processes.close(at_once=at_once)
            self._processes = None


_ADDED = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store at MASTER_PORT is served by the parent
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "PYTHONUNBUFFERED": "1",  # lines are to appear when they are printed
}


@contextlib.contextmanager
def _by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Has a function pickled as a whole whose module a new process would not find, as a test's."""
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    name = "__main__" if module is None else module.__name__
    by_value = name == "__main__" or name in cloudpickle.list_registry_pickle_by_value()
    if by_value or _can_be_found(name):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer of a rank that did not return.

    Attributes:
        when_ns: when it failed, on the clock that all ranks of a machine share.
        what: what became of it, to be read after "rank N".
        error: the exception, pickled; ``None`` where it cannot be, and where there is none.
        follows: whether it may only be a consequence of another rank's failure.
    """

    when_ns: int
    what: str
    error: bytes | None
    follows: bool


class _LaunchedRanks(RankProcesses):
    """Ranks that are interpreters of their own, whose output is passed on.

    Args:
        size: number of ranks.
        environment: what all of them have in their environment, besides their numbers.
    """

    def __init__(self, size: int, environment: Mapping[str, str]) -> None:
        super().__init__(size)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._handles: list[int] = []
        self._readers: list[threading.Thread] = []
        try:
            for rank in range(size):
                self._start(rank, environment)
            self.gather_connections()
        except BaseException:
            self.close(at_once=True)
            raise

    def run(self, work: bytes) -> list[Any]:
        """Returns what the function returns on each rank.

        Args:
            work: the search path, further variables, and the function with its arguments, pickled.

        Raises:
            RankFailedError: as of :func:`launch`.
        """
        for connection in self._connections.values():
            with contextlib.suppress(BrokenPipeError):  # the rank has ended; its handle tells
                connection.send_bytes(work)
        answers = self._answers()
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failed)}
        if failures:
            self._stop(0.0)
            _raise_first(failures)
        return [answers[rank] for rank in range(self.size)]

    def _answers(self) -> dict[int, Any]:
        """Returns what each rank returned, or a :class:`Failed`; some are missing where one failed."""
        answers: dict[int, Any] = {}
        waiting = dict(self._connections)
        deadline: float | None = None
        while waiting:
            limit = None if deadline is None else deadline - time.monotonic()
            if limit is not None and limit <= 0:
                break
            ready = wait([*waiting.values(), *(self._handles[rank] for rank in waiting)], limit)
            for rank, connection in list(waiting.items()):
                if connection in ready or self._handles[rank] in ready:
                    answers[rank] = self._answer(rank, connection)
                    del waiting[rank]
            if deadline is None and any(isinstance(answer, Failed) for answer in answers.values()):
                deadline = time.monotonic() + FOLLOWERS_S
        return answers

    def _answer(self, rank: int, connection: Connection) -> Any:
        """Returns what a rank has answered, or a :class:`Failed` where it has ended without."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            if connection.poll():  # it may have ended right after its answer
                return connection.recv()
        self._reap(rank)
        return Failed(time.monotonic_ns(), _how_it_ended(self._processes[rank]), None, follows=False)

    def _start(self, rank: int, environment: Mapping[str, str]) -> None:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "collectives.ranks.launched", self.address, str(rank)],
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the ranks
        )
        self._processes.append(process)
        self._handles.append(os.pidfd_open(process.pid))
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = threading.Thread(target=_pass_on, args=(source, target, f"[rank {rank}] "), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _sentinels(self) -> Sequence[int]:
        return self._handles

    def _failure(self, ended: AbstractSet[object]) -> RankFailedError:
        rank = next(rank for rank, handle in enumerate(self._handles) if handle in ended)
        self._reap(rank)
        return RankFailedError(f"rank {rank} {_how_it_ended(self._processes[rank])}", rank)

    def _stop(self, grace_s: float) -> None:
        for number, seconds in ((None, grace_s), (signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
            end = None if seconds is None else time.monotonic() + seconds
            alive = [handle for handle in self._handles if not wait([handle], 0)]
            for handle in alive:
                if number is not None:
                    signal.pidfd_send_signal(handle, number)
            for handle in alive:
                wait([handle], None if end is None else max(0.0, end - time.monotonic()))
        for rank in range(len(self._handles)):
            self._reap(rank)

    def _reap(self, rank: int) -> None:
        """Waits for the end of a rank, and ends what it has started and left behind."""
        process = self._processes[rank]
        if process.returncode is None:
            wait([self._handles[rank]])
            with contextlib.suppress(ProcessLookupError):  # not later: the number would be free for others
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self, *, at_once: bool = False) -> None:
        """Ends the ranks, and passes on what they have printed."""
        super().close(at_once=at_once)
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()
        for reader in self._readers:
            reader.join(GRACE_S)  # a process that a rank has left behind may hold the pipe
        self._readers.clear()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    return f"{how} before the function returned"


def _pass_on(source: IO[bytes], target: TextIO, prefix: str) -> None:
    """Writes the lines of a rank's output until it ends."""
    with source:
        for line in source:
            text = line.decode(errors="replace")
            target.write(f"{prefix}{text}" if text.endswith("\n") else f"{prefix}{text}\n")
            target.flush()


def _raise_first(failures: Mapping[int, Failed]) -> NoReturn:
    """Raises for the rank that failed first, of those whose failure does not follow from another's."""
    rank = min(failures, key=lambda rank: (failures[rank].follows, failures[rank].when_ns))
    failed = failures[rank]
    error = None
    if failed.error is not None:
        with contextlib.suppress(Exception):  # its class may exist on the ranks only
            error = pickle.loads(failed.error)
    raise RankFailedError(f"rank {rank} {failed.what}", rank) from error
