"""The communicators of a group: how they are made, split, and ended.

Collectives use one communicator of all ranks for each device. Messages use one for each pair of ranks that
exchange any, which no other rank takes part in making, or one for each direction where the user asks for it.
All are made when first used, that of all ranks at once where the process is bound to a device. Both ends of a
message choose the same one, whatever was made before.

They end in order, together with the other ranks, or at once, but always all in one group of calls, and their
streams are given back. The abort of one frees memory, which waits for all kernels on the device, and those of
another communicator may wait for other ranks for ever: in a group, NCCL stops all of them before it frees
anything. It spins while there is a CUDA graph with operations of a communicator, so that an end runs on a
thread of its own. The one for the abort begins with the first communicator, because none can begin while the
interpreter ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from collectives.backends._shared.health import Health
from collectives.backends.nccl.device import CudaDevice, Stream
from collectives.backends.nccl.libnccl import (
    UNIQUE_ID_BYTES,
    Communicator,
    NcclDataType,
    NcclError,
    NcclLibrary,
)
from collectives.backends.nccl.options import NcclConfig, Options
from collectives.backends.nccl.work import LOOK_SECONDS, Failures, Replays
from collectives.errors import CollectiveTimeoutError, DistBackendError, DistError, ranks_in_words
from collectives.store.joining.agreement import exchange, give_up
from collectives.store.records import as_bytes, as_text
from collectives.threads import start_thread

_BYTE = NcclDataType.UINT8
_MAKING = "making a communicator"
_END_SECONDS = 10.0
"""How long the end of a group waits for NCCL, which waits for ranks that do not end the group, and while
there is a CUDA graph with operations of it."""


def connects_in_capture(what: str) -> DistBackendError:
    """Returns the error of an operation that would have to make connections while a stream is captured."""
    return DistBackendError(
        f"{what} cannot be part of a CUDA graph; run the operation once before the capture"
    )


@dataclass(frozen=True, slots=True, eq=False)
class StreamedCommunicator:
    """A communicator and the stream that its asynchronous operations run on; equal to itself only."""

    communicator: Communicator
    stream: Stream
    replays: Replays


@dataclass(frozen=True, slots=True)
class Pair:
    """The communicators with another rank, one for both directions or two; the lower rank is 0 in each."""

    outgoing: StreamedCommunicator
    incoming: StreamedCommunicator


class Communicators:
    """Makes communicators, keeps them and ends them.

    Attributes:
        made: those of all ranks.
        rendezvous: brings the ranks together before a communicator is made.
        connected: those that operations were issued on, which made their connections.
        over: set when all have been aborted.

    Args:
        library: NCCL.
        store: the group's.
        options: the user's choices.
        failures: tells whether the group has ended.
    """

    def __init__(self, library: NcclLibrary, store: Any, options: Options, failures: Failures) -> None:
        self._library = library
        self.rendezvous = Rendezvous(store, failures)
        self._rank = failures.rank
        self._size = failures.size
        self._options = options
        self._failures = failures
        self._where = failures.where
        self._making: dict[object, threading.Lock] = {}
        self.made: dict[CudaDevice, StreamedCommunicator] = {}
        self._pairs: dict[tuple[CudaDevice, int], Pair] = {}
        self.connected: set[StreamedCommunicator] = set()
        self._all: list[tuple[CudaDevice, Communicator]] = []
        self._streams: list[tuple[CudaDevice, Stream]] = []
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asked = threading.Event()
        self.over = threading.Event()
        self._deadline = 0.0

    def all_ranks(self, device: CudaDevice, limit: timedelta) -> StreamedCommunicator:
        """Returns the communicator of all ranks; the first call on a device blocks until all have made it."""
        found = self.made.get(device)
        if found is not None:
            return found
        with self._making.setdefault("all", threading.Lock()):
            if device not in self.made:
                (made,) = self._make(device, "all", range(self._size), limit)
                self.made[device] = self._with_stream(device, made)
            return self.made[device]

    def pair(
        self,
        device: CudaDevice,
        peer: int,
        limit: timedelta,
        connecting: Callable[[], AbstractContextManager[object]],
    ) -> Pair:
        """Returns what carries messages to and from another rank; the first call blocks until that one calls.

        Args:
            device: the device.
            peer: the other rank.
            limit: time limit for that one to come.
            connecting: returns what is entered around the calls of NCCL that make the connections, and
                handles their errors.
        """
        found = self._pairs.get((device, peer))
        if found is not None:
            return found
        ranks = sorted((self._rank, peer))
        key = f"pair/{ranks[0]}:{ranks[1]}"
        with self._making.setdefault(key, threading.Lock()):
            if (device, peer) not in self._pairs:
                made = self._make(device, key, ranks, limit, 2 if self._options.duplex_messages else 1)
                directions = [self._with_stream(device, one) for one in made]
                from_low, from_high = directions[0], directions[-1]
                low = self._rank == ranks[0]
                pair = Pair(from_low, from_high) if low else Pair(from_high, from_low)
                with connecting():
                    self._connect(device, pair)
                self._pairs[device, peer] = pair
            return self._pairs[device, peer]

    def adopt(self, device: CudaDevice, communicator: Communicator) -> None:
        """Takes a communicator of all ranks that was split off another group's."""
        self._keep(device, communicator)
        self.made[device] = self._with_stream(device, communicator)

    def split(
        self, device: CudaDevice, color: int, key: int, limit: timedelta, config: NcclConfig | None
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
        parent = self.all_ranks(device, limit)
        what = "splitting the communicator"
        if config is not None:
            self._check(config, what)
        self.rendezvous.broadcast("split", range(self._size), what, limit, lambda: b"")
        split = partial(parent.communicator.split, color, key, config)
        with device.activate(), device.issuing.turn(parent):
            return self._in_time(device, split, what, range(self._size), limit)

    def _connect(self, device: CudaDevice, pair: Pair) -> None:
        """Connects both directions; both ranks are here.

        NCCL connects two ranks within the call of their first message, and blocks the host meanwhile: ranks
        that both sent first would wait for each other. One byte each way, in one group, does it before.
        """
        out, into = pair.outgoing, pair.incoming
        peer = 1 - out.communicator.rank
        with device.issuing.turn(out, into), device.activate():
            given, got = (device.empty(one.stream, 1, torch.uint8) for one in (out, into))
            with self._library.group:
                out.communicator.send(given.data_ptr(), 1, _BYTE, peer, out.stream)
                into.communicator.recv(got.data_ptr(), 1, _BYTE, peer, into.stream)
            for one, used in ((out, given), (into, got)):
                with device.using(one.stream):
                    device.drop([used])

    def _check(self, config: NcclConfig, what: str) -> None:
        """Raises for settings that cannot be passed on, before the other ranks wait in NCCL for this one."""
        try:
            self._library.check_config(config)
        except ValueError as error:
            self.rendezvous.note_refusal()
            raise DistBackendError(f"{self._where} {what}: {error}") from error

    def _with_stream(self, device: CudaDevice, communicator: Communicator) -> StreamedCommunicator:
        stream = device.take_stream(self._options.is_high_priority_stream)
        self._streams.append((device, stream))
        return StreamedCommunicator(communicator, stream, Replays(device))

    def _make(
        self, device: CudaDevice, key: str, ranks: Sequence[int], limit: timedelta, count: int = 1
    ) -> list[Communicator]:
        """Makes ``count`` communicators of the same ranks."""
        ranks = list(ranks)
        what = f"making the communicator of ranks {', '.join(map(str, ranks))} on {device.device}"
        if device.capturing():
            self.rendezvous.note_refusal()
            raise connects_in_capture(f"{self._where} {what}")
        self._failures.refuse(_MAKING)
        self._check(self._options.config, what)

        def identifiers() -> bytes:
            return b"".join(self._library.unique_id() for _ in range(count))

        value = self.rendezvous.broadcast(key, ranks, what, limit, identifiers)
        width = UNIQUE_ID_BYTES
        if len(value) != count * width:
            raise DistBackendError(
                f"{self._where} {what}: rank {ranks[0]} makes {len(value) // width}, but this one {count}; "
                "let duplex_messages be the same on all ranks"
            )
        own = ranks.index(self._rank)
        made = []
        for identifier in (value[n * width :][:width] for n in range(count)):
            init = partial(self._library.init, identifier, len(ranks), own, self._options.config)
            new = self._in_time(device, init, what, ranks, limit)
            assert new is not None  # noqa: S101
            made.append(self._keep(device, new))
        return made

    def _in_time(
        self,
        device: CudaDevice,
        make: Callable[[], Communicator | None],
        what: str,
        ranks: Sequence[int],
        limit: timedelta,
    ) -> Communicator | None:
        """Returns what a call of NCCL makes that waits for other ranks, without a limit of its own.

        The call has a thread of its own. Where a rank is gone, or the limit passes, that is left behind, as
        nothing breaks such a call off; what it may still make ends at once.
        """
        made: Future[Communicator | None] = Future()

        def call() -> None:
            try:
                with device.activate():
                    made.set_result(make())
            except Exception as error:  # noqa: BLE001 - raised below
                made.set_exception(error)

        def end(late: Future[Communicator | None]) -> None:
            communicator = None if late.exception() is not None else late.result()
            if communicator is not None:
                communicator.abort()

        start_thread(call, "nccl connect")
        deadline = time.monotonic() + limit.total_seconds()
        try:
            while not wait_for([made], timeout=LOOK_SECONDS).done:
                self._failures.check_missing(_MAKING, [rank for rank in ranks if rank != self._rank])
                if time.monotonic() >= deadline:
                    raise CollectiveTimeoutError(
                        f"{self._where} {what}: NCCL has not made the connections within "
                        f"{limit.total_seconds():g} s, though all ranks have come"
                    )
        except BaseException:
            made.add_done_callback(end)
            raise
        try:
            return made.result()
        except (NcclError, ValueError) as error:
            raise DistBackendError(f"{self._where} {what}: {error}") from error

    def _keep(self, device: CudaDevice, communicator: Communicator) -> Communicator:
        """Notes a communicator, to be ended with the group; ends it here if the group ended meanwhile."""
        try:
            with self._starting:
                if self._thread is None:
                    self._thread = start_thread(self._abort_when_asked, "nccl abort")
                self._all.append((device, communicator))
            self._failures.refuse(_MAKING)
        except BaseException:
            with device.activate():
                communicator.abort()
            raise
        return communicator

    # ---- ends ----------------------------------------------------------------------------------------------

    def open(self) -> list[Communicator]:
        """Returns the communicators that have not been ended."""
        return [one for _, one in self._all if not one.ended]

    def begin_abort(self) -> None:
        """Lets the abort of all communicators begin; does not wait."""
        self._deadline = self._deadline or time.monotonic() + _END_SECONDS
        self._asked.set()

    def abort(self) -> None:
        """Ends all communicators at once; operations under way stop.

        What has not ended after ten seconds is left behind with a warning, and ends when it can. A further
        call waits for the rest of the ten seconds only.
        """
        self.begin_abort()
        if self._all and not self.over.wait(max(0.0, self._deadline - time.monotonic())):
            self._failures.log.warning(
                "NCCL has not aborted the group's communicators after %g s, and they are left behind; let "
                "go of CUDA graphs with operations of the group before the group ends",
                _END_SECONDS,
            )

    def await_abort(self, at_most: float) -> None:
        """Waits for an abort that has begun, for so many seconds: its thread is in a call of NCCL."""
        if self._asked.is_set() and self._thread is not None:
            self._thread.join(max(at_most, 0.0))

    def destroy(self) -> None:
        """Ends all communicators, whose operations are done, together with the other ranks."""

        def end() -> None:
            self._end_all("ending", Communicator.destroy)
            self._asked.set()  # nothing is left to abort; that thread gives the streams back, and ends

        try:
            thread = start_thread(end, "nccl destroy")
        except DistBackendError:  # the interpreter ends
            self.abort()
            return
        thread.join(_END_SECONDS)
        if thread.is_alive():
            self._failures.log.warning(
                "NCCL has not ended its communicators after %g s, and is left behind; call "
                "destroy_process_group() on all ranks, of several groups in one order, and before it let go "
                "of CUDA graphs with the group's operations",
                _END_SECONDS,
            )

    def _abort_when_asked(self) -> None:
        self._asked.wait()
        self._end_all("aborting", Communicator.abort)
        self.over.set()
        # Not before: who waits for the end may have been interrupted, by the garbage collector, while it took
        # a stream.
        while self._streams:
            with suppress(RuntimeError):  # the device has met an error, and nobody takes a stream any more
                device, stream = self._streams.pop()
                device.give_back(stream, self._options.is_high_priority_stream)

    def _end_all(self, what: str, end: Callable[[Communicator], None]) -> None:
        communicators = list(self._all)
        if not communicators:
            return
        try:
            # Without a device of the group, the thread would open a context on the first one.
            with communicators[0][0].activate(), self._library.group:
                for device, one in communicators:
                    with device.activate():
                        self._end(what, one, end)
        except Exception as error:  # noqa: BLE001 - also what a device says that has met an error
            self._failures.log.warning("%s the communicators failed: %s", what, error)

    def _end(self, what: str, communicator: Communicator, end: Callable[[Communicator], None]) -> None:
        try:
            end(communicator)
        except Exception as error:  # noqa: BLE001 - a provider's own errors, too: the others must be ended
            self._failures.log.warning(
                "%s a communicator of %d ranks failed: %s", what, communicator.size, error
            )


# ---- rendezvous ----------------------------------------------------------------------------------------


class Rendezvous:
    """Brings ranks together in the store before a call of NCCL that would wait for a missing one for ever.

    By broadcasts that wait for all of their ranks.

    Each attempt at one has a number. A rank that refused what the others waited for, and gave up, was not
    there: it takes part in their next attempt.

    Args:
        store: the group's store.
        health: looks after the other ranks while some are missing.
    """

    def __init__(self, store: Any, health: Health) -> None:
        self._store = store
        self._health = health
        self._rank = health.rank
        self._where = health.where
        self._attempts: dict[str, int] = {}
        self._refused = False

    def note_refusal(self) -> None:
        """Takes note that this rank has refused an operation, for which others may have waited."""
        self._refused = True

    def broadcast(
        self, key: str, ranks: Sequence[int], what: str, limit: timedelta, make: Callable[[], bytes]
    ) -> bytes:
        """Returns the first rank's value, as soon as all ranks have called; blocks.

        Args:
            key: name of the broadcast, which may be called again and again.
            ranks: the ranks that call, in the same order on each.
            what: the purpose, in words.
            limit: time limit.
            make: makes the value; called on the first rank.

        Raises:
            CollectiveTimeoutError: ranks did not come in time; names them. Or this one came too late, and
                another has given up. A further broadcast may succeed.
            DistBackendError: the first rank could not make the value.
            DistStoreError: somebody else wrote it, as far as the job's secret tells.
        """
        made = None
        try:
            while made is None:
                number = self._attempts.get(key, 0)
                self._attempts[key] = number + 1
                made = self._attempt(f"{key}/{number}", ranks, what, limit, make)
        finally:
            self._refused = False
        return made

    def _attempt(
        self, key: str, ranks: Sequence[int], what: str, limit: timedelta, make: Callable[[], bytes]
    ) -> bytes | None:
        """Returns the value; ``None`` where others had given up while this rank refused to come."""
        where = f"{self._where} {what}:"
        others = [rank for rank in ranks if rank != self._rank]
        value, own = "", False
        if self._rank == ranks[0]:
            try:
                value = make().hex()
            except Exception as error:
                why = str(error) or type(error).__name__
                failed = DistBackendError(f"rank {self._rank} could not begin it: {why}", self._rank)
                give_up(self._store, key, failed)
                raise DistBackendError(f"{where} {error}") from error

        def late(missing: Sequence[int], died: bool) -> DistError:  # noqa: ARG001 - check_missing sees deaths
            nonlocal own
            own = True
            return CollectiveTimeoutError(
                f"{ranks_in_words(missing)} did not come within {limit.total_seconds():g} s; NCCL makes "
                "connections in the first operation, in which all of them must take part",
                missing[0],
                missing_ranks=missing,
            )

        def look() -> None:
            nonlocal own
            own = True  # what it raises
            self._health.check_missing(_MAKING, others)
            own = False

        try:
            made: bytes = exchange(
                self._store,
                key,
                self._rank,
                ranks,
                limit,
                where,
                record=value,
                check=as_text,
                combine=lambda values: values[0],
                read=as_bytes,
                why=late,
                look=look,
            )
        except CollectiveTimeoutError as error:
            missing = error.missing_ranks
            if own or not missing:
                raise
            if self._refused and self._rank in missing:
                return None
            raise CollectiveTimeoutError(
                f"{where} {ranks_in_words(missing)} did not come within another rank's time limit; let all "
                "ranks call the operation again, or raise the limit for ranks that come late",
                missing[0],
                missing_ranks=missing,
            ) from error
        return made
