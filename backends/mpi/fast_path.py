"""The fast path of the mpi backend: synchronous calls that the core carries out without a Work."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

import collectives._native as _native
from collectives.backends._shared.operation import Operation
from collectives.backends._shared.tensor_memory import part_of
from collectives.backends.mpi.engine import Engine
from collectives.backends.mpi.messages.tags import Tags
from collectives.backends.mpi.native_exchange import NativeExchange
from collectives.backends.mpi.work import MPIWork
from collectives.core.opcodes import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from collectives.core.profiling import profiler
from collectives.core.recording.flight_record import BegunByCore, FlightRecord
from collectives.core.work import COMPLETED, Work
from collectives.errors import DistBackendError

__all__ = ["FastPath", "check_length"]

_NAMES = {kind: name for name, kind in _native.COLLECTIVES.items()}
_SINGLE_NAMES = _NAMES | {
    ALL_GATHER: "all_gather_into_tensor",
    REDUCE_SCATTER: "reduce_scatter_tensor",
    ALL_TO_ALL: "all_to_all_single",
}


def check_length(where: str, operation: Operation, got: int, nbytes: int) -> None:
    """Raises a DistBackendError where a message is not as long as the tensor that received it."""
    if got != nbytes:
        raise DistBackendError(
            f"{where} {operation}: the message has {got} bytes, but the tensor that receives it {nbytes}",
            **operation.about,
        )


class FastPath:
    """The fast path of one group; see :meth:`collectives.ProcessGroup.fast_collective`.

    Asynchronous calls do not take it.

    Args:
        native: collectives in the C++ core.
        engine: the engine, for what takes long or fails.
        tags: the tags of users' messages.
        size: number of ranks.
        record: the group's flight record.
        timeout: tells the group's time limit.
    """

    def __init__(
        self,
        native: NativeExchange,
        engine: Engine,
        tags: Tags,
        size: int,
        record: FlightRecord,
        timeout: Callable[[], timedelta],
    ) -> None:
        self._native = native
        self._engine = engine
        self._tags = tags
        self._size = size
        self._record = record
        self._timeout = timeout

    def collective(
        self,
        opcode: int,
        output: Any = None,
        input: Any = None,
        reduce_op: int = 0,
        root: Any = 0,
        list_form: bool = False,
        async_op: bool = False,
    ) -> Work | None:
        """Runs a synchronous collective on dense tensors while no other operation is in flight."""
        engine = self._engine
        if async_op or engine.cause is not None or engine.ended or not engine.idle:
            return None
        if profiler._is_profiler_enabled:
            return None
        done = self._native.fast_collective(opcode, output, input, reduce_op, root, list_form)
        if done is True or done is False:
            return COMPLETED if done else None
        name = (_NAMES if list_form else _SINGLE_NAMES)[opcode]
        operation = Operation(self._record, name, done.number, [], self._timeout())
        steps, keep = self._native.steps(done), (done, output, input)
        recorded = BegunByCore(self._record, done)
        self._await(MPIWork(engine, operation, [], steps, None, keep, recorded=recorded))
        return COMPLETED

    def message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, async_op: bool = False
    ) -> Work | None:
        """Moves a dense tensor to or from a rank, synchronously."""
        engine = self._engine
        if (
            async_op
            or profiler._is_profiler_enabled
            or engine.cause is not None
            or engine.ended
            or type(peer) is not int
            or type(tag) is not int
            or not (0 <= peer < self._size and 0 <= tag < self._tags.own)
        ):
            return None
        done = self._native.fast_message(sends, tensor, peer, tag)
        if done is True or done is False:
            return COMPLETED if done else None
        name, detail = ("send", "to") if sends else ("recv", "from")
        about = f"{detail} rank {peer}, tag {tag}"
        operation = Operation(self._record, name, done.number, [tensor], self._timeout(), about)

        def check() -> None:
            check_length(engine.where, operation, done.moved, part_of(tensor).nbytes)

        steps, after, keep = self._native.steps(done), None if sends else check, (done, tensor)
        recorded = BegunByCore(self._record, done)
        self._await(
            MPIWork(engine, operation, [], steps, after, keep, point_to_point=True, recorded=recorded)
        )
        return COMPLETED

    def _await(self, work: MPIWork) -> None:
        try:
            self._engine.launch(work, False)
        except BaseException:  # a signal's, for one: the messages are under way
            self._engine.watch(work)
            raise
