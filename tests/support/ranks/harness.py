"""Runs test functions on ranks that are real processes.

::

    def check(rank, size, value):  # at module level; runs on every rank
        ...
        return rank * value

    def test_it():
        assert run_ranks(check, 4, 10) == [0, 10, 20, 30]

The processes are forked off one that has torch loaded (:mod:`preloaded_python`), kept and used again, so that
a call costs milliseconds. A rank's exception is raised here with the rank's traceback; when one rank fails or
time runs out, all ranks are stopped, and the error shows where each of them was. Nothing outlives the pytest
process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import secrets
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import preloaded_python
import python_client
import rank_server
from folders import Folder
from rank_server import Task, current_store
from rank_watch import Died, RankFailedError, RankProcess, RankTimeoutError, Watch

if TYPE_CHECKING:
    from collectives.bench.core.namespaces import Machines

__all__ = [
    "Died",
    "RankFailedError",
    "RankProcess",
    "RankTimeoutError",
    "close",
    "current_store",
    "number_of_keys",
    "run_on",
    "run_ranks",
    "run_world",
]

SESSION_VARIABLE = "COLLECTIVES_TEST_SESSION"
"""Environment variable that marks all descendants of this pytest process."""

_MACHINE_LABEL = "COLLECTIVES_HOST_MACHINE"
_WORK_FOLDER = str(Path.cwd())
SECRET = "COLLECTIVES_SECRET"
_MOST_IDLE = 8
"""How many ranks stay for the next test; few have more."""
_MOST_DESCRIPTORS = 80
"""How many files a rank that stays may have open: connections to the store are descriptors here, too."""


class _Rank(RankProcess):
    """A rank of this pytest process alone."""

    def __init__(self, log_file: Path) -> None:
        self._end = preloaded_python.connect()
        ours, theirs = socket.socketpair()
        with theirs, log_file.open("wb") as log, Path(os.devnull).open("rb") as nothing:
            files = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno(), 3: theirs.fileno()}
            environment = preloaded_python.environment()
            pid = python_client.ask(self._end, [rank_server.__file__, "3"], files, environment, _WORK_FOLDER)
        if pid == 0:
            raise RuntimeError("the server of interpreters has another environment than the ranks should")
        super().__init__(mp_connection.Connection(ours.detach()), pid, log_file)
        self._status: int | None = None

    def descriptors(self) -> int:
        """Returns how many files the process has open; 0 where it has just ended."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208 - after every call
        return 0

    def exit_status(self) -> int:
        """Returns the exit status; waits for the process, which must be about to end."""
        if self._status is None:
            with self._end:
                self._status = python_client.status(self._end)
        return self._status

    def close(self, kill: bool, patience: float = 0.0) -> int:
        """Ends the process; returns its exit status.

        Args:
            kill: whether to kill it; it ends by itself otherwise.
            patience: seconds that one to be killed gets to end by itself, if it is about to.
        """
        if kill and not self.has_ended(patience):
            self.send_signal(signal.SIGKILL)
        self.connection.close()
        if not kill and not self.has_ended(5.0):
            self.send_signal(signal.SIGKILL)
        os.close(self.pidfd)
        status = self.exit_status()
        self._log.unlink()
        return status


class _Harness:
    """Store and idle ranks of this pytest process, made on first use."""

    def __init__(self) -> None:
        from collectives.store import TCPStore

        os.environ.setdefault(SESSION_VARIABLE, uuid.uuid4().hex)
        os.environ["OMP_NUM_THREADS"] = "1"
        self._folder = Folder("ranks")
        # Not torch's: its clients now and then need five seconds to connect.
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.address = ("127.0.0.1", self._store.port)
        self._store_elsewhere: Any = None
        self._idle: list[_Rank] = []
        self._numbers = itertools.count()
        self.calls = itertools.count()

    def address_on(self, host: str, secret: str) -> tuple[str, int]:
        """Returns where those who know the secret find a store, if they reach this process at ``host``."""
        from collectives.store import TCPStore

        self._close_store_elsewhere()
        before = os.environ.get(SECRET)
        os.environ[SECRET] = secret
        try:
            self._store_elsewhere = TCPStore(
                host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
            )
        finally:
            del os.environ[SECRET]
            if before is not None:
                os.environ[SECRET] = before
        return host, self._store_elsewhere.port

    def _close_store_elsewhere(self) -> None:
        if self._store_elsewhere is not None:
            self._store_elsewhere.close()
            self._store_elsewhere = None

    def number_of_keys(self) -> int:
        return int(self._store.num_keys())

    def take(self, count: int, fresh: bool) -> list[_Rank]:
        reused = [] if fresh else self._idle[:count]
        if not fresh:
            del self._idle[:count]
        logs = [self._folder.path / f"{next(self._numbers)}.log" for _ in range(count - len(reused))]
        return reused + [_Rank(log) for log in logs]

    def give_back(self, ranks: list[_Rank]) -> None:
        """Keeps ranks for the next test, but few, and none that holds much of the last ones."""
        full = [rank for rank in ranks if rank.descriptors() > _MOST_DESCRIPTORS]
        idle = [rank for rank in ranks if rank not in full] + self._idle
        self._idle = idle[:_MOST_IDLE]
        self._end(full + idle[_MOST_IDLE:])

    def _end(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            rank.connection.close()
        for rank in ranks:
            rank.close(kill=False)

    def close(self) -> None:
        self._end(self._idle)
        self._idle = []
        self._store.close()
        self._close_store_elsewhere()
        self._folder.close()


_harness: _Harness | None = None


def close() -> None:
    """Ends all processes that this module started."""
    global _harness
    if _harness is not None:
        _harness.close()
        _harness = None


def number_of_keys() -> int:
    """Returns how many keys the calls so far have left in the store."""
    return 0 if _harness is None else _harness.number_of_keys()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = None,
    timeout: float = 60.0,
    isolated: bool = False,
    lost: Collection[int] = (),
    env: dict[str, str | None] | None = None,
    machines: tuple[Machines, Sequence[int]] | None = None,
    placement: str = "",
    world: bool = False,
    **options: Any,
) -> list[Any]:
    """Runs a function on every rank and returns the results by rank.

    Args:
        function: a module-level function, called as ``function(rank, size, *args)``; with a ``backend`` as
            ``function(group, *args)`` with a new :class:`collectives.ProcessGroup` of it.
            :func:`current_store` gives it a store shared by the ranks.
        world_size: number of ranks.
        *args: further arguments, pickled.
        backend: backend of the group.
        timeout: seconds until the ranks are stopped.
        isolated: runs in new processes that end afterwards; for tests that kill or spoil them.
        lost: ranks that need not answer, with ``isolated``: they die, or are stopped when all others
            answered. Results: :class:`Died`.
        env: environment variables during the call; ``None`` unsets one. With a job secret among them, the
            store of the call has it, too.
        machines: namespaces that play machines, and which of them each rank is on; needs ``isolated``. Their
            ranks have a job secret.
        placement: a letter for each rank; host groups take ranks of different letters for ranks of different
            machines, which reach each other over the loopback interface.
        world: whether the group is to be the default group instead; see :func:`run_world`.
        **options: further fields of :class:`collectives.registry.backends.GroupOptions`, such as
            ``pg_options`` and ``timeout`` (here ``group_timeout``).

    Raises:
        RankFailedError: a rank raised, or died.
        RankTimeoutError: the ranks were stopped.
    """
    __tracebackhide__ = True
    if lost and not isolated:
        raise ValueError("lost ranks need isolated=True")
    if machines is not None and not isolated:
        raise ValueError("ranks on machines need isolated=True")
    if placement and len(placement) != world_size:
        raise ValueError(f"placement {placement!r} is for {len(placement)} ranks, but there are {world_size}")
    running = _running()
    about = _about(options, backend, env, world)
    if machines is not None:
        about["env"] = {SECRET: secrets.token_hex(32), **about["env"]}
    secret = about["env"].get(SECRET)
    host = "127.0.0.1" if machines is None else machines[0].host
    store = running.address if secret is None else running.address_on(host, secret)
    namespaces = None if machines is None else [machines[0].namespace(place) for place in machines[1]]
    tasks = _tasks(function, world_size, args, about, store, namespaces, placement)
    ranks = running.take(world_size, isolated)
    healthy = False
    try:
        results = _play(function, ranks, tasks, timeout, lost)
        healthy = True
    finally:
        if healthy and not isolated:
            running.give_back(ranks)
        else:
            codes = [rank.close(True, 0.3 if number in lost else 0.0) for number, rank in enumerate(ranks)]
    if isolated:
        results = [Died(codes[r]) if isinstance(value, Died) else value for r, value in enumerate(results)]
    return results


def run_world(
    function: Callable[..., Any], world_size: int, *args: Any, backend: str | None = "host", **options: Any
) -> list[Any]:
    """Runs ``function(rank, size, *args)`` with the default group initialised, and destroys that afterwards.

    Arguments as :func:`run_ranks`, except that ``options`` are arguments of
    :func:`collectives.init_process_group`.
    """
    __tracebackhide__ = True
    return run_ranks(function, world_size, *args, backend=backend, world=True, **options)


def _about(
    options: dict[str, Any], backend: str | None, env: dict[str, str | None] | None, world: bool = False
) -> dict[str, Any]:
    """Returns the fields of tasks that all ranks have alike."""
    if "group_timeout" in options:
        options["timeout"] = options.pop("group_timeout")
    return {"backend": backend, "world": world, "options": options, "env": env or {}}


def run_on(
    ranks: Sequence[RankProcess],
    function: Callable[..., Any],
    *args: Any,
    backend: str | None = None,
    timeout: float = 60.0,
    lost: Collection[int] = (),
    env: dict[str, str | None] | None = None,
    **options: Any,
) -> list[Any]:
    """Runs a function as :func:`run_ranks` does, on processes that somebody else has started.

    Ranks of ``lost`` need not answer; the caller ends them.
    """
    __tracebackhide__ = True
    tasks = _tasks(function, len(ranks), args, _about(options, backend, env), _running().address)
    return _play(function, ranks, tasks, timeout, lost)


def _running() -> _Harness:
    """Returns the harness of this pytest process."""
    global _harness
    if rank_server.is_rank():
        raise RuntimeError("a rank cannot start ranks; is there a call at the level of a module?")
    if _harness is None:
        _harness = _Harness()
    return _harness


def _tasks(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    about: dict[str, Any],
    store: tuple[str, int],
    namespaces: Sequence[str] | None = None,
    placement: str = "",
) -> list[Task]:
    """Returns the task of every rank."""
    if "<" in function.__qualname__:
        raise TypeError(f"ranks run functions of module level, but {function.__qualname__} is none")
    call = f"call{next(_running().calls)}"
    modules, payload = _modules_of(function, args), pickle.dumps(args)
    return [
        Task(
            rank,
            world_size,
            modules,
            function.__module__,
            function.__qualname__,
            payload,
            store,
            call,
            namespace=None if namespaces is None else namespaces[rank],
            **{**about, "env": {**about["env"], _MACHINE_LABEL: placement[rank] if placement else None}},
        )
        for rank in range(world_size)
    ]


def _play(
    function: Callable[..., Any],
    ranks: Sequence[RankProcess],
    tasks: Sequence[Task],
    timeout: float,
    lost: Collection[int],
) -> list[Any]:
    """Has the ranks carry out their tasks, and returns the results."""
    __tracebackhide__ = True
    for rank, task in zip(ranks, tasks, strict=True):
        rank.start(task)
    what = f"{function.__qualname__} on {len(ranks)} ranks"
    return Watch(what, ranks, set(lost)).until(time.monotonic() + timeout, timeout)


def _modules_of(function: Callable[..., Any], args: tuple[Any, ...]) -> list[tuple[str, str]]:
    """Returns name and file of the modules that ranks need to find the function and its arguments."""
    names = [function.__module__, *(type(arg).__module__ for arg in args)]
    names += [arg.__module__ for arg in args if callable(arg) and hasattr(arg, "__module__")]
    found = {}
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and name != "__main__":
            found[name] = file
    return list(found.items())
