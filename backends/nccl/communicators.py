"""The communicators of a group: how they are made, split and ended.

Collectives use one communicator of all ranks for each device. Messages use two for each pair of ranks that
exchange any, one for each direction, so that a message waits only for earlier ones of the same direction, and
no other rank takes part in making them. All are made when first used, that of all ranks at once where the
process is bound to a device. Both ends of a message choose the same one, whatever was made before.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from collectives.backends.nccl.device import Device, Stream
from collectives.backends.nccl.libnccl.codes import NcclDataType, NcclError
from collectives.backends.nccl.libnccl.config import NcclConfig
from collectives.backends.nccl.libnccl.interface import Communicator, NcclLibrary
from collectives.backends.nccl.options import Options
from collectives.backends.nccl.rendezvous import Rendezvous
from collectives.errors import DistBackendError

__all__ = ["Communicators", "Pair", "StreamedCommunicator"]

logger = logging.getLogger("collectives")

_BYTE = NcclDataType.UINT8
_END_SECONDS = 10.0
"""How long the end of a group waits for NCCL, which waits for ranks that do not end the group, and while
there is a CUDA graph with operations of it."""


@dataclass(frozen=True, slots=True)
class StreamedCommunicator:
    """A communicator and the stream that its asynchronous operations run on."""

    communicator: Communicator
    stream: Stream


@dataclass(frozen=True, slots=True)
class Pair:
    """The communicators with another rank; in each, rank 0 is the sender and rank 1 the receiver."""

    outgoing: StreamedCommunicator
    incoming: StreamedCommunicator


@dataclass(frozen=True, slots=True)
class _End:
    """The end of communicators on a thread of its own, and until when it is waited for."""

    thread: threading.Thread
    deadline: float


class Communicators:
    """Makes communicators, keeps them, and ends them.

    Args:
        library: NCCL.
        rendezvous: brings the ranks together before a communicator is made.
        rank: this rank.
        size: number of ranks.
        options: the user's choices.
        where: rank and group, to stand in front of a message.
        refuse: raises if the group has ended.
    """

    def __init__(
        self,
        library: NcclLibrary,
        rendezvous: Rendezvous,
        rank: int,
        size: int,
        options: Options,
        where: str,
        refuse: Callable[[], None],
    ) -> None:
        self._library = library
        self._rendezvous = rendezvous
        self._rank = rank
        self._size = size
        self._options = options
        self._where = where
        self._refuse = refuse
        self._making: dict[object, threading.Lock] = {}
        self._counters: dict[object, Iterator[int]] = {}
        self._splits = itertools.count()
        self._all_ranks: dict[torch.device, StreamedCommunicator] = {}
        self._pairs: dict[tuple[torch.device, int], Pair] = {}
        self._all: list[Communicator] = []
        self._ends: list[_End] = []  # only ever appended to: abort may run within any code, by the collector

    def all_ranks(self, device: Device, limit: timedelta) -> StreamedCommunicator:
        """Returns the communicator of all ranks; the first call on a device blocks until all have made it."""
        found = self._all_ranks.get(device.device)
        if found is not None:
            return found
        with self._making.setdefault("all", threading.Lock()):
            if device.device not in self._all_ranks:
                (made,) = self._make(device, "all", range(self._size), 1, limit)
                self._all_ranks[device.device] = self._with_stream(device, made)
            return self._all_ranks[device.device]

    def pair(
        self, device: Device, peer: int, limit: timedelta, connecting: AbstractContextManager[object]
    ) -> Pair:
        """Returns the communicators with another rank; the first call blocks until that one calls.

        Args:
            device: the device.
            peer: the other rank.
            limit: time limit for that one to come.
            connecting: entered around the calls of NCCL that make the connections; handles their errors.
        """
        found = self._pairs.get((device.device, peer))
        if found is not None:
            return found
        ranks = sorted((self._rank, peer))
        key = f"pair/{ranks[0]}:{ranks[1]}"
        with self._making.setdefault(key, threading.Lock()):
            if (device.device, peer) not in self._pairs:
                from_low, from_high = self._make(device, key, ranks, 2, limit)
                made = [self._with_stream(device, one) for one in (from_low, from_high)]
                pair = Pair(*(made if self._rank == ranks[0] else reversed(made)))
                with connecting:
                    self._connect(device, pair)
                self._pairs[device.device, peer] = pair
            return self._pairs[device.device, peer]

    def adopt(self, device: Device, communicator: Communicator) -> None:
        """Takes a communicator of all ranks that was split off another group's."""
        self._keep(communicator)
        self._all_ranks[device.device] = self._with_stream(device, communicator)

    def split(
        self, device: Device, color: int, key: int, limit: timedelta, config: NcclConfig | None
    ) -> Communicator | None:
        """Splits the communicator of all ranks; called by all of them, with no operation under way.

        Blocks until all have called.

        Args:
            device: the device.
            color: the part that this rank joins, -1 for none.
            key: place within the part.
            limit: time limit for the ranks to come.
            config: settings of the part; ``None`` on ranks that join none.
        """
        parent = self.all_ranks(device, limit).communicator
        what = "splitting the communicator"
        if config is not None:
            self._check(config, what)
        self._rendezvous.broadcast(f"split/{next(self._splits)}", range(self._size), what, limit, lambda: b"")
        try:
            with device.activate(), device.issuing:
                return parent.split(color, key, config)
        except (NcclError, ValueError) as error:
            raise DistBackendError(f"{self._where} {what}: {error}") from error

    def open(self) -> list[Communicator]:
        """Returns the communicators that have not been ended."""
        return [one for one in self._all if not one.ended]

    def abort(self) -> None:
        """Ends all communicators at once; operations under way stop.

        Each ends on a thread of its own: freeing the memory of one may wait for kernels of another, and NCCL
        spins while there is a CUDA graph with operations of a communicator. What has not ended after ten
        seconds is left behind with a warning, and ends when it can. A further call waits for the rest of the
        ten seconds only.
        """
        earlier = list(self._ends)
        ends = [
            self._start("nccl abort", partial(self._one, "aborting", one, one.abort)) for one in self._all
        ]
        for end in earlier:
            _join(end)
        left = sum([not _join(end) for end in ends if end is not None])
        if left:
            logger.warning(
                "%s NCCL has not aborted %d of %d communicators after %g s, and they are left behind; let go "
                "of CUDA graphs with operations of the group before the group ends",
                self._where,
                left,
                len(ends),
                _END_SECONDS,
            )

    def destroy(self) -> None:
        """Ends all communicators, whose operations are done, together with the other ranks."""

        def destroy() -> None:
            for one in list(self._all):
                self._one("ending", one, one.destroy)

        end = self._start("nccl destroy", destroy)
        if end is not None and not _join(end):
            logger.warning(
                "%s NCCL has not ended its communicators after %g s, and is left behind; call "
                "destroy_process_group() on all ranks, and before it let go of CUDA graphs with the group's "
                "operations",
                self._where,
                _END_SECONDS,
            )

    def _start(self, name: str, function: Callable[[], None]) -> _End | None:
        """Calls a function on a thread; here, where the interpreter's end lets no thread begin."""
        thread = threading.Thread(target=function, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            function()
            return None
        end = _End(thread, time.monotonic() + _END_SECONDS)
        self._ends.append(end)
        return end

    def _one(self, what: str, communicator: Communicator, end: Callable[[], None]) -> None:
        try:
            end()
        except Exception as error:  # noqa: BLE001 - a provider's own errors, too: the others must be ended
            logger.warning(
                "%s %s a communicator of %d ranks failed: %s", self._where, what, communicator.size, error
            )

    def _connect(self, device: Device, pair: Pair) -> None:
        """Connects both directions; both ranks are here.

        NCCL connects two ranks within the call of their first message, and blocks the host meanwhile: ranks
        that both sent first would wait for each other. One byte each way, in one group, does it before.
        """
        out, into = pair.outgoing, pair.incoming
        with device.issuing, device.activate():
            given, got = (device.empty(one.stream, 1, torch.uint8) for one in (out, into))
            with self._library.group():
                out.communicator.send(given.data_ptr(), 1, _BYTE, 1, device.handle(out.stream))
                into.communicator.recv(got.data_ptr(), 1, _BYTE, 0, device.handle(into.stream))
            device.drop(out.stream, [given])
            device.drop(into.stream, [got])

    def _check(self, config: NcclConfig, what: str) -> None:
        """Raises for settings that cannot be passed on, before the other ranks wait in NCCL for this one."""
        try:
            self._library.check_config(config)
        except ValueError as error:
            raise DistBackendError(f"{self._where} {what}: {error}") from error

    def _with_stream(self, device: Device, communicator: Communicator) -> StreamedCommunicator:
        return StreamedCommunicator(communicator, device.new_stream(self._options.is_high_priority_stream))

    def _make(
        self, device: Device, key: str, ranks: Sequence[int], count: int, limit: timedelta
    ) -> list[Communicator]:
        """Makes ``count`` communicators of the same ranks; the n-th begins with the n-th rank."""
        ranks = list(ranks)
        what = f"making the communicator of ranks {', '.join(map(str, ranks))} on {device.device}"
        if device.capturing():
            raise DistBackendError(
                f"{self._where} {what} cannot be part of a CUDA graph; run the operation once "
                "before the capture"
            )
        self._refuse()
        self._check(self._options.config, what)
        size = len(ranks)

        def identifiers() -> bytes:
            return b"".join(self._library.unique_id() for _ in range(count))

        number = next(self._counters.setdefault(key, itertools.count()))
        value = self._rendezvous.broadcast(f"{key}/{number}", ranks, what, limit, identifiers)
        width = len(value) // count
        own = ranks.index(self._rank)
        made = []
        try:
            with device.activate():
                for shift in range(count):
                    identifier = value[shift * width : (shift + 1) * width]
                    place = (own - shift) % size
                    made.append(self._keep(self._library.init(identifier, size, place, self._options.config)))
        except (NcclError, ValueError) as error:
            raise DistBackendError(f"{self._where} {what}: {error}") from error
        return made

    def _keep(self, communicator: Communicator) -> Communicator:
        """Notes a communicator, to be ended with the group; ends it here if the group ended meanwhile."""
        self._all.append(communicator)
        try:
            self._refuse()
        except BaseException:
            communicator.abort()
            raise
        return communicator


def _join(end: _End) -> bool:
    """Waits for an end until its deadline; returns whether it is over."""
    end.thread.join(max(0.0, end.deadline - time.monotonic()))
    return not end.thread.is_alive()
