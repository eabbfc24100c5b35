"""A ``torch.distributed.ProcessGroup`` that is carried out by one of ours.

torch reaches a group on four ways, and all of them end here:

- Python functions (``torch.distributed.all_reduce``) call the methods of this class.
- C++ code (the gradient reducer, functional collectives) calls virtual methods, which torch forwards to those
  Python methods that it knows of. Which ones differs between torch versions, as do the names: both name
  families are here.
- What C++ does not forward goes through the ``c10d::`` operators, as do direct calls of them. Their kernels
  are ours (:mod:`collectives.torch_bridge.operators`), or torch's, which call a ``Backend`` that hands on to
  the group (:mod:`collectives.torch_bridge.c10d_backend`).
- ``group._get_backend(device)`` gives the object that serves a device: this group itself.

No backend of torch's own is registered in the group, so that whatever should fall through all of these
raises, instead of answering without having communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from collectives.core import sparse
from collectives.core.arguments.option_records import REDUCE_OP_CODES, record, reduce_op_code, reduction
from collectives.core.arguments.staging import dense_outputs
from collectives.core.dynamo import leave_uncompiled
from collectives.core.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from collectives.core.types import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
)
from collectives.core.work import Work
from collectives.torch_bridge import several_tensors
from collectives.torch_bridge.issuing import Issuing
from collectives.torch_bridge.operands import list_or_none, only
from collectives.torch_bridge.work import TorchWork

__all__ = ["TorchGroup"]

_AllreduceOptions: Any = c10d.AllreduceOptions
_NO_INDICES = not hasattr(_AllreduceOptions, "sparseIndices")  # as before torch 2.15


@leave_uncompiled
class TorchGroup(Issuing):
    """One of our groups in the form of torch's.

    Methods have the names, overloads and meanings of ``torch.distributed.ProcessGroup`` and ``Backend``.
    Those of the operations are described in :class:`collectives.ProcessGroup`. Option records and reductions
    may be torch's or ours. Arguments are those of
    :class:`~collectives.torch_bridge.group_base.TorchGroupBase`.
    """

    # ---- collectives ---------------------------------------------------------------------------------------

    def allreduce(
        self,
        tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
        tensor: Any = None,
    ) -> TorchWork:
        """Reduces a tensor over all ranks, in place; a sparse one too, and several of this rank to one."""
        if type(opts) is _AllreduceOptions and (_NO_INDICES or opts.sparseIndices is None):
            one = tensors[0] if type(tensors) is list and len(tensors) == 1 else tensors
            work = self._fast_collective(
                opts, ALL_REDUCE.opcode, one, None, REDUCE_OP_CODES.get(hash(opts.reduceOp))
            )
            if work is not None:
                return work
        tensors = tensor if tensors is None else tensors
        tensor = tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors
        several = isinstance(tensors, (list, tuple)) and len(tensors) > 1
        if several or (isinstance(tensor, torch.Tensor) and tensor.is_sparse):
            options = record(opts)
            if not isinstance(options, AllreduceOptions):
                options = AllreduceOptions(timeout, True, reduction(op or options or ReduceOp.SUM))
            reduce = several_tensors.allreduce if several else sparse.allreduce
            return self._issue("all_reduce", tensors, reduce, self.inner, tensor, options)
        call = self.inner.allreduce
        return self._issue("all_reduce", tensors, call, tensors, opts, timeout, op=op)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> TorchWork:
        """Reduces several tensors over all ranks, in place."""
        operator_call = "allreduce_coalesced", tensors, opts
        call = self.inner.allreduce_coalesced
        return self._issue("all_reduce", tensors, call, tensors, opts, operator_call=operator_call)

    def broadcast(
        self,
        tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        tensor: Any = None,
    ) -> TorchWork:
        """Copies the root's tensor to all ranks, in place; one of several to all of several, too."""
        if type(opts) is c10d.BroadcastOptions and (
            work := self._fast_collective(opts, BROADCAST.opcode, only(tensors), root=opts.rootRank)
        ):
            return work
        tensors = tensor if tensors is None else tensors
        if isinstance(tensors, (list, tuple)) and len(tensors) > 1:
            options = record(opts)
            if not isinstance(options, BroadcastOptions):
                options = BroadcastOptions(timeout, True, (options or 0) if root is None else root)
            return self._issue("broadcast", tensors, several_tensors.broadcast, self.inner, tensors, options)
        call = self.inner.broadcast
        return self._issue("broadcast", tensors, call, tensors, opts, timeout, root=root)

    def reduce(
        self,
        tensors: Any = None,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        tensor: Any = None,
    ) -> TorchWork:
        """Reduces a tensor over all ranks to the root, in place there."""
        if type(opts) is c10d.ReduceOptions and (
            work := self._fast_collective(
                opts, REDUCE.opcode, only(tensors), None, reduce_op_code(opts.reduceOp), opts.rootRank
            )
        ):
            return work
        tensors = tensor if tensors is None else tensors
        call = self.inner.reduce
        return self._issue("reduce", tensors, call, tensors, opts, op, timeout, root=root)

    def allgather(
        self,
        output_tensors: Any,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        input_tensor: torch.Tensor | None = None,
    ) -> TorchWork:
        """Gathers every rank's tensor on all ranks; several of each, too."""
        source = input_tensor if input_tensors is None else input_tensors
        if type(opts) is c10d.AllgatherOptions and (
            work := self._fast_collective(
                opts, ALL_GATHER.opcode, only(output_tensors), only(source), list_form=True
            )
        ):
            return work
        if isinstance(source, (list, tuple)) and len(source) > 1:
            options = record(opts)
            if not isinstance(options, AllgatherOptions):
                options = AllgatherOptions(timeout)
            gather = several_tensors.allgather
            return self._issue("all_gather", source, gather, self.inner, output_tensors, source, options)
        call = self.inner.allgather
        return self._issue("all_gather", source, call, output_tensors, source, opts, timeout)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Gathers every rank's tensor into one, in rank order."""
        if type(opts) is c10d.AllgatherOptions and (
            work := self._fast_collective(opts, ALL_GATHER.opcode, output, input)
        ):
            return work
        call = self.inner.all_gather_single
        return self._issue("all_gather", input, call, output, input, opts, timeout)

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        input_list: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> TorchWork:
        """Gathers several tensors: ``output_lists[r][i]`` is what rank r gave as ``input_list[i]``."""
        given = output_lists, input_list
        operator_call = "allgather_coalesced", *given, opts
        call = self.inner.allgather_coalesced
        return self._issue("all_gather", input_list, call, *given, opts, operator_call=operator_call)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Gathers several tensors, each into one."""
        call = self.inner.all_gather_single_coalesced
        operator_call = "all_gather_single_coalesced", outputs, inputs, opts
        return self._issue(
            "all_gather",
            inputs,
            call,
            outputs,
            inputs,
            opts,
            operator_call=operator_call,
        )

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        input_tensor: torch.Tensor | None = None,
    ) -> TorchWork:
        """Gathers every rank's tensor on the root."""
        source = input_tensor if input_tensors is None else input_tensors
        if type(opts) is c10d.GatherOptions and (
            work := self._fast_collective(
                opts,
                GATHER.opcode,
                list_or_none(output_tensors),
                only(source),
                root=opts.rootRank,
                list_form=True,
            )
        ):
            return work
        call = self.inner.gather
        return self._issue("gather", source, call, output_tensors, source, opts, timeout, root=root)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Gathers every rank's tensor on the root into one; ``output`` is not looked at on other ranks."""
        options = record(opts) or GatherOptions()
        if self.rank() != options.rootRank:
            return self._issue("gather", input, self.inner.gather, None, input, options)
        if output.numel() != input.numel() * self.size():
            raise ValueError(
                f"[rank {self.rank()}] gather_single on {self!r}: output has {output.numel()} elements, but "
                f"must have {input.numel()} for each of {self.size()} ranks"
            )
        outputs = dense_outputs([output])
        parts = list(outputs.stand_ins[0].view(self.size(), input.numel()).unbind())

        def gather(input: torch.Tensor, options: GatherOptions) -> Work:
            return outputs.finish(self.inner.gather(parts, input, options), options.asyncOp)

        return self._issue("gather", input, gather, input, options)

    def scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        output_tensor: torch.Tensor | None = None,
    ) -> TorchWork:
        """Gives each rank one tensor of the root's list."""
        target = output_tensor if output_tensors is None else output_tensors
        if type(opts) is c10d.ScatterOptions and (
            work := self._fast_collective(
                opts,
                SCATTER.opcode,
                only(target),
                list_or_none(input_tensors),
                root=opts.rootRank,
                list_form=True,
            )
        ):
            return work
        call = self.inner.scatter
        return self._issue("scatter", target, call, target, input_tensors, opts, timeout, root=root)

    def reduce_scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
        output: torch.Tensor | None = None,
        input: Sequence[torch.Tensor] | None = None,
        input_tensor: Sequence[torch.Tensor] | None = None,
    ) -> TorchWork:
        """Reduces a list of tensors over all ranks; rank r keeps entry r."""
        target = output if output_tensors is None else output_tensors
        source = input if input_tensors is None else input_tensors
        source = input_tensor if source is None else source
        if type(opts) is c10d.ReduceScatterOptions and (
            work := self._fast_collective(
                opts,
                REDUCE_SCATTER.opcode,
                only(target),
                only(source),
                reduce_op_code(opts.reduceOp),
                list_form=True,
            )
        ):
            return work
        call = self.inner.reduce_scatter
        return self._issue("reduce_scatter", source, call, target, source, opts, timeout, op=op)

    def reduce_scatter_single(
        self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None
    ) -> TorchWork:
        """Reduces a tensor over all ranks; rank r keeps part r of equal parts."""
        if type(opts) is c10d.ReduceScatterOptions and (
            work := self._fast_collective(
                opts, REDUCE_SCATTER.opcode, outputTensor, inputTensor, reduce_op_code(opts.reduceOp)
            )
        ):
            return work
        call = self.inner.reduce_scatter_single
        return self._issue("reduce_scatter", inputTensor, call, outputTensor, inputTensor, opts)

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> TorchWork:
        """Reduces and scatters several tensors, as :meth:`reduce_scatter_single` each."""
        call = self.inner.reduce_scatter_single_coalesced
        given = outputs, inputs
        operator_call = "reduce_scatter_single_coalesced", *given, opts
        return self._issue("reduce_scatter", inputs, call, *given, opts, operator_call=operator_call)

    def alltoall(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        output_tensor: Any = None,
        input_tensor: Any = None,
    ) -> TorchWork:
        """Sends entry r of the inputs to rank r and receives entry r of the outputs from it."""
        output_tensors = output_tensor if output_tensors is None else output_tensors
        input_tensors = input_tensor if input_tensors is None else input_tensors
        if type(opts) is c10d.AllToAllOptions and (
            work := self._fast_collective(
                opts, ALL_TO_ALL.opcode, output_tensors, input_tensors, list_form=True
            )
        ):
            return work
        call = self.inner.alltoall
        return self._issue("all_to_all", input_tensors, call, output_tensors, input_tensors, opts, timeout)

    def all_to_all_single(
        self,
        output: Any = None,
        input: Any = None,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        output_tensor: Any = None,
        input_tensor: Any = None,
    ) -> TorchWork:
        """Sends part r of a tensor to rank r and concatenates what the ranks send here."""
        target = output_tensor if output is None else output
        source = input_tensor if input is None else input
        if (
            type(opts) is c10d.AllToAllOptions
            and not (output_split_sizes or input_split_sizes)
            and (work := self._fast_collective(opts, ALL_TO_ALL.opcode, target, source))
        ):
            return work
        given = target, source, output_split_sizes or [], input_split_sizes or []
        call = self.inner.alltoall_base
        operator_call = "all_to_all_single", *given, opts
        return self._issue("all_to_all", source, call, *given, opts, timeout, operator_call=operator_call)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        """Completes when every rank has called it."""
        if (
            type(opts) is c10d.BarrierOptions
            and (opts.device is None or opts.device.type == "cpu")
            and (work := self._fast_collective(opts, BARRIER.opcode))
        ):
            return work
        return self._issue("barrier", (), self.inner.barrier, opts, timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Barrier on the host that names the ranks which did not come; blocks."""
        self.inner.monitored_barrier(timeout, wait_all_ranks)

    def monitoredBarrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Same as :meth:`monitored_barrier`, with the time limit in a record."""
        self.inner.monitored_barrier(None if opts is None else record(opts).timeout, wait_all_ranks)

    # ---- point-to-point ------------------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> TorchWork:
        """Sends a tensor to a rank."""
        if work := self._fast_message(True, only(tensors), dstRank, tag):
            return work
        operator_call = "send", tensors, dstRank, tag
        return self._issue(
            "send", tensors, self.inner.send, only(tensors), dstRank, tag, operator_call=operator_call
        )

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> TorchWork:
        """Receives a tensor from a rank."""
        if work := self._fast_message(False, only(tensors), srcRank, tag):
            return work
        operator_call = "recv", tensors, srcRank, tag
        return self._issue(
            "recv", tensors, self.inner.recv, only(tensors), srcRank, tag, operator_call=operator_call
        )

    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        """Receives a tensor from whichever rank sends one with this tag."""
        operator_call = "recv_anysource", tensors, tag
        return self._issue(
            "recvAnySource", tensors, self.inner.recv_anysource, tensors, tag, operator_call=operator_call
        )

    # ---- second names --------------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    gather_into_tensor = gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    recvAnysource = recv_anysource
