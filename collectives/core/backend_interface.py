"""What a backend implements: operations that it must, and others derived from those until it does better.

All of them keep the contract of :class:`~collectives.ProcessGroup`, whose public methods check the arguments
first. Costs are stated in S, the bytes of one rank's tensor, for n ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from collectives.core.arguments.staging import dense, dense_outputs, is_dense, write
from collectives.core.capabilities import Capabilities
from collectives.core.operations import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Call
from collectives.core.work import CoalescedWork, FinishingWork, Work
from collectives.dynamo import Uncompiled
from collectives.errors import DistError

__all__ = ["BackendInterface"]

_TAG = 2**31 - 1
"""Tag of the messages of derived collectives; they arrive in order, so one tag is enough."""


class BackendInterface(Uncompiled, ABC):
    """The operations of one backend: ranks count within the group, arguments are checked."""

    _rank: int
    _size: int

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this group can do; constant over its life."""

    @property
    def detects_mismatch(self) -> bool:
        """Whether ranks that call different collectives get an error instead of waiting for ever."""
        return False

    def lost_ranks(self) -> list[int]:
        """Returns the ranks of this group that are known to have died, without waiting for news of any.

        Empty where the backend does not watch its ranks.
        """
        return []

    @abstractmethod
    def name(self) -> str:
        """Returns the backend's name, such as ``"host"``."""

    def issue(self, call: Call) -> Work:
        """Issues a collective whose arguments were checked.

        A backend implements this method, or one for each collective, by the name of its user function with an
        underscore in front: ``_broadcast(call)``, ``_all_reduce(call)`` and ``_all_gather(call)`` at least.
        What it leaves out is derived from these.

        Args:
            call: the collective, with its tensors and options.

        Returns:
            Work whose result is the outputs of the call.
        """
        handler: Callable[[Call], Work] | None = getattr(self, call.operation.handler, None)
        if handler is None:
            raise NotImplementedError(
                f"{type(self).__name__} implements neither issue() nor {call.operation.handler}()"
            )
        return handler(call)

    @abstractmethod
    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Sends a tensor; done when it may be overwritten."""

    @abstractmethod
    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        """Receives a tensor; from any rank when ``src`` is ``None``. The finished Work knows the sender."""

    @abstractmethod
    def abort(self) -> None:
        """Breaks the group at once: every operation waiting on this rank raises ``GroupAbortedError``.

        May be called from any thread, any number of times, never blocks on peers. Peers that wait for this
        rank raise as soon as the backend lets them know. Resources are freed.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the group in order: finishes what was issued, then frees threads, memory and connections.

        Idempotent. All ranks call it; none waits for another beyond outstanding operations.
        """

    # ---- the fast path -----------------------------------------------------------------------------

    def fast_collective(
        self,
        opcode: int,  # noqa: ARG002
        output: Any = None,  # noqa: ARG002
        input: Any = None,  # noqa: ARG002
        reduce_op: int = 0,  # noqa: ARG002
        root: Any = 0,  # noqa: ARG002
        list_form: bool = False,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> Work | None:
        """Issues a collective whose arguments need neither checks nor conversions in Python; optional.

        Callers that want the shortest way try this first, once, and call the ordinary method where it returns
        ``None``. Ranks may differ in that: both ways carry out the same operation. A backend takes the calls
        that nearly all calls are, such as dense tensors of one data type with the group's own time limit, and
        leaves the rest to the ordinary methods, wrong arguments among it. Here it takes none.

        Args:
            opcode: number of the collective, of :mod:`collectives.core.operations`.
            output: what is written, or read and written.
            input: what is only read.
            reduce_op: code of the :class:`~collectives.ReduceOp`.
            root: the root, counted within the group.
            list_form: whether the larger operand is a list of one tensor for each rank.
            async_op: whether to return before the operation is done.

        Returns:
            The Work, for a synchronous operation :data:`~collectives.core.work.COMPLETED`; ``None`` with
            nothing done.

        Raises:
            DistBackendError: the operation was taken, and failed.
        """
        return None

    def fast_message(
        self,
        sends: bool,  # noqa: ARG002
        tensor: torch.Tensor,  # noqa: ARG002
        peer: int,  # noqa: ARG002
        tag: int,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> Work | None:
        """Sends or receives a tensor, as :meth:`fast_collective` issues a collective.

        Args:
            sends: whether to send it, else to receive it.
            tensor: the message.
            peer: the other rank, counted within the group.
            tag: number that both sides name.
            async_op: whether to return before the operation is done.

        Returns:
            The Work, as of :meth:`fast_collective`; ``None`` with nothing done.
        """
        return None

    # ---- operations together, splits ------------------------------------------------------------------

    @property
    def needs_batches(self) -> bool:
        """Whether messages that ranks call one by one, all sending first, may wait for each other for ever.

        Those of a batch start together, and never do.
        """
        return False

    def _together(self) -> AbstractContextManager[None]:
        """Lets the operations that this thread issues in a ``with`` block start together, at its end.

        Their Works are good after the block. For groups whose operations wait for each other in the order of
        their calls; here each starts by itself.
        """
        return nullcontext()

    def _issue_together(self, issue: Callable[[], list[Work]]) -> Work:
        """Returns the one Work of several operations that ``issue`` issues, started together."""
        with self._together():
            works = issue()
        return CoalescedWork(works)

    def _settings(self) -> dict[str, int]:
        """Returns what DDP's logging data tell of the group, by the names that torch has for it."""
        return {}

    def note_refusal(self) -> None:
        """Takes note that this rank refuses an operation that the others may wait in."""

    def _raise_failure(self) -> None:
        """Raises what broke the group, where operations may fail after their ``wait()`` has returned."""

    def _first_cause(self) -> DistError | None:
        """Returns what broke the group; ``None`` where nothing has, or where the backend does not know it.

        Its attributes are those that all ranks read.
        """
        return None

    def _begin_abort(self) -> None:
        """Lets an abort begin whose end may wait for other groups; :meth:`abort` of this one follows soon.

        Called on all groups that are to be aborted before the first is. Does not block, nor raise. Nothing is
        to be done where an abort waits for no other group.
        """

    def _break_for(self, cause: DistError) -> None:  # noqa: ARG002
        """Breaks the group, unless it is, because another group of the same ranks is broken.

        All ranks raise errors with the class and the attributes that they have there. May be called from any
        thread, never blocks on peers, and leaves it to :meth:`abort` or :meth:`shutdown` to free what the
        group holds. Here it aborts, for which the other ranks blame this one.

        Args:
            cause: what broke the other group, such as its :meth:`_first_cause`.
        """
        self.abort()

    def _bind_device(self, device: torch.device) -> None:
        """Takes note that the process is bound to a device; called by all ranks, and may connect them there.

        Args:
            device: the device, with its index where it has one.
        """

    def _decline_split(self) -> None:
        """Takes part in making a group of other ranks, whose connections are split off this one's.

        Called on the ranks that do not become members; here there is nothing to split.
        """

    # ---- derived collectives --------------------------------------------------------------------------

    def _all_reduce_coalesced(self, call: Call) -> Work:
        """All-reduce of each tensor, or of a copy of it where it has gaps or shares memory with another."""
        separate = dense_outputs(call.outputs, separate=True)
        work = self._issue_together(
            lambda: [self.issue(call.as_(ALL_REDUCE, [tensor])) for tensor in separate.stand_ins]
        )
        return separate.finish(work, call.async_op)

    def _all_reduce_into_tensor(self, call: Call) -> Work:
        """All-reduce of the output, into which the input is copied."""
        if call.output.data_ptr() != call.input.data_ptr():
            write(call.output, dense(call.input))
        elif not (is_dense(call.output) and is_dense(call.input)):  # views of the same memory
            write(call.output, dense(call.input).clone())
        return self.issue(call.as_(ALL_REDUCE, call.outputs))

    def _reduce(self, call: Call) -> Work:
        """All-reduce of a copy; the root keeps the result. As much traffic as an all-reduce."""
        scratch = call.output.detach().clone()
        work = self.issue(call.as_(ALL_REDUCE, [scratch]))

        def keep() -> None:
            if call.writes_on(self._rank):
                write(call.output, scratch)

        return FinishingWork(work, keep, call.outputs, call.async_op)

    def _all_gather_into_tensor(self, call: Call) -> Work:
        """All-gather into a list of dense parts, concatenated at the end."""
        form = torch.contiguous_format
        parts = [torch.empty_like(call.input, memory_format=form) for _ in range(self._size)]
        work = self.issue(call.as_(ALL_GATHER, parts, call.inputs))
        return FinishingWork(
            work,
            lambda: write(call.output, torch.cat([part.reshape(-1) for part in parts])),
            call.outputs,
            call.async_op,
        )

    def _gather(self, call: Call) -> Work:
        """Every rank sends to the root: (n - 1) S into one rank."""
        if not call.writes_on(self._rank):
            return self._send(call.input, call.root, _TAG)
        works = [self._recv(out, r, _TAG) for r, out in enumerate(call.outputs) if r != self._rank]
        write(call.outputs[self._rank], call.input)
        return CoalescedWork(works)

    def _scatter(self, call: Call) -> Work:
        """The root sends to every rank: (n - 1) S out of one rank."""
        if self._rank != call.root:
            return self._recv(call.output, call.root, _TAG)
        works = [self._send(part, r, _TAG) for r, part in enumerate(call.inputs) if r != self._rank]
        write(call.output, call.inputs[self._rank])
        return CoalescedWork(works)

    def _reduce_scatter(self, call: Call) -> Work:
        """All-reduce of the concatenation, of which each rank keeps its part."""
        flat = torch.cat([part.detach().reshape(-1) for part in call.inputs])
        work = self.issue(call.as_(ALL_REDUCE, [flat]))
        parts = torch.split(flat, [part.numel() for part in call.inputs])
        return FinishingWork(work, lambda: write(call.output, parts[self._rank]), call.outputs, call.async_op)

    def _reduce_scatter_tensor(self, call: Call) -> Work:
        """Reduce-scatter of the list of equal parts."""
        count = call.output.numel()
        flat = call.input.detach().contiguous().view(-1)
        parts = torch.split(flat, count) if count else [call.output] * self._size
        return self.issue(call.as_(REDUCE_SCATTER, call.outputs, parts))

    def _all_to_all(self, call: Call) -> Work:
        """A message for every pair of ranks; messages take the group's time limit."""
        others = [r for r in range(self._size) if r != self._rank]
        # sends first: a backend may receive before it returns, but must not wait for receivers
        works = [self._send(call.inputs[r], r, _TAG) for r in others if call.inputs[r].numel()]
        works += [self._recv(call.outputs[r], r, _TAG) for r in others if call.outputs[r].numel()]
        write(call.outputs[self._rank], call.inputs[self._rank])
        return CoalescedWork(works)

    def _all_to_all_single(self, call: Call) -> Work:
        """All-to-all of lists of dense parts; splits count elements."""
        output, tensor = call.output, call.input
        sent = torch.split(tensor.detach().contiguous().view(-1), list(call.input_splits or ()))
        flat = torch.empty(output.numel(), dtype=output.dtype, device=output.device)
        parts = torch.split(flat, list(call.output_splits or ()))
        work = self.issue(call.as_(ALL_TO_ALL, parts, sent))
        return FinishingWork(work, lambda: write(output, flat), call.outputs, call.async_op)
