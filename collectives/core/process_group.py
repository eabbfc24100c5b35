"""ProcessGroup: the contract between those who communicate and the backends that carry it out."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar

import torch

from collectives.core.arguments import validation as check
from collectives.core.arguments.option_records import record
from collectives.core.arguments.overloads import (
    first_given,
    inner_list,
    with_limit,
    with_reduction,
    with_root,
)
from collectives.core.arguments.staging import dense_outputs
from collectives.core.membership import Membership
from collectives.core.monitored_barrier import monitored_barrier
from collectives.core.types import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
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
from collectives.core.work import CoalescedWork, Work
from collectives.errors import UnsupportedOperationError

__all__ = ["ProcessGroup"]

Tensors = torch.Tensor | Sequence[torch.Tensor]
TensorLists = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]


class ProcessGroup(Membership):
    """A fixed set of ranks that communicate (PyTorch Distributed, VLDB 2020, section 3.3).

    **Order.** All members issue the same collectives in the same order; a group executes them in that order.
    Point-to-point operations match by sender, receiver and tag, in order, apart from the collectives.
    Different groups progress independently.

    **Work.** Every operation returns a :class:`~collectives.Work`. Its tensors must not be touched until it
    is done; inputs are then unchanged and outputs complete. Outputs may be the inputs where a method says "in
    place"; other overlap is undefined.

    **Arguments** are checked before anything is sent: :class:`TypeError`, :class:`ValueError`, or
    :class:`~collectives.errors.UnsupportedOperationError` where :attr:`capabilities` say no. Ranks that issue
    different operations, a rank that dies and a time limit raise the classes of :mod:`collectives.errors`,
    from the call or from ``Work.wait()``.

    **Arguments' form.** Methods have the names and forms of ``torch.distributed.ProcessGroup``: a list of one
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
    """

    class BackendType(enum.IntEnum):
        """Kinds of backends; numbers as in ``torch.distributed``."""

        UNDEFINED = 0
        GLOO = 1
        NCCL = 2
        UCC = 3
        MPI = 4
        XCCL = 5
        CUSTOM = 6

    backend_type: ClassVar[BackendType] = BackendType.CUSTOM

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
            opts: option record, or the reduction.
            timeout: time limit, for the form without a record.
            op: the reduction, for the form without a record.
            tensor: other name of ``tensors``.
        """
        tensor = check.only_tensor(self, "all_reduce", tensor if tensors is None else tensors)
        options = with_reduction(AllreduceOptions, opts, op, timeout)
        self._admit("all_reduce", tensor, options.reduceOp, options.timeout)
        check.check_outputs(self, "all_reduce", [tensor])
        return self._allreduce(tensor, options)

    def allreduce_coalesced(
        self, tensors: Sequence[torch.Tensor], opts: AllreduceOptions | None = None
    ) -> Work:
        """Reduces several tensors, as :meth:`allreduce` each; they may differ in shape and data type."""
        opts = record(opts) or AllreduceCoalescedOptions()
        opts = AllreduceOptions(opts.timeout, opts.asyncOp, opts.reduceOp)
        for tensor in tensors:
            self._admit(
                "all_reduce", check.check_tensor(self, "all_reduce", tensor), opts.reduceOp, opts.timeout
            )
            check.check_outputs(self, "all_reduce", [tensor])
        separate = dense_outputs(tensors, separate=True)
        return separate.finish(
            self._issue_together(lambda: [self._allreduce(tensor, opts) for tensor in separate.stand_ins])
        )

    def _issue_together(self, issue: Callable[[], list[Work]]) -> Work:
        """Issues several operations as one, where the group has a way to start them together."""
        with self._together():
            works = issue()
        return CoalescedWork(works)

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
            opts: option record, or the root.
            timeout: time limit, for the form without a record.
            root: the root, for the form without a record.
            tensor: other name of ``tensors``.
        """
        tensor = check.only_tensor(self, "broadcast", tensor if tensors is None else tensors)
        opts = with_root(BroadcastOptions, opts, root, timeout)
        check.check_rank(self, "broadcast", opts.rootRank, "root")
        check.check_root_tensor(self, "broadcast", opts.rootTensor)
        self._admit("broadcast", tensor, None, opts.timeout)
        if self._rank != opts.rootRank:
            check.check_outputs(self, "broadcast", [tensor])
        return self._broadcast(tensor, opts)

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
            opts: option record, or the root.
            op: the reduction, for the form without a record.
            timeout: time limit, for the form without a record.
            root: the root, for the form without a record.
            tensor: other name of ``tensors``.
        """
        tensor = check.only_tensor(self, "reduce", tensor if tensors is None else tensors)
        opts = record(opts)
        if not isinstance(opts, ReduceOptions):
            opts = ReduceOptions(
                timeout=timeout, reduceOp=ReduceOp.of(op or ReduceOp.SUM), rootRank=first_given(opts, root, 0)
            )
        check.check_rank(self, "reduce", opts.rootRank, "root")
        check.check_root_tensor(self, "reduce", opts.rootTensor)
        self._admit("reduce", tensor, opts.reduceOp, opts.timeout)
        if self._rank == opts.rootRank:
            check.check_outputs(self, "reduce", [tensor])
        return self._reduce(tensor, opts)

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
            timeout: time limit, for the form without a record.
            input_tensor: other name of ``input_tensors``.
        """
        what = "all_gather"
        given = input_tensor if input_tensors is None else input_tensors
        tensor = check.only_tensor(self, what, given, "input")
        outputs = check.check_list(self, what, inner_list(output_tensors), "output list")
        check.check_same_dtype(self, what, [tensor, *outputs], "input and outputs")
        check.check_numel(
            self,
            what,
            outputs[self._rank],
            f"output {self._rank}",
            tensor.numel(),
            "the size of this rank's input",
        )
        check.check_even(self, what, outputs, "outputs")
        opts = with_limit(AllgatherOptions, opts, timeout)
        self._admit(what, tensor, None, opts.timeout)
        check.check_outputs(self, what, outputs, "output")
        return self._allgather(outputs, tensor, opts)

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
            timeout: time limit, for the form without a record.
        """
        what = "all_gather_into_tensor"
        check.check_pair(self, what, output, input)
        numel = input.numel() * self._size
        check.check_numel(
            self, what, output, "output", numel, f"{input.numel()} from each of {self._size} ranks"
        )
        check.check_whole_bytes(self, what, input.dtype, [input.numel()], "parts")
        opts = with_limit(AllgatherOptions, opts, timeout)
        self._admit(what, input, None, opts.timeout)
        check.check_outputs(self, what, [output], "output")
        return self._allgather_single(output, input, opts)

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        input_list: Sequence[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Gathers several tensors, as :meth:`allgather` each.

        Args:
            output_lists: for each rank a list of tensors as that rank's ``input_list``.
            input_list: this rank's tensors.
            opts: option record.
        """
        what = "all_gather_coalesced"
        if len(output_lists) != self._size:
            reason = (
                f"output_lists must have a list for each of {self._size} ranks, but has {len(output_lists)}"
            )
            check.fail(self, what, reason)
        for r, outputs in enumerate(output_lists):
            if len(outputs) != len(input_list):
                check.fail(
                    self,
                    what,
                    f"output_lists[{r}] has {len(outputs)} tensors, but input_list has {len(input_list)}",
                )
        gathered = list(zip(*output_lists, strict=True))
        check.check_apart(self, what, gathered, [[tensor] for tensor in input_list])
        return self._issue_together(
            lambda: [
                self.allgather(outputs, tensor, opts)
                for outputs, tensor in zip(gathered, input_list, strict=True)
            ]
        )

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Gathers several tensors, as :meth:`all_gather_single` each."""
        check.check_lengths(self, "all_gather_into_tensor", outputs, inputs)
        check.check_apart(self, "all_gather_into_tensor", [[o] for o in outputs], [[i] for i in inputs])
        return self._issue_together(
            lambda: [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        )

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
            opts: option record, or the root.
            timeout: time limit, for the form without a record.
            root: the root, for the form without a record.
            input_tensor: other name of ``input_tensors``.
        """
        what = "gather"
        given = input_tensor if input_tensors is None else input_tensors
        tensor = check.only_tensor(self, what, given, "input")
        opts = with_root(GatherOptions, opts, root, timeout)
        check.check_rank(self, what, opts.rootRank, "root")
        outputs = check.check_rooted_list(self, what, output_tensors, tensor, opts.rootRank, "output list")
        self._admit(what, tensor, None, opts.timeout)
        check.check_outputs(self, what, outputs or (), "output")
        return self._gather(outputs, tensor, opts)

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
            opts: option record, or the root.
            timeout: time limit, for the form without a record.
            root: the root, for the form without a record.
            output_tensor: other name of ``output_tensors``.
        """
        what = "scatter"
        given = output_tensor if output_tensors is None else output_tensors
        tensor = check.only_tensor(self, what, given, "output")
        opts = with_root(ScatterOptions, opts, root, timeout)
        check.check_rank(self, what, opts.rootRank, "root")
        inputs = check.check_rooted_list(self, what, input_tensors, tensor, opts.rootRank, "input list")
        self._admit(what, tensor, None, opts.timeout)
        check.check_outputs(self, what, [tensor], "output")
        return self._scatter(tensor, inputs, opts)

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
            opts: option record, or the reduction.
            timeout: time limit, for the form without a record.
            op: the reduction, for the form without a record.
            output: other name of ``output_tensors``.
            input: other name of ``input_tensors``.
        """
        what = "reduce_scatter"
        output = check.only_tensor(self, what, output if output_tensors is None else output_tensors, "output")
        parts = input if input_tensors is None else input_tensors
        inputs = check.check_list(self, what, inner_list(parts), "input list")
        check.check_same_dtype(self, what, [output, *inputs], "output and inputs")
        check.check_numel(
            self, what, output, "output", inputs[self._rank].numel(), f"the size of input {self._rank}"
        )
        check.check_even(self, what, inputs, "inputs")
        options = with_reduction(ReduceScatterOptions, opts, op, timeout)
        self._admit(what, output, options.reduceOp, options.timeout)
        check.check_outputs(self, what, [output], "output")
        return self._reduce_scatter(output, inputs, options)

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
            opts: option record, or the reduction.
            timeout: time limit, for the form without a record.
            op: the reduction, for the form without a record.
        """
        what = "reduce_scatter_tensor"
        check.check_pair(self, what, outputTensor, inputTensor)
        numel = outputTensor.numel() * self._size
        check.check_numel(
            self, what, inputTensor, "input", numel, f"{outputTensor.numel()} for each of {self._size} ranks"
        )
        options = with_reduction(ReduceScatterOptions, opts, op, timeout)
        self._admit(what, outputTensor, options.reduceOp, options.timeout)
        check.check_outputs(self, what, [outputTensor], "output")
        return self._reduce_scatter_single(outputTensor, inputTensor, options)

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """Reduces and scatters several tensors, as :meth:`reduce_scatter_single` each."""
        check.check_lengths(self, "reduce_scatter_tensor", outputs, inputs)
        check.check_apart(self, "reduce_scatter_tensor", [[o] for o in outputs], [[i] for i in inputs])
        return self._issue_together(
            lambda: [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        )

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
            timeout: time limit, for the form without a record.
        """
        what = "all_to_all"
        outputs = check.check_list(self, what, output_tensors, "output list")
        inputs = check.check_list(self, what, input_tensors, "input list")
        check.check_same_dtype(self, what, [*inputs, *outputs], "inputs and outputs")
        mine = inputs[self._rank].numel()
        check.check_numel(
            self, what, outputs[self._rank], f"output {self._rank}", mine, f"the size of input {self._rank}"
        )
        check.check_even(self, what, [*inputs, *outputs], "inputs and outputs")
        opts = with_limit(AllToAllOptions, opts, timeout)
        self._admit(what, inputs[0], None, opts.timeout)
        check.check_outputs(self, what, outputs, "output")
        return self._alltoall(outputs, inputs, opts)

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
            timeout: time limit, for the form without a record.
        """
        what = "all_to_all_single"
        check.check_pair(self, what, output, input)
        sent = check.check_splits(self, what, input, input_split_sizes, "input")
        received = check.check_splits(self, what, output, output_split_sizes, "output")
        check.check_whole_bytes(self, what, input.dtype, [*sent, *received], "parts")
        if sent[self._rank] != received[self._rank]:
            check.fail(
                self,
                what,
                f"this rank sends itself {sent[self._rank]} elements, but expects {received[self._rank]}",
            )
        if not self.capabilities.uneven and len({*sent, *received}) > 1:
            check.fail(
                self, what, f"parts of different sizes are not taken: {sent} sent, {received} received"
            )
        opts = with_limit(AllToAllOptions, opts, timeout)
        self._admit(what, input, None, opts.timeout)
        check.check_outputs(self, what, [output], "output")
        return self._alltoall_single(output, input, received, sent, opts)

    def barrier(
        self, opts: BarrierOptions | timedelta | None = None, timeout: timedelta | None = None
    ) -> Work:
        """Completes when every rank has called it.

        Args:
            opts: option record, or the time limit.
            timeout: time limit, for the form without a record.
        """
        reason = self.capabilities.why_not("barrier")
        if reason is not None:
            check.fail(self, "barrier", reason, UnsupportedOperationError)
        opts = with_limit(BarrierOptions, opts, timeout)
        check.check_limit(self, "barrier", opts.timeout)
        return self._barrier(opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Barrier on the host that names the ranks which did not come; blocks.

        Rank 0 waits for all others and tells them the outcome, so that all fail when one is missing.

        Args:
            timeout: time limit; ``None`` takes the group's.
            wait_all_ranks: ``False`` reports the first missing rank, ``True`` waits the whole time and lists
                all.

        Raises:
            CollectiveTimeoutError: a rank did not come in time.
        """
        monitored_barrier(self, timeout, wait_all_ranks)

    # ---- point-to-point ------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        """Sends a tensor to a rank, which receives it with the same tag, size and data type."""
        tensor = check.only_tensor(self, "send", tensors)
        check.check_rank(self, "send", dstRank, "destination")
        check.check_tag(self, "send", tag)
        self._admit("send", tensor)
        return self._send(tensor, dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        """Receives a tensor from a rank, overwriting ``tensors``."""
        tensor = check.only_tensor(self, "recv", tensors)
        check.check_rank(self, "recv", srcRank, "source")
        check.check_tag(self, "recv", tag)
        self._admit("recv", tensor)
        check.check_outputs(self, "recv", [tensor])
        return self._recv(tensor, srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receives a tensor from whichever rank sends one with this tag; ``Work.source_rank()`` names it."""
        tensor = check.only_tensor(self, "recv_anysource", tensors)
        check.check_tag(self, "recv_anysource", tag)
        self._admit("recv_anysource", tensor)
        check.check_outputs(self, "recv_anysource", [tensor])
        return self._recv(tensor, None, tag)

    # ---- names that torch.distributed keeps for the same operations ------------------------------

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    all_to_all_single = alltoall_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
