"""Threads of the package, which the system may refuse, and the time of cores that it grants them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from collectives.errors import DistBackendError

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Where the kernel tells how much time of cores a container gets."""


def granted_cores(cores: float, quota: Path = QUOTA) -> float:
    """Returns the cores that a container gets the time of, of those that it may run on.

    Args:
        cores: number of those.
        quota: where the kernel tells how much time a container gets.
    """
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        time, period = (int(number) for number in quota.read_text("utf-8").split())
        cores = min(cores, time / period)
    return cores


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Starts a thread that does not hold up the interpreter's exit.

    Args:
        target: what it runs.
        name: its name.

    Returns:
        The thread.

    Raises:
        DistBackendError: the system gives no thread, or the interpreter ends.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise DistBackendError(
            f"no thread could be started for {name}: {error}; raise the limit of processes of this user "
            "(ulimit -u) or of its container (pids.max)"
        ) from error
    return thread
