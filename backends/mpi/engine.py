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
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

import collectives._native as _native
from collectives.backends._shared.exit_reasons import Departure, abort_reason, blamed
from collectives.backends._shared.health import Health
from collectives.backends._shared.operation import Operation
from collectives.backends._shared.tensor_memory import byte_count
from collectives.backends._shared.work import OperationWork
from collectives.backends.mpi.libmpi import Library
from collectives.core.operations import OPERATIONS, Call, Operand
from collectives.core.recording.flight_record import BegunByCore, FlightRecord, Recorded
from collectives.core.types import ReduceOp
from collectives.errors import DistBackendError, DistError, GroupAbortedError, ranks_in_words
from collectives.forks import begin_anew_in_children, belongs_to_parent, call_in_forked_children
from collectives.store.waiting import delete_keys
from collectives.threads import start_thread
from collectives.time_limits import seconds_to_wait


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

begin_anew_in_children(progress_thread)
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

_LISTED = {one.opcode: one for one in OPERATIONS if one.name == one.collective}
_SINGLE = _LISTED | {one.opcode: one for one in OPERATIONS if Operand.PARTS in {one.output, one.input}}
"""The collectives by their opcode: those that take lists, and those that take single tensors."""

_abandoned: list[MPIWork] = []
"""Operations that failed while MPI may still write into their memory, which therefore stays."""


class MPIWork(OperationWork):
    """An operation in flight; what is not of the contract is for the engine alone.

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
        released: whether MPI has done with its memory, or this stays for good.
    """

    __slots__ = (
        "_after", "_behind", "_source", "deadline", "done", "in_flight", "keep", "nbytes", "released",
        "since",
    )  # fmt: skip

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
        self.released = False
        self._source: int | None = None

    # ---- for the engine ------------------------------------------------------------------------------------

    def move(self) -> bool:
        """Moves the operation on; returns whether MPI has done with it, raises an error of MPI."""
        over = self.in_flight.advance()
        self._owner.raise_error_of(self.in_flight)
        self.released = over and all(work.done for work in self._behind)
        return self.released

    def finish(self) -> None:
        """Takes the last steps, and ends the operation; raises an error of theirs."""
        if self.receives:
            self._note_received()
        if self._after is not None:
            self._after()
        self.end(None)

    @property
    def receives(self) -> bool:
        """Whether it is a receive."""
        return self.operation.name == "recv"

    def _note_received(self) -> None:
        """Takes the sender and the size of a message from MPI's status."""
        mpi = self._owner.libmpi.mpi
        status, found = mpi.Status(), self.in_flight.status
        ctypes.memmove(mpi._addressof(status), found, len(found))
        got = int(status.Get_elements(mpi.BYTE))
        if got != self.nbytes:
            raise DistBackendError(
                f"{self._owner.where} {self.operation}: the message has {got} bytes, but the tensor that "
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


class Engine(Health):
    """The operations of one group in flight, and the group's health.

    Args:
        library: the MPI library.
        store: the group's store.
        rank: this process's rank within the group.
        size: number of ranks.
        where: rank and group, to stand in front of a message.
        record: the group's flight record.
        timeout: tells the group's time limit.

    Attributes:
        library: the MPI library.
        calling: lock for the group's calls of MPI.
        unfinished: synchronous calls that the core has begun and not finished, and that this has not taken
            over. The core appends to it: the handler of a signal may raise in the moment in which it
            returns, before its caller has the operation, which goes on all the same.
    """

    _told_seconds = 2 * _CHECK_SECONDS

    def __init__(
        self,
        library: Library,
        store: Any,
        rank: int,
        size: int,
        where: str,
        record: FlightRecord,
        timeout: Callable[[], timedelta],
    ) -> None:
        super().__init__(store, rank, size, where)
        self._shared = store
        self.libmpi = library
        self.calling = library.lock()
        self._active: list[MPIWork] = []
        self.unfinished: list[_native.MpiInFlight] = []
        self._record = record
        self._timeout = timeout
        self._spins = _SPINS_OVERSUBSCRIBED if library.oversubscribed else _SPINS
        self._check_at = 0.0
        self._checking = threading.Lock()
        call_in_forked_children(self, Engine.leave_to_parent)

    # ---- issue ---------------------------------------------------------------------------------------------

    def check_usable(self, operation: Operation | str) -> None:
        """Raises where the group is broken, ended, or out of this thread's reach."""
        if self.over:
            self.refuse(operation)
        if not self.libmpi.any_thread:
            self.libmpi.check_thread(f"{self.where} {operation}:")

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
        if asynchronous and self.libmpi.any_thread:
            progress_thread.start()
        with self.calling:
            self.check_usable(operation)
            work = MPIWork(self, operation, keep, after, nbytes, behind)
            try:
                work.in_flight = begin()
                self.raise_error_of(work.in_flight)
                self._active.append(work)
            except self.libmpi.mpi.Exception as error:
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
            raise self.libmpi.mpi.Exception(in_flight.error)

    def carry_on(self, in_flight: _native.MpiInFlight) -> None:
        """Waits for an operation that the core has begun and left unfinished."""
        with self.calling:
            work = self._take(in_flight)
        if self.over:  # since it was issued
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
        serves: bool = self.libmpi.any_thread
        if serves:
            progress_thread.serve(self)
        return serves

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self.unfinished and not self._active  # they go from the first to the second

    def earlier(self) -> list[MPIWork]:
        """Returns what is in flight now."""
        with self.calling:
            self._take_unfinished()
            return [work for work in self._active if not work.done]

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
        if in_flight.is_message:
            sends, tensor, peer, tag = in_flight.call
            name, way = ("send", "to") if sends else ("recv", "from")
            shown: Sequence[torch.Tensor] = [tensor]
            operands, detail = [tensor], f"{way} rank {peer}, tag {tag}"
        else:
            opcode, listed, output, given, op, root = in_flight.call
            row = (_LISTED if listed else _SINGLE)[opcode]
            call = Call(row, _tensors_of(output), _tensors_of(given), ReduceOp(op), root)
            name, shown, detail = row.name, call.shown, call.detail
            operands = [*call.outputs, *call.inputs]
        operation = Operation(self._record, name, in_flight.number, shown, self._timeout(), detail)
        recorded, nbytes = BegunByCore(self._record, in_flight), sum(map(byte_count, operands))
        work = MPIWork(self, operation, in_flight.call, nbytes=nbytes, recorded=recorded)
        work.in_flight = in_flight
        return work

    # ---- progress ------------------------------------------------------------------------------------------

    def wait_for(self, work: MPIWork, until: float | None) -> bool:
        """Moves operations on until ``work`` has ended; ``False`` where it has not at the time ``until``."""
        calls = self.libmpi.may_call()  # else it waits for the thread that may
        for _ in range(self._spins if calls else 0):
            if self._advance() is not None and work.done:
                return True
        busy_until = time.monotonic() + _BUSY_SECONDS + work.nbytes / _SLOWEST_BYTES_PER_SECOND
        nap = _NAP_SECONDS
        while not work.done:
            now = time.monotonic()
            if until is not None and now >= until:
                return False
            self._check_failures(now, work)
            if calls and now < busy_until:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(1.3 * nap, _LONGEST_NAP_SECONDS)
            if calls:
                self._advance()
        return True

    def poll(self, work: MPIWork) -> None:
        """Moves operations on once, unless another thread does or this one may not call MPI."""
        if self.libmpi.may_call():
            self._advance()
            now = time.monotonic()
            if not work.done and now - work.since > _CHECK_SECONDS:
                self._check_failures(now, work)

    def progress(self) -> bool | None:
        """For the progress thread: returns whether anything ended, ``None`` where nothing is in flight."""
        if self.idle:
            return None
        ended = self._advance()
        oldest = next((work for work in list(self._active) if not work.done), None)
        if oldest is not None:
            now = time.monotonic()
            if now - oldest.since > _CHECK_SECONDS or now > self._first_deadline():
                self._check_failures(now, oldest)
        return bool(ended)

    def _advance(self) -> int | None:
        """Tests what is in flight; returns how many ended, ``None`` where another thread is at it."""
        ended: list[MPIWork] = []
        taken: list[bool] = []
        try:
            # In one step with the note of it: the handler of a signal may raise behind it.
            taken.extend(map(self.calling.acquire, (False,)))
            if not taken[0]:
                return None
            self._take_unfinished()
            ended = [work for work in list(self._active) if work.done or self._has_ended(work)]
            for work in ended:
                self._let_go(work)
        finally:
            if taken == [True]:
                self.calling.release()
        self._tell_ends(ended)
        return len(ended)

    def _has_ended(self, work: MPIWork) -> bool:
        try:
            if not work.move():
                return False
        except self.libmpi.mpi.Exception as error:
            work.end(self.failed(work.operation, error, work))
            return True
        try:
            work.finish()
        except RuntimeError as error:  # where a signal's handler raises one, MPI at least has done
            work.end(error)
        return True

    def _tell_ends(self, ended: Sequence[MPIWork]) -> None:
        """Takes operations that have ended out of those in flight, each when it has told so.

        The handler of a signal may raise at any time; the others are found again.
        """
        for work in ended:
            work.tell_end()
            with contextlib.suppress(ValueError):  # another thread has done so
                self._active.remove(work)

    # ---- failure -------------------------------------------------------------------------------------------

    def _first_deadline(self) -> float:
        return min((work.deadline for work in list(self._active)), default=float("inf"))

    def _check_failures(self, now: float, waiting: MPIWork) -> None:
        """Looks for what MPI does not tell: time limits, aborts of other ranks, processes that ended."""
        expired = next((work for work in list(self._active) if now > work.deadline and not work.done), None)
        if expired is not None:
            self.expire(expired.operation, expired.end)
            with self.lock:  # under which whoever breaks the group ends the operation that it is for
                stays = not expired.done
            if stays:  # a signal's handler raised within what broke the group before
                self._fail_all()
            return
        if now < self._check_at or now - waiting.since < _CHECK_SECONDS / 2 or self.over:
            return
        taken: list[bool] = []
        try:
            taken.extend(map(self._checking.acquire, (False,)))  # as above
            if taken[0]:
                self._check_at = now + _CHECK_SECONDS
                self.publish_waiting(waiting.operation)
                self.check_peers(waiting.operation, waiting.operation.about, waiting.end)
        finally:
            if taken == [True]:
                self._checking.release()

    def expire(self, operation: Operation, first: Callable[[DistError], object], hint: str = "") -> None:
        """Breaks the group for an operation that passed its time limit, perhaps before the first look."""
        if self.cause is None:
            self.publish_waiting(operation)
        super().expire(operation, first, hint)

    def _waits(self, waiting: Mapping[int, str]) -> list[str]:
        known = [f"rank {rank} waited last in {text}" for rank, text in waiting.items() if text]
        if silent := [rank for rank, text in waiting.items() if not text]:
            known.append(f"no word of waiting from {ranks_in_words(silent)}")
        return known

    def failed(self, operation: Operation, error: Any, work: MPIWork) -> DistError:
        """Returns what to raise for an error of MPI in an operation; it breaks the group.

        A message that is longer than the tensor that receives it breaks nothing: it is the caller's mistake.
        """
        what, about = f"{self.where} {operation}:", operation.about
        if error.Get_error_class() == self.libmpi.mpi.ERR_TRUNCATE and operation.name == "recv":
            work.released = True
            return DistBackendError(f"{what} the message is longer than the tensor that receives it", **about)
        lost = self.find_lost()
        if lost is not None:
            found = blamed(what, lost, about)
        else:
            found = DistBackendError(f"{what} MPI failed: {error}", **about)
        self.break_by(found, lost, work.end, elsewhere=lost is not None)
        work.end(found)
        return found

    def _break_torn(self, work: MPIWork) -> None:
        """Breaks the group, also for its peers, for an operation that a signal's handler tore."""
        reason = abort_reason(f"was interrupted within its {work.operation.short}", self.rank)
        text = f"{self.where} {work.operation}: this rank {reason}"
        broken = GroupAbortedError(text, self.rank, cause=reason.cause, **work.operation.about)
        self.break_by(broken, Departure(self.rank, reason), work.end)
        work.end(broken)  # where the group was broken before

    def _stop(self, tell: Callable[[], None]) -> None:
        """Ends everything in flight with errors, after the other ranks were told."""
        try:
            tell()
        finally:
            self._fail_all()

    def _fail_all(self) -> None:
        with self.calling:
            self._take_unfinished()
            failing = list(self._active)
            for work in failing:
                work.end(self.stopped_error(work.operation))
                self._let_go(work)
        self._tell_ends(failing)

    def _let_go(self, work: MPIWork) -> None:
        """Cancels a receive, so that nothing more is written; what cannot be cancelled keeps its memory."""
        if work.released:
            return
        if work.receives and self.libmpi.may_call():
            work.in_flight.cancel()
        _abandoned.append(work)
        work.released = True

    # ---- life ----------------------------------------------------------------------------------------------

    def note_creation(self) -> None:
        """Tells the others that this rank makes its communicators; raises the store's errors."""
        self._shared.set(f"calls/{self.rank}", "")

    def not_in_creation(self) -> list[int]:
        """Returns the ranks that have not come to it; raises the store's errors."""
        return [rank for rank in range(self.size) if not self._shared.check([f"calls/{rank}"])]

    def _delete_keys(self) -> None:
        delete_keys(self._shared, [f"calls/{rank}" for rank in range(self.size)])

    def leave_to_parent(self) -> None:
        """Fails, in a forked child, what is under way there, and leaves MPI alone."""
        self.calling = threading.RLock()  # nobody lets go of the parent's
        self.left, self.over = belongs_to_parent("the group"), True
        self.cause = GroupAbortedError(f"{self.where} {self.left}")
        self._take_unfinished()
        failing, self._active = self._active, []
        for work in failing:
            work.leave(self.stopped_error(work.operation))
        _abandoned.extend(failing)

    def shutdown(self) -> bool:
        """Finishes what was issued, then ends the group; returns whether nothing of it is left in MPI.

        Errors of the operations stay with their Works.
        """
        while not self.over and (last := self.earlier()[-1:]):
            self.wait_for(last[0], None)
        ends = self.end()
        if ends:
            self.withdraw()
            self.leave()
        return ends and self.cause is None


def _tensors_of(operand: Any) -> Sequence[torch.Tensor]:
    return [operand] if isinstance(operand, torch.Tensor) else list(operand or ())
