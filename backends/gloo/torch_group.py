"""torch's ProcessGroupGloo as a backend needs it: its end, and methods that releases name differently."""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from collectives.backends.gloo.options import connects_on_demand
from collectives.errors import DistBackendError
from collectives.threads import start_thread

__all__ = ["TIMED_OUT", "TorchGroup", "all_gather_single", "all_to_all_single", "break_connections"]

TIMED_OUT = re.compile(r"timed out", re.IGNORECASE)
"""Matches Gloo's messages about a limit that passed."""

_ABORT_TAG = 2**31 - 2

_CONNECTING_SECONDS = 1.0
"""How long an end waits for connections that are made only to be closed."""


class TorchGroup:
    """Holds torch's group, and sees to it that none of its own threads is the one that ends it.

    Its end waits for its threads. One of them may run a callback that aborts the group, or be the last to
    let go of it.

    Args:
        inner: torch's group.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def release(self) -> None:
        """Lets go of torch's group, which ends when its threads have run what is queued.

        Blocks until then, unless the calling thread is none of Python's, as Gloo's are.
        """
        held = [self.inner]
        self.inner = None
        if held[0] is None or not isinstance(threading.current_thread(), threading._DummyThread):
            held.clear()
            return
        with contextlib.suppress(DistBackendError):  # at the interpreter's end no thread begins
            start_thread(held.clear, "gloo end")
            return
        _never_ended.append(held)

    def leave(self) -> None:
        """Forgets torch's group in a forked child; its end would wait for threads that are the parent's."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.inner))
        self.inner = None

    def __del__(self) -> None:
        self.release()


_never_ended: list[object] = []
"""Groups of torch that only their own threads could have ended."""


def break_connections(group: Any, rank: int, size: int, contexts: int) -> None:
    """Closes the connections to all ranks; whoever waits on them, here or there, gets an error at once.

    Gloo has no call for it. But when a receive passes its time limit, Gloo closes every connection of its
    context; a receive that nobody will answer, with a limit of 1 ms, is such a call.

    Where connections are made on demand, Gloo makes each within that receive, and blocks until the other rank
    takes part. It must not close a context meanwhile: it would take the connection that comes into use after
    that, and end the process at its first event. So one thread for each makes them all first. Those that are
    not there in a moment close theirs when they come, as a rank may connect that has not been waiting yet.
    """
    peers = [peer for peer in range(size) if peer != rank]
    for context in range(contexts):
        tag = _ABORT_TAG - context
        if connects_on_demand():
            _connect_and_close(group, peers, tag)
        else:
            any(_close(group, peer, tag) for peer in peers)


def _connect_and_close(group: Any, peers: Sequence[int], tag: int) -> None:
    connected: list[int] = []
    threads: list[threading.Thread] = []
    late = threading.Event()

    def connect(peer: int) -> None:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, tag)
            connected.append(peer)
            if late.is_set():
                _close(group, peer, tag)

    with contextlib.suppress(DistBackendError):  # without threads, connections end with the process
        threads += [start_thread(partial(connect, peer), "gloo connect") for peer in peers]
    deadline = time.monotonic() + _CONNECTING_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late.set()
    any(_close(group, peer, tag) for peer in list(connected))


def _close(group: Any, peer: int, tag: int) -> bool:
    """Lets a receive pass its limit; returns whether it did, and thereby closed a context."""
    nothing = torch.empty(1, dtype=torch.uint8)
    try:
        group.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        return TIMED_OUT.search(str(error)) is not None
    return False


def all_gather_single(inner: Any) -> Callable[..., Any]:
    """Returns the gathering of torch's group into one tensor."""
    return _either(inner, "all_gather_single", "_allgather_base")


def all_to_all_single(inner: Any) -> Callable[..., Any]:
    """Returns the exchange of torch's group between single tensors."""
    return _either(inner, "all_to_all_single", "alltoall_base")


def _either(inner: Any, new: str, old: str) -> Callable[..., Any]:
    """Returns a method under the name of newer releases of torch, or of older ones."""
    found: Callable[..., Any] = getattr(inner, new, None) or getattr(inner, old)
    return found
