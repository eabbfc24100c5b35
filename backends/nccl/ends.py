"""How the communicators of a group end: in order, together with the other ranks, or at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from collectives.backends.nccl.device import CudaDevice, Stream
from collectives.backends.nccl.libnccl.interface import Communicator, NcclLibrary
from collectives.errors import DistBackendError
from collectives.logs import Log
from collectives.threads import start_thread

__all__ = ["Ends"]

_SECONDS = 10.0
"""How long the end of a group waits for NCCL, which waits for ranks that do not end the group, and while
there is a CUDA graph with operations of it."""


class Ends:
    """Ends the communicators of a group, all in one group of calls, and gives back their streams.

    The abort of one frees memory, which waits for all kernels on the device, and those of another
    communicator may wait for other ranks for ever: in a group, NCCL stops all of them before it frees
    anything. It spins while there is a CUDA graph with operations of a communicator, so that an end runs on a
    thread of its own. The one for the abort begins with the first communicator, because none can begin while
    the interpreter ends.

    Args:
        library: NCCL.
        log: the group's.
    """

    def __init__(self, library: NcclLibrary, log: Log) -> None:
        self._library = library
        self._log = log
        self._all: list[tuple[CudaDevice, Communicator]] = []
        self._streams: list[tuple[CudaDevice, Stream, bool]] = []
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asked = threading.Event()
        self._over = threading.Event()
        self._deadline = 0.0

    def add(self, device: CudaDevice, communicator: Communicator) -> None:
        """Takes over a communicator, to be ended with the group."""
        with self._starting:
            if self._thread is None:
                self._thread = start_thread(self._abort_when_asked, "nccl abort")
            self._all.append((device, communicator))

    def take_stream(self, device: CudaDevice, high_priority: bool) -> Stream:
        """Returns a stream for the operations of a communicator, given back when all have ended."""
        stream = device.take_stream(high_priority)
        self._streams.append((device, stream, high_priority))
        return stream

    def open(self) -> list[Communicator]:
        """Returns the communicators that have not been ended."""
        return [one for _, one in self._all if not one.ended]

    def begin_abort(self) -> None:
        """Lets the abort of all communicators begin; does not wait."""
        self._deadline = self._deadline or time.monotonic() + _SECONDS
        self._asked.set()

    def abort(self) -> None:
        """Ends all communicators at once; operations under way stop.

        What has not ended after ten seconds is left behind with a warning, and ends when it can. A further
        call waits for the rest of the ten seconds only.
        """
        self.begin_abort()
        if self._all and not self._over.wait(max(0.0, self._deadline - time.monotonic())):
            self._log.warning(
                "NCCL has not aborted the group's communicators after %g s, and they are left behind; let "
                "go of CUDA graphs with operations of the group before the group ends",
                _SECONDS,
            )

    def destroy(self) -> None:
        """Ends all communicators, whose operations are done, together with the other ranks."""
        end = partial(self._end_all, "ending", lambda one: one.destroy())
        try:
            thread = start_thread(end, "nccl destroy")
        except DistBackendError:  # the interpreter ends
            self.abort()
            return
        thread.join(_SECONDS)
        if thread.is_alive():
            self._log.warning(
                "NCCL has not ended its communicators after %g s, and is left behind; call "
                "destroy_process_group() on all ranks, of several groups in one order, and before it let go "
                "of CUDA graphs with the group's operations",
                _SECONDS,
            )
            return
        self._asked.set()  # nothing is left to abort; the thread gives the streams back, and ends

    def _abort_when_asked(self) -> None:
        self._asked.wait()
        self._end_all("aborting", lambda one: one.abort())
        self._over.set()
        # Not before: who waits for the end may have been interrupted, by the garbage collector, while it took
        # a stream.
        while self._streams:
            with suppress(RuntimeError):  # the device has met an error, and nobody takes a stream any more
                device, stream, high_priority = self._streams.pop()
                device.give_back(stream, high_priority)

    def _end_all(self, what: str, end: Callable[[Communicator], None]) -> None:
        communicators = list(self._all)
        if not communicators:
            return
        try:
            # Without a device of the group, the thread would open a context on the first one.
            with communicators[0][0].activate(), self._library.group():
                for device, one in communicators:
                    with device.activate():
                        self._end(what, one, end)
        except Exception as error:  # noqa: BLE001 - also what a device says that has met an error
            self._log.warning("%s the communicators failed: %s", what, error)

    def _end(self, what: str, communicator: Communicator, end: Callable[[Communicator], None]) -> None:
        try:
            end(communicator)
        except Exception as error:  # noqa: BLE001 - a provider's own errors, too: the others must be ended
            self._log.warning("%s a communicator of %d ranks failed: %s", what, communicator.size, error)
