"""The fast path of the mpi backend: synchronous calls that the core carries out without a Work."""

from __future__ import annotations

from typing import Any

import torch

from collectives.backends.mpi.engine import Engine
from collectives.backends.mpi.messages.tags import Tags
from collectives.backends.mpi.native_exchange import NativeExchange
from collectives.core.profiling import profiler
from collectives.core.work import COMPLETED, Work

__all__ = ["FastPath"]


class FastPath:
    """The fast path of one group; see :meth:`collectives.ProcessGroup.fast_collective`.

    Asynchronous calls do not take it.

    Args:
        native: collectives in the C++ core.
        engine: the engine, for what takes long or fails.
        tags: the tags of users' messages.
        size: number of ranks.
    """

    def __init__(self, native: NativeExchange, engine: Engine, tags: Tags, size: int) -> None:
        self._native = native
        self._engine = engine
        self._tags = tags
        self._size = size

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
        try:
            done = self._native.fast_collective(opcode, output, input, reduce_op, root, list_form)
            if done is False:
                return None
            if done is not True:
                engine.carry_on(done)
        except BaseException:
            engine.watch()  # a signal's handler may have raised: the messages are under way
            raise
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
        try:
            done = self._native.fast_message(sends, tensor, peer, tag)
            if done is False:
                return None
            if done is not True:
                engine.carry_on(done)
        except BaseException:
            engine.watch()  # as above
            raise
        return COMPLETED
