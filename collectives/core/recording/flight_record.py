"""The last operations of one group, and totals of all of them.

**Where the record lives.** Each group has a :class:`FlightRecord`: a ring of its last operations (256;
``COLLECTIVES_FLIGHT_RECORD`` says how many) and running totals by name. Whoever carries an operation out
writes it, when it begins and when it has ended, so that the numbers are those of error messages, and a
wrapper such as ``round_robin`` shows as its lanes. Nothing is sent, and no tensor is kept alive.

What the C++ core carries out by itself (``host`` as a whole, synchronous calls of ``mpi`` on dense tensors)
it writes into a ring of its own (``backends/native/engine/operation_record.hpp``). The record shows both as
one, in the order in which operations began. Of those of the core it has flat shapes, the number of
elements, and of ``host`` no names of forms: ``all_gather_into_tensor`` is ``all_gather``.

**What it costs.** ``gloo``, ``nccl`` and the general path of ``mpi`` make a description of each operation
anyway, for messages; recording adds two looks at the clock and an append. The core stores to a cache line
or two, without a lock, in memory that it has from the start, and looks at the clock once more, over ``mpi``
twice. Readers hold up nobody: they leave out an entry that is overwritten meanwhile.

**When it is read.** By call, at the first error of a group and on a signal
(:mod:`~collectives.core.recording.dump`), as JSON;
``collectives trace`` makes of the files of all ranks what viewers and torch's analyzer read.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import collectives._native as _native

_CAPACITY = "COLLECTIVES_FLIGHT_RECORD"
_DEFAULT_CAPACITY = 256
_LARGEST_CAPACITY = 1_000_000
"""Of which the core of a group takes 256 MB."""

Totals = dict[str, dict[str, float]]
"""By name of the operation: ``count``, ``bytes``, ``errors``, ``seconds``."""


class Recorded(Protocol):
    """An operation in the record, as the code that carries it out sees it."""

    def end(self, error: BaseException | None = None) -> None:
        """Notes that the operation is done, or failed; the first call counts."""


@dataclass(slots=True, eq=False)
class RecordedOperation:
    """An operation that has begun.

    Attributes:
        name: name of its user function.
        number: its place among the operations of its kind that the group issued.
        detail: what else tells it apart, such as the reduction or the peer.
        shape: shape of its first tensor; ``None`` where it has none.
        dtype: data type of that tensor or its name, which is asked for when read; empty where it has none.
        tensors: number of its tensors.
        nbytes: their bytes.
        timeout: its time limit.
        site: the source line that issued it, where that is known.
        began: when it began, in nanoseconds of the monotonic clock.
        ended: when it ended; 0 where it has not.
        error: why it failed.
    """

    _record: FlightRecord
    name: str
    number: int
    detail: str
    shape: tuple[int, ...] | None
    dtype: object
    tensors: int
    nbytes: int
    timeout: timedelta
    site: str = ""
    began: int = field(default_factory=time.monotonic_ns, init=False)
    ended: int = field(default=0, init=False)
    error: str = field(default="", init=False)

    def end(self, error: BaseException | None = None) -> None:
        """Notes that the operation is done, or failed; the first call counts."""
        now, record = time.monotonic_ns(), self._record
        with record.lock:
            if self.ended:
                return
            self.ended = now
            totals = record.totals_of[self.name]
            totals["seconds"] += (now - self.began) / 1e9
            if error is None:
                return
            self.error = _text_of(error)
            totals["errors"] += 1
        record.tell_if_first(self.error)

    @property
    def state(self) -> str:
        """``pending``, ``done`` or ``failed``."""
        if not self.ended:
            return "pending"
        return "failed" if self.error else "done"

    def values(self) -> dict[str, Any]:
        """Returns all that is known, for JSON; times are nanoseconds of the monotonic clock."""
        return {
            "number": self.number,
            "name": self.name,
            "detail": self.detail,
            "shape": None if self.shape is None else list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "timeout_seconds": self.timeout.total_seconds(),
            "site": self.site,
            "state": self.state,
            "began_ns": self.began,
            "ended_ns": self.ended or None,
            "error": self.error,
        }


class BegunByCore:
    """An operation that the core has begun, and entered into its ring, and that Python carries on.

    Args:
        record: the record of its group.
        in_flight: the operation.
    """

    def __init__(self, record: FlightRecord, in_flight: _native.MpiInFlight) -> None:
        self._record = record
        self._in_flight = in_flight

    def end(self, error: BaseException | None = None) -> None:
        """Notes that the operation is done, or failed; the first call counts."""
        self._in_flight.end("" if error is None else _text_of(error))
        if error is not None:
            self._record.tell_first_error()


class FlightRecord:
    """The last operations of a group, and totals of all of them.

    What the C++ core carries out is in a ring of its own (:attr:`of_core`), which it writes without Python;
    whoever reads the record finds the operations of both in the order in which they began.

    Thread safety: every method may be called from any thread.

    Attributes:
        lock: guards the operations that Python enters, and their totals.
        totals_of: these totals.

    Args:
        on_first_error: called after the first operation has failed, on the thread that found out.

    Raises:
        ValueError: ``COLLECTIVES_FLIGHT_RECORD`` is no number of operations, or above a million.
    """

    def __init__(self, on_first_error: Callable[[str], None]) -> None:
        self._capacity = _capacity()
        self._operations: deque[RecordedOperation] = deque(maxlen=self._capacity)
        self._of_core: _native.OperationRecord | None = None
        self.totals_of: Totals = {}
        self._begun = 0
        self._failed = False
        self._generations: list[int] = []
        self.lock = threading.RLock()  # a signal handler may read the record while its thread writes
        self.at_first_error = [on_first_error]

    @property
    def of_core(self) -> _native.OperationRecord:
        """The ring of the core, for groups that it carries out operations of."""
        if self._of_core is None:
            self._of_core = _native.OperationRecord(self._capacity)
        return self._of_core

    def tell_first_error(self) -> None:
        """Reports the first error if the core found it; called by receivers of an error of the core."""
        error = "" if self._of_core is None else self._of_core.first_error
        if error:
            self.tell_if_first(error)

    def tell_if_first(self, error: str) -> None:
        """Tells of an error unless there was one before."""
        with self.lock:
            first, self._failed = not self._failed, True
        if first:
            for listener in list(self.at_first_error):
                listener(error)

    def begin_generation(self) -> None:
        """Notes that the group has other members from now on, whose first error is told again."""
        with self.lock:
            self._generations.append(time.monotonic_ns())
            self._failed = False

    def generation_of(self, operation: RecordedOperation) -> int:
        """Returns how often the group had taken other members when an operation began."""
        return bisect.bisect(self._generations, operation.began)

    def begin(self, operation: RecordedOperation) -> None:
        """Adds an operation; the oldest one makes room."""
        with self.lock:
            self._operations.append(operation)
            self._begun += 1
            totals = self.totals_of.get(operation.name)
            if totals is None:
                totals = self.totals_of[operation.name] = dict.fromkeys(
                    ("count", "bytes", "errors", "seconds"), 0
                )
            totals["count"] += 1
            totals["bytes"] += operation.nbytes

    def operations(self) -> list[RecordedOperation]:
        """Returns the operations that are kept, in the order in which they began."""
        with self.lock:
            kept = list(self._operations)
        if self._of_core is None:
            return kept
        kept += [self._read(*values) for values in self._of_core.operations()]
        kept.sort(key=lambda operation: operation.began)
        return kept[-self._capacity :] if self._capacity else []

    def _read(self, *values: Any) -> RecordedOperation:
        """Returns an operation of the core's ring; times are nanoseconds."""
        number, name, detail, *tensors, timeout, began, ended, error, site = values
        limit = timedelta(microseconds=timeout // 1000)
        made: Any = RecordedOperation
        operation: RecordedOperation = made(self, name, number, detail, *tensors, limit, site)
        operation.began, operation.ended, operation.error = began, ended, error
        return operation

    def totals(self) -> Totals:
        """Returns the totals of all operations so far."""
        with self.lock:
            totals = {name: dict(values) for name, values in self.totals_of.items()}
        if self._of_core is not None:
            add_totals(totals, self._of_core.totals())
        return totals

    @property
    def begun(self) -> int:
        """Number of operations so far."""
        return self._begun + (0 if self._of_core is None else self._of_core.begun)


def add_totals(totals: Totals, more: Totals) -> None:
    """Adds the totals of another group."""
    for name, values in more.items():
        sums = totals.setdefault(name, dict.fromkeys(values, 0))
        for key, value in values.items():
            sums[key] += value


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()


def _capacity() -> int:
    text = os.environ.get(_CAPACITY, "")
    if not text:
        return _DEFAULT_CAPACITY
    if not text.isdecimal() or len(text) > 9 or int(text) > _LARGEST_CAPACITY:
        raise ValueError(
            f"{_CAPACITY} must be a number of operations, 0 to {_LARGEST_CAPACITY}, but is {text!r}"
        )
    return int(text)
