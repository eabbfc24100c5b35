"""A function on several ranks of this machine, from a script, a test or a notebook.

Not here: programs (``torchrun``), and ranks on several machines.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeVar

import cloudpickle
import torch.distributed as torch_distributed

from collectives.ranks.cores import checked, shares, threads_of_a_rank
from collectives.ranks.processes import Failed, SpawnedRanks, commands, signal_at_end_of_parent, work_of

__all__ = ["Ranks", "launch"]

_T = TypeVar("_T")


def launch(
    function: Callable[..., _T],
    args: Sequence[Any] = (),
    nproc: int = 2,
    *,
    environment: Mapping[str, str] | None = None,
    bind: bool | Sequence[Collection[int]] = False,
) -> list[_T]:
    """Runs a function on several ranks, each a new process of this machine, and returns what they return.

    The function need not be importable: one of a notebook, of a script without ``if __name__ ==
    "__main__"``, or within another one will do. It finds the variables that ``torchrun`` sets (``RANK``,
    ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and so on), so that ``init_process_group()`` of this
    package and of torch need no arguments. Where ``OMP_NUM_THREADS`` is not set, ranks find it to be the
    number of cores divided by that of ranks, at least 1, so that their threads have a core each. Groups that
    the function leaves are destroyed. What ranks print appears here line by line, behind ``[rank N]``.

    Blocks until all ranks have ended. None outlives the call, nor a caller that is killed; nor do processes
    that a rank has started, unless they have a session of their own.

    Args:
        function: what each rank calls. It, its arguments and what it returns travel by ``cloudpickle``; a
            tensor is copied.
        args: its arguments, the same on all ranks.
        nproc: number of ranks.
        environment: further environment variables of the ranks.
        bind: keeps each rank, with all its threads, on cores of its own: ``True`` shares out those that this
            process may run on, neighbours together; or the numbers of the cores of each rank.

    Returns:
        What the function returned, by rank.

    Raises:
        ValueError: ``nproc`` is less than 1; there are fewer cores than ranks to bind; or ``bind`` names none
            for a rank, the same for two, or such as this process may not run on.
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
    with Ranks(nproc, environment=environment, bind=bind) as ranks:
        return ranks.run(function, *args)


class Ranks:
    """Ranks of this machine that run one function after the other; a context manager.

    They start when they are first needed, and anew after one has failed, so that the interpreters and what
    they have imported serve many functions. Each function finds a rendezvous of its own and makes its own
    process groups; those that it leaves are destroyed.

    Args:
        nproc: number of ranks.
        environment: see :func:`launch`.
        bind: likewise.

    Raises:
        ValueError: see :func:`launch`.
    """

    def __init__(
        self,
        nproc: int = 2,
        *,
        environment: Mapping[str, str] | None = None,
        bind: bool | Sequence[Collection[int]] = False,
    ) -> None:
        if nproc < 1:
            raise ValueError(f"nproc must be at least 1, but is {nproc}")
        self._size = nproc
        self._cores: list[set[int]] | None = None
        threads = threads_of_a_rank(nproc)
        if bind is not False:
            self._cores = shares(nproc) if bind is True else checked(bind, nproc)
            threads = min(map(len, self._cores))
        self._environment = {
            **_ADDED,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            **(environment or {}),
        }
        self._processes: SpawnedRanks | None = None

    def __enter__(self) -> Ranks:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def run(self, function: Callable[..., _T], *args: Any) -> list[_T]:
        """Runs a function on all ranks; blocks until it has returned on all.

        Args:
            function: see :func:`launch`.
            args: its arguments.

        Returns:
            What the function returned, by rank.

        Raises:
            RankFailedError: see :func:`launch`; the ranks are ended.
        """
        path, called = work_of(function, args)
        store = torch_distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        try:
            if self._processes is None:
                environment = {**os.environ, **self._environment}
                self._processes = SpawnedRanks(
                    self._size, call_functions, environment=environment, labelled=True, cores=self._cores
                )
            return self._processes.ask((path, called, store.port))
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


def call_functions(rank: int, connection: Connection) -> None:
    """The body of a rank: calls one function after the other, and answers with what it returns."""
    signal_at_end_of_parent(signal.SIGCONT)  # a stopped one must go on to end, with what it has started
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    working = threading.Event()
    watch = (connection.fileno(), working)
    threading.Thread(target=_end_with_parent, args=watch, daemon=True).start()
    for work in commands(connection):
        working.set()
        answer = _answer(rank, *work)
        working.clear()
        connection.send_bytes(answer)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _signal_group(signal.SIGTERM)  # a parent that lives ends what is left then


def _answer(rank: int, path: list[str], called: bytes, port: int) -> bytes:
    """Returns what the function returns, or a :class:`Failed`, pickled."""
    try:
        sys.path[:] = path
        os.environ["MASTER_PORT"] = str(port)
        function, args = pickle.loads(called)  # which may need the modules there
        result = function(*args)
        for name in ("collectives", "torch.distributed"):
            module: Any = sys.modules.get(name)
            if module is not None and module.is_initialized():
                module.destroy_process_group()
        answer: bytes = cloudpickle.dumps(result)
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        answer = cloudpickle.dumps(Failed.of(rank, error))
    return answer


def _end_with_parent(descriptor: int, working: threading.Event) -> None:
    """Ends this process where the parent ends, or wants no answer any more, while a function runs."""
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    poller.poll()
    working.wait()  # a command may be here already that the main thread has not read
    _signal_group(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _signal_group(number: int) -> None:
    """Sends a signal to this process and what it has started, which the parent has made a group of."""
    with contextlib.suppress(ProcessLookupError):  # it was started in another's
        os.killpg(os.getpid(), number)
