"""Synchronous calls that the core has begun and not finished, on their way to the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import collectives._native as _native
from collectives.backends._shared.operation import Operation
from collectives.backends._shared.tensor_memory import part_of
from collectives.backends.mpi.messages import check_length
from collectives.backends.mpi.native_exchange import steps_of
from collectives.backends.mpi.work import MPIWork, ProgressEngine
from collectives.core.operations import OPERATIONS, Operand
from collectives.core.recording.flight_record import BegunByCore, FlightRecord

__all__ = ["Unfinished"]

_NAMES = {one.opcode: one.name for one in OPERATIONS if one.name == one.collective}
_SINGLE_NAMES = _NAMES | {
    one.opcode: one.name for one in OPERATIONS if Operand.PARTS in {one.output, one.input}
}


class Unfinished:
    """The calls of one group that the core has left unfinished and the engine has not taken over.

    The handler of a signal may raise in the moment in which the core returns, before its caller has the
    operation. The core has entered it here by then, so that it goes on all the same.

    Attributes:
        operations: these calls; the core appends to it.

    Args:
        record: the group's flight record.
        mpi: the module ``mpi4py.MPI``.
        timeout: tells the group's time limit.
    """

    def __init__(self, record: FlightRecord, mpi: Any, timeout: Callable[[], timedelta]) -> None:
        self.operations: list[_native.MpiInFlight] = []
        self._record = record
        self._mpi = mpi
        self._timeout = timeout

    def work_of(self, engine: ProgressEngine, in_flight: _native.MpiInFlight) -> MPIWork:
        """Returns a Work that drives an operation of the core.

        Two Works of one operation do no harm: each ends when the core says that it is over.
        """
        after: Callable[[], None] | None = None
        if in_flight.is_message:
            sends, tensor, peer, tag = in_flight.call
            name, way = ("send", "to") if sends else ("recv", "from")
            operation = self._operation(name, in_flight, [tensor], f"{way} rank {peer}, tag {tag}")
            if not sends:

                def after() -> None:
                    check_length(engine.where, operation, in_flight.moved, part_of(tensor).nbytes)
        else:
            opcode, list_form, *_ = in_flight.call
            operation = self._operation((_NAMES if list_form else _SINGLE_NAMES)[opcode], in_flight)
        return MPIWork(
            engine,
            operation,
            steps_of(in_flight, self._mpi),
            after,
            [in_flight],
            point_to_point=in_flight.is_message,
            recorded=BegunByCore(self._record, in_flight),
        )

    def _operation(
        self, name: str, in_flight: _native.MpiInFlight, tensors: Sequence[Any] = (), detail: str = ""
    ) -> Operation:
        return Operation(self._record, name, in_flight.number, tensors, self._timeout(), detail)
