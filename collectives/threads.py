"""Threads of the package, which the system may refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable

from collectives.errors import DistBackendError


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
