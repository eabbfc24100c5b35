"""How operations begin: by MPI's calls, the C++ core, stages or messages; and the fast path."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from collectives.backends._shared.operation import Operation
from collectives.backends._shared.tensor_memory import Part, part_of
from collectives.backends.mpi.cuda import copy_own, on_device, synchronize_streams
from collectives.backends.mpi.engine import Engine
from collectives.backends.mpi.messages import Arithmetic, MessageExchange, Tags
from collectives.backends.mpi.native_exchange import NativeExchange
from collectives.backends.mpi.work import MPIWork, Steps
from collectives.core.arguments.staging import dense_outputs
from collectives.core.profiling import profiler
from collectives.core.work import COMPLETED, Work

__all__ = ["Dispatcher", "FastPath"]


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


class Dispatcher:
    """Begins operations, and hands them to the progress engine, which waits for those that are synchronous.

    The methods return the operation's Work, and raise where the group is broken or ended. All of them take
    the operation, as messages describe it; whether it is ``asynchronous``; ``after``, its last local step;
    what to ``keep`` alive until its end; and ``nbytes``, from which the engine estimates its duration.

    Args:
        engine: the engine.
        native: what the core carries out.
        messages: messages of the group's own.
        rank: this process's rank.
        size: number of ranks.
    """

    def __init__(
        self,
        engine: Engine,
        native: NativeExchange,
        messages: MessageExchange,
        rank: int,
        size: int,
    ) -> None:
        self._engine = engine
        self._native = native
        self._messages = messages
        self._rank = rank
        self._size = size

    def by_calls(
        self,
        operation: Operation,
        issue: Callable[[], list[Any]],
        asynchronous: bool,
        after: Callable[[], None] | None = None,
        keep: Sequence[Any] = (),
        nbytes: int = 0,
        *,
        status: Any = None,
        point_to_point: bool = False,
    ) -> Work:
        """Begins an operation that is done when the requests of its only calls are.

        Args besides the class's:
            issue: makes the calls; returns their requests.
            status: MPI's status of a receive, which is one request.
            point_to_point: whether it is a message of the user's, and not a collective.
        """

        def steps() -> Steps:
            yield issue()

        return self._begin(
            operation,
            steps(),
            asynchronous,
            after,
            keep,
            nbytes,
            status=status,
            point_to_point=point_to_point,
        )

    def by_core(
        self,
        operation: Operation,
        asynchronous: bool,
        after: Callable[[], None] | None = None,
        keep: Sequence[Any] = (),
        nbytes: int = 0,
        *,
        then: Iterable[list[Any]] = (),
        **what: Any,
    ) -> Work:
        """Begins a collective that the core carries out.

        Args besides the class's:
            then: stages after the core's.
            **what: the collective, as ``_native.MpiFastPath.issue`` takes it.
        """
        steps = itertools.chain(self._native.steps(**what), then)
        return self._begin(operation, steps, asynchronous, after, keep, nbytes)

    def reduce(
        self,
        operation: Operation,
        parts: Sequence[Part],
        target: int,
        arithmetic: Arithmetic,
        asynchronous: bool,
        after: Callable[[], None] | None,
        keep: Sequence[Any],
        *,
        outputs: Sequence[Part] = (),
        root: int | None = None,
    ) -> Work:
        """Begins a reduction in stages; the arguments are those of :meth:`MessageExchange.reduce`."""
        steps = self._messages.reduce(parts, target, arithmetic, outputs=outputs, root=root)
        nbytes = sum(part.nbytes for part in parts)
        return self._begin(operation, steps, asynchronous, after, keep, nbytes)

    def move(
        self,
        operation: Operation,
        sent: Sequence[torch.Tensor | None] | None,
        outputs: Sequence[torch.Tensor | None] | None,
        asynchronous: bool,
    ) -> Work:
        """Sends a dense tensor to each rank and receives one from each; ``None`` stands for nothing."""
        staged = dense_outputs(tensor for tensor in outputs or () if tensor is not None)
        stand_ins = iter(staged.stand_ins)
        nothing = [None] * self._size
        targets = [None if output is None else next(stand_ins) for output in outputs or nothing]
        received = [None if target is None else part_of(target) for target in targets]
        given = [None if tensor is None else part_of(tensor) for tensor in sent or nothing]
        keep = [*(sent or ()), *staged.stand_ins]
        target, source, place = targets[self._rank], (sent or nothing)[self._rank], received[self._rank]
        if target is not None and source is not None and place is not None and target.is_cuda:
            copy_own(target, place, source, part_of(source))
            given[self._rank] = place
        return self.move_parts(operation, given, received, asynchronous, staged.last_step, keep)

    def move_parts(
        self,
        operation: Operation,
        sent: Sequence[Part | None],
        received: Sequence[Part | None],
        asynchronous: bool,
        after: Callable[[], None] | None,
        keep: Sequence[Any],
    ) -> Work:
        """Sends each rank a part of memory and receives one from each; ``None`` stands for nothing."""
        steps = self._messages.move(sent, received)
        nbytes = sum(part.nbytes for part in (*sent, *received) if part is not None)
        return self._begin(operation, steps, asynchronous, after, keep, nbytes)

    def _begin(
        self,
        operation: Operation,
        steps: Steps,
        asynchronous: bool,
        after: Callable[[], None] | None,
        keep: Sequence[Any],
        nbytes: int,
        status: Any = None,
        *,
        point_to_point: bool = False,
    ) -> Work:
        synchronize_streams(keep)
        after = on_device(operation.outputs, after)

        def make() -> MPIWork:
            return MPIWork(self._engine, operation, steps, after, keep, status, nbytes, point_to_point)

        return self._engine.issue(operation, make, asynchronous)
