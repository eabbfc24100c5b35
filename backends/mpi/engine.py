"""The operations of a group that are in flight: their Works, their progress and their failures.

MPI makes progress only while somebody calls it. So a thread that waits for one operation tests all that are
in flight in its group; the progress thread of the process tests those that nobody waits for. No call blocks
in MPI, so that time limits hold, an abort releases those who wait, and groups do not stop each other.

A thread that has waited for a while checks now and then whether time limits have passed, what others have
published in the group's store, and whether processes have ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

import collectives._native as _native
from collectives.backends._shared.exit_reasons import (
    Departure,
    abort_reason,
    aborted_by,
    blamed,
    departure_of,
    limit_reason,
    refuse_broken,
    stopped_by,
)
from collectives.backends._shared.operation import Operation
from collectives.backends._shared.process_records import Liveness
from collectives.backends._shared.tensor_memory import byte_count
from collectives.backends._shared.work import OperationWork
from collectives.backends.mpi.libmpi import Library
from collectives.core.operations import OPERATIONS, Operand
from collectives.core.recording.flight_record import BegunByCore, FlightRecord, Recorded
from collectives.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    GroupAbortedError,
    PeerLostError,
    ranks_in_words,
)
from collectives.store.records import as_text, fetch, publish
from collectives.store.waiting import delete_keys
from collectives.threads import start_thread
from collectives.time_limits import seconds_to_wait

__all__ = ["Engine", "MPIWork", "progress_thread"]


class _ProgressThread:
    """One thread for all groups of the process, started when the first needs it."""

    _REST_SECONDS = 30e-6
    _LONGEST_REST_SECONDS = 1e-3

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False

    def serve(self, group: Engine) -> None:
        """Makes progress in a group from now on, until nothing of it is in flight."""
        self.start()
        with self._lock:
            self._groups.add(group)
        self._wanted.set()

    def start(self) -> None:
        """Sees to it that the thread is there, so that :meth:`serve` will not fail."""
        with self._lock:
            if self._thread is None and not self._ends:
                self._thread = start_thread(self._run, "collectives-mpi")

    def _run(self) -> None:
        rest = self._REST_SECONDS
        while not self._ends:
            self._wanted.clear()
            with self._lock:
                groups = list(self._groups)
            moved = False
            for group in groups:
                result = group.progress()
                moved = moved or bool(result)
                if result is None:
                    self._forget(group)
            if not groups:
                self._wanted.wait()
                rest = self._REST_SECONDS
                continue
            del groups
            rest = self._REST_SECONDS if moved else min(1.2 * rest, self._LONGEST_REST_SECONDS)
            time.sleep(rest)

    def _forget(self, group: Engine) -> None:
        with self._lock:
            if group.idle:
                self._groups.discard(group)

    def close(self) -> None:
        """Ends the thread, so that it does not call an MPI that is being finalized."""
        self._ends = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


progress_thread = _ProgressThread()


def _start_over() -> None:
    """In a forked child, where the thread does not exist."""
    progress_thread.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_start_over)
atexit.register(progress_thread.close)


_SPINS = 300
"""Tests in a row before a waiting thread lets others have the core."""

_SPINS_OVERSUBSCRIBED = 3

_BUSY_SECONDS = 0.001
_SLOWEST_BYTES_PER_SECOND = 1e9
"""How long a waiting thread yields before it sleeps: this, and while data would move at this rate."""

_NAP_SECONDS = 50e-6
_LONGEST_NAP_SECONDS = 500e-6

_CHECK_SECONDS = 0.25
"""How often a waiting thread checks for failures."""

_NAMES = {one.opcode: one.name for one in OPERATIONS if one.name == one.collective}
_SINGLE_NAMES = _NAMES | {
    one.opcode: one.name for one in OPERATIONS if Operand.PARTS in {one.output, one.input}
}
"""Names of the collectives by their opcode: those that take lists, and those that take single tensors."""

_abandoned: list[MPIWork] = []
"""Operations that failed while MPI may still write into their memory, which therefore stays."""


class MPIWork(OperationWork):
    """An operation in flight; :meth:`move`, :meth:`end` and :meth:`leave` are for the engine alone.

    Args:
        engine: the engine.
        operation: what messages say about it.
        keep: whatever must stay alive until the operation ends.
        after: a last local step, such as writing a dense temporary back.
        nbytes: what it moves, to judge how long that may take; exactly the size of a message.
        behind: the operations that must be done before it is.
        recorded: its place in the flight record, where that has it already.

    Attributes:
        in_flight: the operation of the core, once it has begun.
        done: whether it is done or failed, as far as is known.
    """

    __slots__ = ("_after", "_behind", "_source", "deadline", "done", "in_flight", "keep", "nbytes", "since")

    _owner: Engine
    in_flight: _native.MpiInFlight

    def __init__(
        self,
        engine: Engine,
        operation: Operation,
        keep: Sequence[Any],
        after: Callable[[], None] | None = None,
        nbytes: int = 0,
        behind: Sequence[MPIWork] = (),
        recorded: Recorded | None = None,
    ) -> None:
        super().__init__(engine, operation, recorded or operation.begin())
        self.keep = keep
        self._after = after
        self._behind = behind
        self.nbytes = nbytes
        self.since = time.monotonic()
        self.deadline = self.since + operation.timeout.total_seconds()
        self.done = False
        self._source: int | None = None

    # ---- for the engine ------------------------------------------------------------------------------------

    def move(self) -> bool:
        """Moves the operation on; returns whether it is over, raises an error of MPI or of its last step."""
        over = self.in_flight.advance()
        self._owner.raise_error_of(self.in_flight)
        if not over or not all(work.done for work in self._behind):
            return False
        if self.receives:
            self._note_received()
        if self._after is not None:
            self._after()
        self.end(None)
        return True

    @property
    def receives(self) -> bool:
        """Whether it is a receive."""
        return self.operation.name == "recv"

    def _note_received(self) -> None:
        """Takes the sender and the size of a message from MPI's status."""
        mpi = self._owner.mpi_library.mpi
        status, found = mpi.Status(), self.in_flight.status
        ctypes.memmove(mpi._addressof(status), found, len(found))
        got = int(status.Get_elements(mpi.BYTE))
        if got != self.nbytes:
            raise DistBackendError(
                f"{self._owner.where()} {self.operation}: the message has {got} bytes, but the tensor that "
                f"receives it {self.nbytes}",
                **self.operation.about,
            )
        self._source = int(status.Get_source())

    def end(self, error: BaseException | None) -> None:
        """Ends the operation, with an error or well; where it is under way, it keeps its memory."""
        with self._lock:
            if self.done:
                return
            self._error = error
            self.done = True
        self._recorded.end(error)

    def leave(self, error: BaseException) -> None:
        """Ends the operation in a forked child, where nobody lets go of a lock that was held."""
        self._lock = threading.Lock()
        self.end(error)

    def _has_ended(self) -> bool:
        return self.done

    def _later(self, complete: Callable[[], None]) -> Callable[[], None]:
        return super()._later(complete) if self._owner.watch() else complete

    # ---- the contract --------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the operation is done; moves it on meanwhile, with the GIL released between looks."""
        limit = seconds_to_wait(timeout)
        if not self.done:
            until = time.monotonic() + limit if limit > 0 else None
            with _native.OperationWait(not self.operation.is_message):
                done = self._owner.wait_for(self, until)
            if not done:
                raise self._not_done(limit)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed; moves it on."""
        if not self.done:
            self._owner.poll(self)
        return self.done

    def source_rank(self) -> int:
        """Returns the sender of a receive."""
        if not self.receives:
            return super().source_rank()
        if not self.is_completed() or self._source is None:
            raise RuntimeError("the operation is still pending; call wait() before source_rank()")
        return self._source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the outputs.

        Where MPI takes calls from one thread only, the thread that finds the operation done runs callbacks.
        """
        return super().get_future()


class Engine:
    """The operations of one group in flight, and the group's health.

    Thread safety: every method may be called from any thread.

    Args:
        library: the MPI library.
        liveness: who is gone.
        store: the group's store.
        rank: this process's rank within the group.
        size: number of ranks.
        where: rank and group, to stand in front of a message.
        record: the group's flight record.
        timeout: tells the group's time limit.

    Attributes:
        unfinished: synchronous calls that the core has begun and not finished, and that this has not taken
            over. The core appends to it: the handler of a signal may raise in the moment in which it
            returns, before its caller has the operation, which goes on all the same.
    """

    def __init__(
        self,
        library: Library,
        liveness: Liveness,
        store: Any,
        rank: int,
        size: int,
        where: str,
        record: FlightRecord,
        timeout: Callable[[], timedelta],
    ) -> None:
        self.mpi_library = library
        self._where = where
        self.cause: DistError | None = None
        self._elsewhere = False
        self.ended = False
        self.lock = library.lock()
        self._liveness = liveness
        self._store = store
        self._rank = rank
        self._size = size
        self._active: list[MPIWork] = []
        self.unfinished: list[_native.MpiInFlight] = []
        self._record = record
        self._timeout = timeout
        self._spins = _SPINS_OVERSUBSCRIBED if library.oversubscribed else _SPINS
        self._check_at = 0.0
        self._checking = threading.Lock()

    # ---- issue ---------------------------------------------------------------------------------------------

    def where(self) -> str:
        """Returns rank and group, to stand in front of a message."""
        return self._where

    def check_usable(self, operation: Operation | str) -> None:
        """Raises where the group is broken, ended, or out of this thread's reach."""
        cause = self.cause
        if cause is not None:
            refuse_broken(f"{self._where} {operation}:", cause, self.ended)
        if self.ended:
            raise GroupAbortedError(f"{self._where} {operation}: the group was shut down")
        if not self.mpi_library.any_thread:
            self.mpi_library.check_thread(f"{self._where} {operation}:")

    def issue(
        self,
        operation: Operation,
        begin: Callable[[], _native.MpiInFlight],
        asynchronous: bool,
        keep: Sequence[Any],
        after: Callable[[], None] | None = None,
        nbytes: int = 0,
        behind: Sequence[MPIWork] = (),
    ) -> MPIWork:
        """Begins an operation, one at a time where the library asks for it, and returns its Work.

        An error of MPI breaks the group, and so does a signal's handler that raises before the Work has the
        operation: nobody would go on with it. Arguments as :class:`MPIWork`, and:

        Args besides those:
            begin: begins the operation.
            asynchronous: whether to return at once, and not when the operation is done.
        """
        if asynchronous and self.mpi_library.any_thread:
            progress_thread.start()
        with self.lock:
            self.check_usable(operation)
            work = MPIWork(self, operation, keep, after, nbytes, behind)
            try:
                work.in_flight = begin()
                self.raise_error_of(work.in_flight)
                self._active.append(work)
            except self.mpi_library.mpi.Exception as error:
                _abandoned.append(work)
                raise self.failed(operation, error, work) from error
            except BaseException:
                _abandoned.append(work)
                self._break_torn(work)
                raise
        self._see_to(work, asynchronous)
        return work

    def raise_error_of(self, in_flight: _native.MpiInFlight) -> None:
        """Raises MPI's error in an operation, if there is one."""
        if in_flight.error:
            raise self.mpi_library.mpi.Exception(in_flight.error)

    def carry_on(self, in_flight: _native.MpiInFlight) -> None:
        """Waits for an operation that the core has begun and left unfinished."""
        with self.lock:
            work = self._take(in_flight)
            broken = self.cause is not None or self.ended
        if broken:  # since it was issued
            self._fail_all()
        self._see_to(work, asynchronous=False)

    def _see_to(self, work: MPIWork, asynchronous: bool) -> None:
        if asynchronous:
            self.watch()
            return
        try:
            work.wait()
        except BaseException:
            if not work.done:  # a signal's handler raised: it goes on
                self.watch()
            raise

    def watch(self) -> bool:
        """Lets the progress thread serve this group, where it may call MPI."""
        serves: bool = self.mpi_library.any_thread
        if serves:
            progress_thread.serve(self)
        return serves

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self.unfinished and not self._active  # they go from the first to the second

    def earlier(self) -> list[MPIWork]:
        """Returns what is in flight now."""
        with self.lock:
            self._take_unfinished()
            return list(self._active)

    def _take_unfinished(self) -> None:
        """Takes over what a call began and, interrupted by a signal, did not hand over; needs the lock."""
        for in_flight in list(self.unfinished):
            self._take(in_flight)

    def _take(self, in_flight: _native.MpiInFlight) -> MPIWork:
        work = self._work_of(in_flight)
        self._active.append(work)  # before it goes from there, so that nobody finds the group idle
        if in_flight in self.unfinished:
            self.unfinished.remove(in_flight)
        return work

    def _work_of(self, in_flight: _native.MpiInFlight) -> MPIWork:
        """Returns a Work of what the core has begun.

        Two Works of one operation do no harm: each ends when the core says that it is over.
        """
        tensors: list[torch.Tensor] = []
        if in_flight.is_message:
            sends, tensor, peer, tag = in_flight.call
            tensors.append(tensor)
            name, way = ("send", "to") if sends else ("recv", "from")
            detail = f"{way} rank {peer}, tag {tag}"
        else:
            opcode, list_form, *_ = in_flight.call
            name, detail = (_NAMES if list_form else _SINGLE_NAMES)[opcode], ""
        operation = Operation(self._record, name, in_flight.number, tensors, self._timeout(), detail)
        recorded, nbytes = BegunByCore(self._record, in_flight), sum(map(byte_count, tensors))
        work = MPIWork(self, operation, in_flight.call, nbytes=nbytes, recorded=recorded)
        work.in_flight = in_flight
        return work

    # ---- progress ------------------------------------------------------------------------------------------

    def wait_for(self, work: MPIWork, until: float | None) -> bool:
        """Moves operations on until ``work`` has ended; ``False`` where it has not at the time ``until``."""
        if not self.mpi_library.may_call():
            return self._wait_for_other_thread(work, until)
        for _ in range(self._spins):
            if self._advance() is not None and work.done:
                return True
        busy_until = time.monotonic() + _BUSY_SECONDS + work.nbytes / _SLOWEST_BYTES_PER_SECOND
        nap = _NAP_SECONDS
        while not work.done:
            now = time.monotonic()
            if until is not None and now >= until:
                return False
            self._check_failures(now, work)
            if now < busy_until:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(1.3 * nap, _LONGEST_NAP_SECONDS)
            self._advance()
        return True

    def _wait_for_other_thread(self, work: MPIWork, until: float | None) -> bool:
        """Waits on a thread that may not call MPI for the one that may."""
        while not work.done:
            now = time.monotonic()
            if until is not None and now >= until:
                return False
            if now > work.deadline:
                self._expire(work)
            time.sleep(_LONGEST_NAP_SECONDS)
        return True

    def poll(self, work: MPIWork) -> None:
        """Moves operations on once, unless another thread does or this one may not call MPI."""
        if self.mpi_library.may_call():
            self._advance()
            now = time.monotonic()
            if not work.done and now - work.since > _CHECK_SECONDS:
                self._check_failures(now, work)

    def progress(self) -> bool | None:
        """For the progress thread: returns whether anything ended, ``None`` where nothing is in flight."""
        if self.idle:
            return None
        ended = self._advance()
        oldest = next(iter(self._active[:1]), None)
        if oldest is not None:
            now = time.monotonic()
            if now - oldest.since > _CHECK_SECONDS or now > self._first_deadline():
                self._check_failures(now, oldest)
        return bool(ended)

    def _advance(self) -> int | None:
        """Tests what is in flight; returns how many ended, ``None`` where another thread is at it."""
        if not self.lock.acquire(blocking=False):
            return None
        ended: list[MPIWork] = []
        try:
            self._take_unfinished()
            ended = [work for work in self._active if work.done or self._has_ended(work)]
            if ended:
                self._active = [work for work in self._active if not work.done]
        finally:
            self.lock.release()
        for work in ended:
            work.tell_end()
        return len(ended)

    def _has_ended(self, work: MPIWork) -> bool:
        try:
            return work.move()
        except self.mpi_library.mpi.Exception as error:
            work.end(self.failed(work.operation, error, work))
        except Exception as error:  # noqa: BLE001 - handed on: its own last step failed
            work.end(error)
        return True

    # ---- failure -------------------------------------------------------------------------------------------

    def _first_deadline(self) -> float:
        return min((work.deadline for work in list(self._active)), default=float("inf"))

    def _check_failures(self, now: float, waiting: MPIWork) -> None:
        """Looks for what MPI does not tell: time limits, aborts of other ranks, processes that ended."""
        expired = next((work for work in list(self._active) if now > work.deadline), None)
        if expired is not None:
            self._expire(expired)
            return
        if now < self._check_at or now - waiting.since < _CHECK_SECONDS / 2 or self.cause is not None:
            return
        if not self._checking.acquire(blocking=False):
            return
        found = None
        try:
            self._check_at = now + _CHECK_SECONDS
            self._publish_waiting(waiting)
            with contextlib.suppress(Exception):  # the store went with a rank
                found = self._liveness.poll_lost()
        finally:
            self._checking.release()
        if found is not None:
            self._break(self._loss(waiting.operation, found), waiting, elsewhere=True)

    def _publish_waiting(self, work: MPIWork) -> None:
        with contextlib.suppress(Exception):
            publish(self._store, f"waiting/{self._rank}", work.operation.short)

    def _expire(self, work: MPIWork) -> None:
        operation = work.operation
        limit = operation.timeout.total_seconds()
        missing, elsewhere = self._other_ranks(work)
        expired = CollectiveTimeoutError(
            f"{self._where} {operation}: passed its time limit of {limit:g} s. {elsewhere}",
            missing[0] if missing else -1,
            missing_ranks=missing,
            **operation.about,
        )
        self._liveness.publish_lost(Departure(self._rank, limit_reason(expired)))
        self._break(expired, work)

    def _other_ranks(self, work: MPIWork) -> tuple[list[int], str]:
        """Returns which ranks had not come, and what the others wait in; as far as they have published it."""
        self._publish_waiting(work)
        others = [rank for rank in range(self._size) if rank != self._rank]
        waiting: dict[int, str] = {}
        try:
            for rank in others:
                if self._store.check([key := f"waiting/{rank}"]):
                    waiting[rank] = fetch(self._store, key, as_text)
        except Exception as error:  # noqa: BLE001 - the store went with a rank, or somebody else writes to it
            return [], f"Nothing is known of the other ranks, as the group's store does not say: {error}"
        known = [f"rank {rank} waited last in {name}" for rank, name in waiting.items()]
        if silent := [rank for rank in others if rank not in waiting]:
            known.append(f"no word of waiting from {ranks_in_words(silent)}")
        operation = work.operation
        patient = operation.timeout.total_seconds() > 2 * _CHECK_SECONDS  # all who wait have said so
        tells = patient and operation.needs_all
        missing = [rank for rank in others if waiting.get(rank) != operation.short] if tells else []
        return missing, "; ".join(known) or "There are no other ranks"

    def _loss(self, operation: Operation, found: Departure) -> DistError:
        """Returns what to raise for a rank that is gone, or gave up."""
        error = blamed(f"{self._where} {operation}:", found, operation.about)
        if isinstance(error, PeerLostError):
            self._liveness.publish_lost(found)
        return error

    def failed(self, operation: Operation, error: Any, work: MPIWork | None = None) -> DistError:
        """Returns what to raise for an error of MPI in an operation, or its Work; it breaks the group.

        A message that is longer than the tensor that receives it breaks nothing: it is the caller's mistake.
        """
        what = f"{self._where} {operation}:"
        mpi = self.mpi_library.mpi
        if error.Get_error_class() == mpi.ERR_TRUNCATE and operation.name == "recv":
            text = f"{what} the message is longer than the tensor that receives it"
            return DistBackendError(text, **operation.about)
        lost = self._liveness.find_lost()
        if lost is not None:
            found = self._loss(operation, lost)
        else:
            found = DistBackendError(f"{what} MPI failed: {error}", **operation.about)
        self._break(found, work, elsewhere=lost is not None)
        return found

    def _break_torn(self, work: MPIWork) -> None:
        """Breaks the group, also for its peers, for an operation that a signal's handler tore."""
        reason = abort_reason(f"was interrupted within its {work.operation.short}", self._rank)
        self._liveness.publish_lost(Departure(self._rank, reason))
        text = f"{self._where} {work.operation}: this rank {reason}"
        about = work.operation.about
        self._break(GroupAbortedError(text, self._rank, cause=reason.cause, **about), work)

    def _break(self, cause: DistError, first: MPIWork | None = None, *, elsewhere: bool = False) -> None:
        """Ends everything in flight with errors, and refuses what comes later.

        Args:
            cause: why.
            first: the operation in which it was found, which gets this very error.
            elsewhere: whether another rank has given up.
        """
        with self.lock:
            if self.cause is None:
                self.cause, self._elsewhere = cause, elsewhere
            if first is not None:
                first.end(cause)
        self._fail_all()

    def _fail_all(self) -> None:
        with self.lock:
            self._take_unfinished()
            failing, self._active = self._active, []
            for work in failing:
                work.end(self._error_of(work))
                self._let_go(work)
        for work in failing:
            work.tell_end()

    def _error_of(self, work: MPIWork) -> Exception:
        cause = self.cause or GroupAbortedError("the group was shut down")
        return stopped_by(f"{self._where} {work.operation}:", cause, elsewhere=self._elsewhere)

    def _let_go(self, work: MPIWork) -> None:
        """Cancels a receive, so that nothing more is written; what cannot be cancelled keeps its memory."""
        if work.receives and self.mpi_library.may_call():
            work.in_flight.cancel()
        _abandoned.append(work)

    # ---- life ----------------------------------------------------------------------------------------------

    def leave(self, cause: DistError) -> None:
        """Fails, in a forked child, what is under way there, and leaves MPI alone."""
        self.lock = threading.RLock()  # nobody lets go of the parent's
        self.cause, self.ended = cause, True
        self._take_unfinished()
        failing, self._active = self._active, []
        for work in failing:
            work.leave(self._error_of(work))
        _abandoned.extend(failing)

    def break_for(self, cause: DistError) -> None:
        """Breaks the group for what broke another one of the same ranks."""
        if self.cause is not None or self.ended:
            return
        if (found := departure_of(cause, self._rank)) is not None:
            self._liveness.publish_lost(found)
        self._break(cause, elsewhere=True)

    def lost_ranks(self) -> list[int]:
        """Returns the ranks whose processes have ended, as far as this one sees, or whose loss is known."""
        return self._liveness.lost_ranks(self.cause)

    def abort(self) -> None:
        """Breaks the group for this rank and, by the store, for its peers."""
        with self.lock:
            if self.ended:
                return
            self.ended = True
        if self.cause is None:
            broken, reason = aborted_by(self._where, self._rank)
            self._liveness.publish_lost(Departure(self._rank, reason))
            self._break(broken)
        self._liveness.leave(self._delete_keys)

    def _delete_keys(self) -> None:
        kinds = ("calls/", "waiting/")
        delete_keys(self._store, [f"{kind}{rank}" for kind in kinds for rank in range(self._size)])

    def shutdown(self) -> bool:
        """Finishes what was issued, then ends the group; returns whether nothing of it is left in MPI.

        Errors of the operations stay with their Works.
        """
        while not self.ended and self.cause is None:
            last = self.earlier()[-1:]
            if not last:
                break
            self.wait_for(last[0], None)
        with self.lock:
            already, self.ended = self.ended, True
        if not already:
            self._liveness.withdraw()
            self._liveness.leave(self._delete_keys)
        return self.cause is None and not already
