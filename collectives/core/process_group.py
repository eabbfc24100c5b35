"""ProcessGroup: the contract between those who communicate and the backends that carry it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from collectives.core import operations, profiling
from collectives.core.arguments import validation as check
from collectives.core.arguments.validation import TensorLists, Tensors
from collectives.core.backend_interface import RECONFIGURE, BackendInterface
from collectives.core.operations import Operation
from collectives.core.types import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from collectives.core.work import Work
from collectives.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    PeerLostError,
    ranks_in_words,
)
from collectives.store.joining.agreement import exchange


class ProcessGroup(BackendInterface):
    """A set of ranks that communicate (PyTorch Distributed, VLDB 2020, section 3.3).

    **Order.** All members issue the same collectives in the same order; a group executes them in that order.
    Point-to-point operations match by sender, receiver and tag, in order, apart from the collectives.
    Different groups progress independently.

    **Members.** The set is fixed, unless all who are to be in it call :meth:`reconfigure`.

    **Work.** Every operation returns a :class:`~collectives.Work`. Its tensors must not be touched until it
    is done; inputs are then unchanged and outputs complete. Outputs may be the inputs where a method says "in
    place"; other overlap is undefined.

    **Arguments.** Methods have the names and forms of ``torch.distributed.ProcessGroup``: a list of one
    tensor and an option record, or a tensor and the record's fields. One process drives one device, so lists
    of tensors "per device" hold one. All ranks in arguments count within the group.

    **Threads.** Any thread may issue operations. Threads that issue collectives on one group must agree on
    the order among themselves.

    A backend derives from this class and implements the abstract methods of
    :class:`~collectives.core.backend_interface.BackendInterface`, and any of its derived operations that it
    can do better. Those get checked arguments.

    Args:
        rank: this process's rank within the group.
        size: number of ranks.
        timeout: time limit of operations that name none.
        store: the group's own key/value store.
        group_name: name, unique in the job.
        group_desc: free text.

    Raises:
        TypeError: an operation got an argument of a wrong type; nothing was sent, as with the next two.
        ValueError: an operation got a wrong shape, size, rank or time limit.
        UnsupportedOperationError: :attr:`capabilities` say no to an operation.
        DistError: ranks issued different operations, a rank died, the time limit passed, or the group has
            ended; a class of :mod:`collectives.errors`, from an operation or its ``Work.wait()``.
    """

    @property
    def _unchecked(self) -> ProcessGroup:
        """The group itself, or what a group that compares calls runs them on."""
        return self

    # ---- one way down ----------------------------------------------------------------------------

    def call(self, operation: Operation, outputs: Any = None, inputs: Any = None, **about: Any) -> Work:
        """Checks the arguments of a collective, and issues it.

        Args:
            operation: its row in :data:`collectives.core.operations.OPERATIONS`.
            outputs: what it writes; a tensor or a list of tensors, as the row says.
            inputs: what it only reads, likewise.
            about: ``op``, ``root``, ``timeout``, ``async_op``, ``output_split_sizes``, ``input_split_sizes``
                and ``device``, as :class:`~collectives.core.operations.Call` has them.

        Returns:
            Work whose result is the outputs.
        """
        if not profiling.profiler._is_profiler_enabled:
            return self.issue(check.checked_call(self, operation, outputs, inputs, **about))
        shown = outputs if operation.in_place or operation is operations.SCATTER else inputs
        return self._shown(
            operation.collective,
            shown,
            lambda: self.issue(check.checked_call(self, operation, outputs, inputs, **about)),
        )

    def _overloaded(
        self, operation: Operation, outputs: Any, inputs: Any, opts: Any, timeout: Any = None, **about: Any
    ) -> Work:
        """Issues a collective whose arguments have one of torch's forms."""
        return self.call(
            operation, outputs, inputs, **check.overload_arguments(operation, opts, timeout=timeout, **about)
        )

    def _several(self, operation: Operation, pairs: Sequence[tuple[Any, Any]], opts: Any) -> Work:
        """Issues several collectives of outputs and inputs, which start together and are one to profilers."""
        about = check.overload_arguments(operation, opts)

        def issue() -> list[Work]:
            return [self.call(operation, output, given, **about) for output, given in pairs]

        given = [given for _, given in pairs]
        return self._shown(operation.collective, given, lambda: self._issue_together(issue))

    def _shown(self, event: str, tensors: Any, issue: Callable[[], Work]) -> Work:
        """Issues something under an event of profilers."""
        if profiling.profiler._is_profiler_enabled and profiling.enabled():
            return profiling.observed(f"{self.name()}:{event}", tensors, issue)
        return issue()

    # ---- collectives -----------------------------------------------------------------------------

    def allreduce(
        self,
        tensors: Tensors | None = None,
        opts: AllreduceOptions | ReduceOp | None = None,
        timeout: timedelta | None = None,
        *,
        op: ReduceOp | None = None,
        tensor: torch.Tensor | None = None,
    ) -> Work:
        """Reduces a tensor over all ranks, in place; afterwards it is bitwise the same on every rank.

        Args:
            tensors: tensor of the same shape and data type on every rank; input and output.
            opts: option record, or the reduction; ``None`` for the sum.
            timeout: time limit, for the form without a record; ``None`` for the group's.
            op: the reduction, for the form without a record.
            tensor: other name of ``tensors``.

        Returns:
            Work whose result is the tensor.
        """
        given = tensor if tensors is None else tensors
        return self._overloaded(operations.ALL_REDUCE, given, None, opts, timeout, op=op)

    def allreduce_coalesced(
        self, tensors: Sequence[torch.Tensor], opts: AllreduceOptions | None = None
    ) -> Work:
        """Returns the one work of several :meth:`allreduce`.

        Args:
            tensors: tensors that may differ in shape and data type, the same list on every rank. Tensors that
                share memory are reduced as copies; the last one given stays.
            opts: option record for all of them; ``None`` for sums within the group's time limit.
        """
        return self._overloaded(operations.ALL_REDUCE_COALESCED, tensors, None, opts)

    def broadcast(
        self,
        tensors: Tensors | None = None,
        opts: BroadcastOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        tensor: torch.Tensor | None = None,
    ) -> Work:
        """Copies the root's tensor to all ranks, in place.

        Args:
            tensors: tensor of the same number of elements and data type on every rank; input on the root,
                output elsewhere.
            opts: option record, or the root; ``None`` for rank 0.
            timeout: time limit, for the form without a record; ``None`` for the group's.
            root: the root, for the form without a record.
            tensor: other name of ``tensors``.

        Returns:
            Work whose result is the tensor.
        """
        return self._overloaded(
            operations.BROADCAST, tensor if tensors is None else tensors, None, opts, timeout, root=root
        )

    def reduce(
        self,
        tensors: Tensors | None = None,
        opts: ReduceOptions | int | None = None,
        op: ReduceOp | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        tensor: torch.Tensor | None = None,
    ) -> Work:
        """Reduces a tensor over all ranks to the root, in place there; other ranks' tensors are unchanged.

        Args:
            tensors: tensor of the same shape and data type on every rank.
            opts: option record, or the root; ``None`` for rank 0.
            op: the reduction, for the form without a record; ``None`` for the sum.
            timeout: time limit, for the form without a record; ``None`` for the group's.
            root: the root, for the form without a record.
            tensor: other name of ``tensors``.

        Returns:
            Work whose result is the tensor.
        """
        return self._overloaded(
            operations.REDUCE, tensor if tensors is None else tensors, None, opts, timeout, op=op, root=root
        )

    def allgather(
        self,
        output_tensors: TensorLists,
        input_tensors: Tensors | None = None,
        opts: AllgatherOptions | timedelta | None = None,
        timeout: timedelta | None = None,
        *,
        input_tensor: torch.Tensor | None = None,
    ) -> Work:
        """Gathers every rank's tensor on all ranks.

        Args:
            output_tensors: one tensor for each rank, sized as that rank's input (inputs may differ in size
                where the capabilities say ``uneven``); or a list of one such list.
            input_tensors: this rank's tensor.
            opts: option record, or the time limit.
            timeout: time limit, for the form without a record; ``None`` for the group's.
            input_tensor: other name of ``input_tensors``.

        Returns:
            Work whose result is the outputs.
        """
        given = input_tensor if input_tensors is None else input_tensors
        return self._overloaded(operations.ALL_GATHER, output_tensors, given, opts, timeout)

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: AllgatherOptions | timedelta | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Gathers every rank's tensor into one, in rank order.

        Args:
            output: ``size`` times the elements of ``input``: a concatenation along dimension 0, or a stack.
                May contain ``input`` as its own part.
            input: tensor of the same shape and data type on every rank.
            opts: option record, or the time limit.
            timeout: time limit, for the form without a record; ``None`` for the group's.

        Returns:
            Work whose result is the output.
        """
        return self._overloaded(operations.ALL_GATHER_INTO_TENSOR, output, input, opts, timeout)

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        input_list: Sequence[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Returns the one work of several :meth:`allgather`.

        Args:
            output_lists: for each rank a list of tensors as that rank's ``input_list``.
            input_list: this rank's tensors.
            opts: option record for all of them.
        """
        parts = check.allgather_coalesced(self, output_lists, input_list)
        return self._several(operations.ALL_GATHER, parts, opts)

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Returns the one work of several :meth:`all_gather_single`.

        Args:
            outputs: an output for each input.
            inputs: this rank's tensors.
            opts: option record for all of them.
        """
        pairs = check.check_pairs(self, "all_gather_into_tensor", outputs, inputs)
        return self._several(operations.ALL_GATHER_INTO_TENSOR, pairs, opts)

    def gather(
        self,
        output_tensors: TensorLists | None,
        input_tensors: Tensors | None = None,
        opts: GatherOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        input_tensor: torch.Tensor | None = None,
    ) -> Work:
        """Gathers every rank's tensor on the root.

        Args:
            output_tensors: on the root, one tensor for each rank, or a list of one such list; empty or
                ``None`` elsewhere.
            input_tensors: tensor of the same size and data type on every rank.
            opts: option record, or the root; ``None`` for rank 0.
            timeout: time limit, for the form without a record; ``None`` for the group's.
            root: the root, for the form without a record.
            input_tensor: other name of ``input_tensors``.

        Returns:
            Work whose result is the outputs on the root, and empty elsewhere.
        """
        given = input_tensor if input_tensors is None else input_tensors
        return self._overloaded(operations.GATHER, output_tensors, given, opts, timeout, root=root)

    def scatter(
        self,
        output_tensors: Tensors | None = None,
        input_tensors: TensorLists | None = None,
        opts: ScatterOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        output_tensor: torch.Tensor | None = None,
    ) -> Work:
        """Gives each rank one tensor of the root's list.

        Args:
            output_tensors: tensor of the same size and data type on every rank.
            input_tensors: on the root, one tensor for each rank, or a list of one such list; empty or
                ``None`` elsewhere.
            opts: option record, or the root; ``None`` for rank 0.
            timeout: time limit, for the form without a record; ``None`` for the group's.
            root: the root, for the form without a record.
            output_tensor: other name of ``output_tensors``.

        Returns:
            Work whose result is the output.
        """
        given = output_tensor if output_tensors is None else output_tensors
        return self._overloaded(operations.SCATTER, given, input_tensors, opts, timeout, root=root)

    def reduce_scatter(
        self,
        output_tensors: Tensors | None = None,
        input_tensors: TensorLists | None = None,
        opts: ReduceScatterOptions | ReduceOp | None = None,
        timeout: timedelta | None = None,
        *,
        op: ReduceOp | None = None,
        output: torch.Tensor | None = None,
        input: Sequence[torch.Tensor] | None = None,
    ) -> Work:
        """Reduces a list of tensors over all ranks; rank r keeps entry r.

        Args:
            output_tensors: tensor of the size of ``input_tensors[rank]``; may be that tensor.
            input_tensors: one tensor for each rank (sizes may differ where the capabilities say ``uneven``),
                or a list of one such list.
            opts: option record, or the reduction; ``None`` for the sum.
            timeout: time limit, for the form without a record; ``None`` for the group's.
            op: the reduction, for the form without a record.
            output: other name of ``output_tensors``.
            input: other name of ``input_tensors``.

        Returns:
            Work whose result is the output.
        """
        into = output if output_tensors is None else output_tensors
        parts = input if input_tensors is None else input_tensors
        return self._overloaded(operations.REDUCE_SCATTER, into, parts, opts, timeout, op=op)

    def reduce_scatter_single(
        self,
        outputTensor: torch.Tensor,
        inputTensor: torch.Tensor,
        opts: ReduceScatterOptions | ReduceOp | None = None,
        timeout: timedelta | None = None,
        *,
        op: ReduceOp | None = None,
    ) -> Work:
        """Reduces a tensor over all ranks; rank r keeps part r of equal parts.

        Args:
            outputTensor: this rank's part; may be that part of the input.
            inputTensor: ``size`` times the elements of the output, as a concatenation or a stack along
                dimension 0.
            opts: option record, or the reduction; ``None`` for the sum.
            timeout: time limit, for the form without a record; ``None`` for the group's.
            op: the reduction, for the form without a record.

        Returns:
            Work whose result is the output.
        """
        return self._overloaded(
            operations.REDUCE_SCATTER_TENSOR, outputTensor, inputTensor, opts, timeout, op=op
        )

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """Returns the one work of several :meth:`reduce_scatter_single`.

        Args:
            outputs: an output for each input.
            inputs: tensors of ``size`` parts each.
            opts: option record for all of them; ``None`` for sums.
        """
        pairs = check.check_pairs(self, "reduce_scatter_tensor", outputs, inputs)
        return self._several(operations.REDUCE_SCATTER_TENSOR, pairs, opts)

    def alltoall(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        opts: AllToAllOptions | timedelta | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Sends ``input_tensors[r]`` to rank r and receives ``output_tensors[r]`` from it.

        Args:
            output_tensors: one tensor for each rank; entry r has the size of what rank r sends here.
            input_tensors: one tensor for each rank; sizes may differ where the capabilities say ``uneven``.
            opts: option record, or the time limit.
            timeout: time limit, for the form without a record; ``None`` for the group's.

        Returns:
            Work whose result is the outputs.
        """
        return self._overloaded(operations.ALL_TO_ALL, output_tensors, input_tensors, opts, timeout)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: AllToAllOptions | timedelta | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Splits a tensor along dimension 0, sends part r to rank r, concatenates what arrives.

        Args:
            output: the parts received, in rank order.
            input: the parts sent, in rank order.
            output_split_sizes: rows of each part received; ``None`` or empty for equal parts.
            input_split_sizes: rows of each part sent; ``None`` or empty for equal parts.
            opts: option record, or the time limit.
            timeout: time limit, for the form without a record; ``None`` for the group's.

        Returns:
            Work whose result is the output.
        """
        return self.call(
            operations.ALL_TO_ALL_SINGLE,
            output,
            input,
            output_split_sizes=output_split_sizes,
            input_split_sizes=input_split_sizes,
            **check.overload_arguments(operations.ALL_TO_ALL_SINGLE, opts, timeout=timeout),
        )

    def barrier(
        self, opts: BarrierOptions | timedelta | None = None, timeout: timedelta | None = None
    ) -> Work:
        """Completes when every rank has called it.

        Args:
            opts: option record, or the time limit.
            timeout: time limit, for the form without a record; ``None`` for the group's.

        Returns:
            Work without outputs.
        """
        return self._overloaded(operations.BARRIER, None, None, opts, timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Barrier on the host that names the ranks which did not come; blocks.

        All ranks come to the same outcome: that of the first to see a rank dead or its limit passed.

        Args:
            timeout: time limit; ``None`` takes the group's.
            wait_all_ranks: ``False`` reports the first missing rank, ``True`` lists all.

        Raises:
            CollectiveTimeoutError: a rank did not come in time.
            PeerLostError: a rank died.
            DistNetworkError: the group's store failed.
        """
        # In the group's store, so that a rank stuck in a collective is found on every backend, and the group
        # is not broken by the time limit.
        where = f"[rank {self._rank}] monitored_barrier on {self.describe()}"
        store = self._store
        if store is None:
            raise DistBackendError(f"{where} needs the group's store, but it was made without one")
        given = check.check_limit(self, "monitored_barrier", timeout, positive=False)
        limit = self._timeout if given is None else given
        turn = next(self._monitored_barriers)
        about: dict[str, Any] = {"operation": "monitored_barrier", "sequence": turn}

        def why(ranks: Sequence[int], lost: bool) -> DistError:
            named = ranks if wait_all_ranks else ranks[:1]
            names = ranks_in_words(named)
            # in parentheses the words of torch's own barrier, which people search logs for
            theirs = f"{names.capitalize()} failed to pass monitoredBarrier"
            if lost:
                return PeerLostError(f"{names} died or ended ({theirs})", named[0], **about)
            if not limit:
                theirs = f"Rank {self._rank} timed out in monitoredBarrier"
            text = f"{names} did not come within {limit.total_seconds():g} s ({theirs})"
            if not wait_all_ranks:
                text += "; pass wait_all_ranks=True to list every missing rank"
            return CollectiveTimeoutError(text, named[0], missing_ranks=named, **about)

        def look() -> DistError | None:
            cause = self._first_cause()
            return cause if cause is not None and cause.operation == RECONFIGURE else None

        key, ranks = f"monitored_barrier/{turn}", range(self._size)
        lost = self.lost_ranks
        try:
            exchange(store, key, self._rank, ranks, limit, f"{where}:", why=why, lost_ranks=lost, look=look)
        except DistNetworkError as error:
            raise DistNetworkError(str(error), **about) from error

    # ---- point-to-point ------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        """Sends a tensor to a rank, which receives it with the same tag, size and data type.

        Args:
            tensors: the tensor; it may be overwritten once the work is done.
            dstRank: the rank that receives it.
            tag: tells messages between two ranks apart; 0 where the capabilities have no ``tags``.

        Returns:
            Work without outputs.
        """
        tensor = check.sent(self, tensors, dstRank, tag)
        return self._shown("send", tensor, lambda: self._send(tensor, dstRank, tag))

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        """Receives a tensor from a rank.

        Args:
            tensors: the tensor to overwrite, of the size and data type of what is sent.
            srcRank: the rank that sends it.
            tag: the tag that it is sent with.

        Returns:
            Work whose result is the tensor.
        """
        tensor = check.received(self, tensors, srcRank, tag)
        return self._shown("recv", tensor, lambda: self._recv(tensor, srcRank, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receives a tensor from whichever rank sends one with this tag.

        Args:
            tensors: the tensor to overwrite, of the size and data type of what is sent.
            tag: the tag that it is sent with.

        Returns:
            Work whose result is the tensor; its ``source_rank()`` names the sender.
        """
        tensor = check.received(self, tensors, None, tag)
        return self._shown("recvAnySource", tensor, lambda: self._recv(tensor, None, tag))

    # ---- names that torch.distributed keeps for the same operations ------------------------------

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    all_to_all_single = alltoall_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
