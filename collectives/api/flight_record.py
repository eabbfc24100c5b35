"""What the groups of this process did last, and how much in all: by call, in files, for Prometheus.

Each group keeps its last operations (256, or as many as ``COLLECTIVES_FLIGHT_RECORD`` says; 0 for none) with
number, shape, data type, reduction, root or peer, times and state. With ``COLLECTIVES_FLIGHT_RECORD_FILE``
set to the beginning of a path, every rank also writes them to a file at the first error of a group, and with
``COLLECTIVES_FLIGHT_RECORD_SIGNAL=SIGUSR1`` whenever that signal comes, also while it hangs. ``collectives
trace`` puts the files of all ranks together.

Groups of all backends record every operation that they begin with other ranks; compositions show as the
groups that they are made of. An asynchronous collective of ``host`` begins when those before it have ended.
What the C++ core carries out by itself, which is ``host`` as a whole and synchronous calls of ``mpi`` on
dense CPU tensors, has flat shapes: the number of elements.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from collectives.core.recording import dump

__all__ = ["dump_flight_record", "flight_record", "prometheus_text"]


def flight_record() -> dict[str, Any]:
    """Returns the last operations of all groups of this process, as plain data.

    Each process asks for itself; nothing is sent, and running operations go on meanwhile.

    Returns:
        ``rank``, ``process``, ``host``; ``monotonic_ns`` and ``time_ns``, both clocks at this moment; and
        ``groups``, each with its ``name``, ``backend``, ``rank``, ``global_ranks``, ``stats`` and
        ``operations``. An operation has a ``state``: ``pending``, ``done`` or ``failed``; ``began_ns`` and
        ``ended_ns`` count on the monotonic clock. ``site`` is the source line that issued it, where that is
        known: of collectives that ``host`` carries out in the background, or waits in for long. Of ``nccl``
        an operation ends when its group looks, which is at the next operation or within 0.1 s.

    Example:
        With 2 ranks::

            group = collectives.new_group(backend="gloo")
            collectives.all_reduce(torch.ones(4), group=group)
            last = collectives.flight_record()["groups"][-1]["operations"][-1]
            last["name"], last["shape"], last["state"]  # 'all_reduce', [4], 'done'
    """
    return dump.snapshot("the program asked")


def dump_flight_record(path: str | Path | None = None) -> Path:
    """Writes the flight record of this process as JSON, for ``collectives trace``.

    Args:
        path: the file; ``None`` for what ``COLLECTIVES_FLIGHT_RECORD_FILE`` begins with, the rank and
            ``.json``. A file that is there is replaced as a whole.

    Returns:
        The path.

    Raises:
        ValueError: there is no path, neither here nor in the environment.
        OSError: the file cannot be written.
    """
    return dump.dump(path, "the program asked")


def prometheus_text() -> str:
    """Returns the counts of all groups of this process in the text format of Prometheus.

    Returns:
        Lines with what :meth:`ProcessGroup.stats` has, as ``collectives_operations_total``,
        ``collectives_bytes_total``, ``collectives_errors_total`` and ``collectives_seconds_total``, by group,
        backend, rank and operation.
    """
    return dump.prometheus_text()
