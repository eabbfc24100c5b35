"""Synchronous calls that go the short way without a Work, as long as nothing is out of the ordinary."""

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
from collectives.backends.mpi.native_exchange import ShortWay
from collectives.backends.mpi.work import MPIWork
from collectives.errors import DistBackendError

__all__ = ["PlainCalls", "check_length"]

_NAMES = {kind: name for name, kind in _native.COLLECTIVES.items()}


def check_length(where: str, operation: Operation, got: int, nbytes: int) -> None:
    """Raises a DistBackendError where a message is not as long as the tensor that received it."""
    if got != nbytes:
        raise DistBackendError(
            f"{where} {operation}: the message has {got} bytes, but the tensor that receives it {nbytes}"
        )


class PlainCalls:
    """``plain`` and ``plain_message`` of one group; see :meth:`collectives.ProcessGroup.plain`.

    Args:
        short: the short way.
        engine: the engine, for what takes long or fails.
        tags: the tags of users' messages.
        size: number of ranks.
        timeout: tells the group's time limit.
    """

    def __init__(
        self, short: ShortWay, engine: Engine, tags: Tags, size: int, timeout: Callable[[], timedelta]
    ) -> None:
        self._short = short
        self._engine = engine
        self._tags = tags
        self._size = size
        self._timeout = timeout

    def collective(
        self,
        kind: int,
        output: Any = None,
        input: Any = None,
        op_code: int = 0,
        root: object = 0,
        listed: bool = False,
    ) -> bool:
        """Runs a collective on dense tensors; ``False``, with nothing done, where it is not that simple."""
        engine = self._engine
        if engine.cause is not None or engine.ended or not engine.idle:
            return False
        done = self._short.plain(kind, output, input, op_code, root, listed)
        if done is True or done is False:
            return done
        operation = Operation(_NAMES[kind], done.number, [], self._timeout())
        self._await(MPIWork(engine, operation, [], self._short.steps(done), keep=(done, output, input)))
        return True

    def message(self, sends: bool, tensor: torch.Tensor, peer: int, tag: int) -> bool:
        """Moves a dense tensor to or from a rank; ``False`` as above."""
        engine = self._engine
        if (
            engine.cause is not None
            or engine.ended
            or type(peer) is not int
            or type(tag) is not int
            or not (0 <= peer < self._size and 0 <= tag < self._tags.own)
        ):
            return False
        done = self._short.plain_message(sends, tensor, peer, tag)
        if done is True or done is False:
            return done
        name, detail = ("send", "to") if sends else ("recv", "from")
        operation = Operation(name, done.number, [], self._timeout(), f"{detail} rank {peer}, tag {tag}")

        def check() -> None:
            check_length(engine.where, operation, done.moved, part_of(tensor).nbytes)

        steps, after = self._short.steps(done), None if sends else check
        self._await(MPIWork(engine, operation, [], steps, after, (done, tensor), point_to_point=True))
        return True

    def _await(self, work: MPIWork) -> None:
        try:
            self._engine.launch(work, False)
        except BaseException:  # a signal's, for one: the messages are under way
            self._engine.watch(work)
            raise
