"""How each operation is made of NCCL's calls, and of copies before and after them on the same stream.

NCCL takes pointers to dense memory only, so that other tensors are copied into dense temporaries and back.

NCCL has no gather, scatter or all-to-all, and no parts of different sizes: those are sends and receives, or
broadcasts and reductions with a root for each part, in one group of calls (NCCL User's Guide, "Group Calls"
and "Point-to-point communication"). What only moves goes as bytes, so that every data type can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from collectives.backends._shared.tensor_memory import as_bytes, byte_count, byte_splits
from collectives.backends.nccl.device import CudaDevice, Stream
from collectives.backends.nccl.libnccl.codes import NcclDataType, NcclRedOp
from collectives.backends.nccl.libnccl.interface import Communicator
from collectives.backends.nccl.operations.reductions import Reduction, reduction_of
from collectives.core import operations
from collectives.core.arguments.staging import is_dense
from collectives.core.operations import Call, Operation

__all__ = ["COLLECTIVES", "CallSequence", "receive", "send"]

_BYTE = NcclDataType.UINT8

_Copy = tuple[torch.Tensor, torch.Tensor]
"""Where elements go, and where they come from."""


class CallSequence:
    """The copies and calls of NCCL of operations on one stream.

    Args:
        device: the device.
        stream: where they run.
        communicator: what NCCL's calls go to.

    Attributes:
        stream: where they run.
        communicator: the communicator.
        before: copies into temporaries.
        calls: calls of NCCL.
        after: copies out of temporaries.
        kept: tensors that must live until the stream has passed the operations.
        made_ops: reductions that were made for the calls, to be given back after they were started.
    """

    __slots__ = (
        "_device",
        "after",
        "before",
        "calls",
        "communicator",
        "kept",
        "made_ops",
        "stream",
    )

    def __init__(self, device: CudaDevice, stream: Stream, communicator: Communicator) -> None:
        self.stream = stream
        self.communicator = communicator
        self.before: list[_Copy] = []
        self.calls: list[Callable[[], object]] = []
        self.after: list[_Copy] = []
        self.kept: list[torch.Tensor] = []
        self.made_ops: list[int] = []
        self._device = device

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a dense tensor to be read: this one, or a copy."""
        self.kept.append(tensor)
        if is_dense(tensor):
            return tensor
        stand_in = self.temporary(tensor.numel(), tensor.dtype).view(tensor.shape)
        self.before.append((stand_in, tensor.detach()))
        return stand_in

    def target(self, tensor: torch.Tensor, reads: bool = False) -> torch.Tensor:
        """Returns a dense tensor to be written: this one, or one that is copied into it afterwards.

        Args:
            tensor: the output.
            reads: whether its values are read, too.
        """
        self.kept.append(tensor)
        return tensor if is_dense(tensor) else self._copied_back(tensor, reads)

    def targets(self, tensors: Sequence[torch.Tensor], reads: bool = False) -> list[torch.Tensor]:
        """Returns the :meth:`target` of each of several tensors."""
        self.kept.extend(tensors)
        targets = []
        for tensor in tensors:  # a comprehension would be one more frame
            targets.append(tensor if is_dense(tensor) else self._copied_back(tensor, reads))  # noqa: PERF401
        return targets

    def _copied_back(self, tensor: torch.Tensor, reads: bool) -> torch.Tensor:
        stand_in = self.temporary(tensor.numel(), tensor.dtype).view(tensor.shape)
        if reads:
            self.before.append((stand_in, tensor.detach()))
        self.after.append((tensor.detach(), stand_in))
        return stand_in

    def temporary(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns a flat tensor that lives until the stream has passed the operations."""
        made = self._device.empty(self.stream, count, dtype)
        self.kept.append(made)
        return made

    def call(self, count: int, function: Callable[..., None], *arguments: int) -> None:
        """Adds a call of NCCL; none where there are no elements, which is so on all ranks.

        Args:
            count: number of elements.
            function: method of the communicator.
            *arguments: its arguments but the stream, which is the last.
        """
        if count:
            self.calls.append(partial(function, *arguments, self.stream))

    def code_of(self, reduction: Reduction) -> int:
        """Returns NCCL's code of a reduction; one with a factor is made, and good for these calls."""
        if reduction.factor is None:
            return reduction.op
        made = self.communicator.premul_sum(reduction.factor, reduction.dtype)
        self.made_ops.append(made)
        return made

    def reduce(
        self,
        function: Callable[..., None],
        given: int,
        into: int,
        elements: int,
        reduction: Reduction,
        *root: int,
    ) -> None:
        """Adds a call of NCCL that reduces.

        Args:
            function: method of the communicator.
            given: address of the input.
            into: address of the output.
            elements: number of elements of the tensor.
            reduction: the reduction.
            *root: the root, for a function that has one.
        """
        count = elements * reduction.width
        if count:
            op = self.code_of(reduction)
            self.calls.append(partial(function, given, into, count, reduction.dtype, op, *root, self.stream))


def _unpacked(output: torch.Tensor, flat: torch.Tensor) -> _Copy:
    """Returns the copy of bytes into a tensor."""
    if is_dense(output):
        return as_bytes(output), flat
    return output.detach(), flat.view(output.dtype).view(output.shape)


def _packed(flat: torch.Tensor, tensor: torch.Tensor) -> _Copy:
    """Returns the copy of a tensor into bytes."""
    if is_dense(tensor):
        return flat, as_bytes(tensor)
    return flat.view(tensor.dtype).view(tensor.shape), tensor.detach()


def _assigned(output: torch.Tensor, given: torch.Tensor) -> _Copy:
    """Returns the copy of a tensor into one of as many elements."""
    if is_dense(given):
        return _unpacked(output, as_bytes(given))
    return output.detach(), given.detach().reshape(output.shape)


def _all_reduce(seq: CallSequence, call: Call) -> None:
    """Reduces tensors over all ranks, in place, each in its own type."""
    function, calls, stream = seq.communicator.all_reduce, seq.calls, seq.stream
    reductions: dict[torch.dtype, tuple[Reduction, int]] = {}
    for own in seq.targets(call.outputs, reads=True):
        count, dtype = own.numel(), own.dtype
        if not count:
            continue
        if dtype not in reductions:
            made = reduction_of(dtype, call.op)
            reductions[dtype] = made, made.op if made.factor is None else seq.code_of(made)
        reduction, code = reductions[dtype]
        pointer = own.data_ptr()
        calls.append(
            partial(function, pointer, pointer, count * reduction.width, reduction.dtype, code, stream)
        )


def _reduce(seq: CallSequence, call: Call) -> None:
    """Reduces a tensor to the root, in place there; other ranks' are only read."""
    tensor = call.output
    own = seq.target(tensor, reads=True) if call.writes_on(seq.communicator.rank) else seq.source(tensor)
    reduction, pointer = reduction_of(tensor.dtype, call.op), own.data_ptr()
    seq.reduce(seq.communicator.reduce, pointer, pointer, own.numel(), reduction, call.root)


def _broadcast(seq: CallSequence, call: Call) -> None:
    """Copies the root's tensor to all ranks."""
    tensor = call.output
    own = seq.target(tensor) if call.writes_on(seq.communicator.rank) else seq.source(tensor)
    _broadcast_from(seq, own.data_ptr(), own.data_ptr(), byte_count(own), call.root)


def _broadcast_from(seq: CallSequence, given: int, into: int, count: int, root: int) -> None:
    seq.call(count, seq.communicator.broadcast, given, into, count, _BYTE, root)


def _all_gather(seq: CallSequence, call: Call) -> None:
    """Gathers every rank's tensor into a list: through one flat tensor, or part by part."""
    outputs = call.outputs
    given = seq.source(call.input).data_ptr()
    if len({output.numel() for output in outputs}) > 1:
        for root, output in enumerate(outputs):
            into = seq.target(output).data_ptr()
            from_ = given if root == seq.communicator.rank else into
            _broadcast_from(seq, from_, into, byte_count(output), root)
        return
    count = byte_count(call.input)
    flat = seq.temporary(count * len(outputs))
    seq.kept.extend(outputs)
    seq.call(count, seq.communicator.all_gather, given, flat.data_ptr(), count, _BYTE)
    seq.after.extend(_unpacked(output, part) for output, part in _parts(outputs, flat))


def _all_gather_into_tensor(seq: CallSequence, call: Call) -> None:
    """Gathers every rank's tensor into one."""
    given, into = seq.source(call.input).data_ptr(), seq.target(call.output).data_ptr()
    count = byte_count(call.input)
    seq.call(count, seq.communicator.all_gather, given, into, count, _BYTE)


def _reduce_scatter(seq: CallSequence, call: Call) -> None:
    """Reduces a list and keeps an entry: through one flat tensor, or entry by entry."""
    inputs, reduction = call.inputs, reduction_of(call.output.dtype, call.op)
    into = seq.target(call.output).data_ptr()
    if len({part.numel() for part in inputs}) > 1:
        for root, part in enumerate(inputs):
            given = seq.source(part).data_ptr()
            target = into if root == seq.communicator.rank else given
            seq.reduce(seq.communicator.reduce, given, target, part.numel(), reduction, root)
        return
    flat = seq.temporary(sum(map(byte_count, inputs)))
    seq.kept.extend(inputs)
    seq.before.extend(_packed(part, given) for given, part in _parts(inputs, flat))
    seq.reduce(seq.communicator.reduce_scatter, flat.data_ptr(), into, call.output.numel(), reduction)


def _reduce_scatter_tensor(seq: CallSequence, call: Call) -> None:
    """Reduces a tensor and keeps a part."""
    given, into = seq.source(call.input).data_ptr(), seq.target(call.output).data_ptr()
    reduction = reduction_of(call.output.dtype, call.op)
    seq.reduce(seq.communicator.reduce_scatter, given, into, call.output.numel(), reduction)


def _gather(seq: CallSequence, call: Call) -> None:
    """Gathers every rank's tensor on the root, which copies its own."""
    root = call.root
    if not call.outputs:
        _send(seq, seq.source(call.input).data_ptr(), byte_count(call.input), root)
        return
    for rank, output in enumerate(call.outputs):
        if rank != root:
            _receive(seq, seq.target(output).data_ptr(), byte_count(output), rank)
    seq.kept.extend((call.outputs[root], call.input))
    seq.after.append(_assigned(call.outputs[root], call.input))


def _scatter(seq: CallSequence, call: Call) -> None:
    """Gives each rank a tensor of the root's, which copies its own."""
    root = call.root
    if not call.inputs:
        _receive(seq, seq.target(call.output).data_ptr(), byte_count(call.output), root)
        return
    for rank, part in enumerate(call.inputs):
        if rank != root:
            _send(seq, seq.source(part).data_ptr(), byte_count(part), rank)
    seq.kept.extend((call.inputs[root], call.output))
    seq.after.append(_assigned(call.output, call.inputs[root]))


def _all_to_all(seq: CallSequence, call: Call) -> None:
    """Exchanges lists of tensors, with itself too."""
    for rank, (output, part) in enumerate(zip(call.outputs, call.inputs, strict=True)):
        _send(seq, seq.source(part).data_ptr(), byte_count(part), rank)
        _receive(seq, seq.target(output).data_ptr(), byte_count(output), rank)


def _all_to_all_single(seq: CallSequence, call: Call) -> None:
    """Exchanges parts of tensors; splits count elements."""
    given, into = seq.source(call.input).data_ptr(), seq.target(call.output).data_ptr()
    sizes = zip(
        byte_splits(call.output, call.output_splits or ()),
        byte_splits(call.input, call.input_splits or ()),
        strict=True,
    )
    for rank, (received, sent) in enumerate(sizes):
        _send(seq, given, sent, rank)
        _receive(seq, into, received, rank)
        given += sent
        into += received


def _barrier(seq: CallSequence, call: Call) -> None:  # noqa: ARG001 - there is nothing to tell
    """Waits for all ranks."""
    token = seq.temporary(1).data_ptr()
    seq.call(1, seq.communicator.all_reduce, token, token, 1, _BYTE, NcclRedOp.MAX)


COLLECTIVES: Mapping[Operation, Callable[..., None]] = {
    operations.ALL_REDUCE: _all_reduce,
    operations.ALL_REDUCE_COALESCED: _all_reduce,
    operations.REDUCE: _reduce,
    operations.BROADCAST: _broadcast,
    operations.ALL_GATHER: _all_gather,
    operations.ALL_GATHER_INTO_TENSOR: _all_gather_into_tensor,
    operations.REDUCE_SCATTER: _reduce_scatter,
    operations.REDUCE_SCATTER_TENSOR: _reduce_scatter_tensor,
    operations.GATHER: _gather,
    operations.SCATTER: _scatter,
    operations.ALL_TO_ALL: _all_to_all,
    operations.ALL_TO_ALL_SINGLE: _all_to_all_single,
    operations.BARRIER: _barrier,
}
"""What adds the copies and calls of each collective to a sequence."""


def send(seq: CallSequence, tensor: torch.Tensor) -> None:
    """Sends a tensor within a pair; an empty one as a byte, so that it, too, arrives when it was sent."""
    given = seq.source(tensor) if tensor.numel() else seq.temporary(1)
    _send(seq, given.data_ptr(), byte_count(given), 1 - seq.communicator.rank)


def receive(seq: CallSequence, tensor: torch.Tensor) -> None:
    """Receives a tensor within a pair."""
    into = seq.target(tensor) if tensor.numel() else seq.temporary(1)
    _receive(seq, into.data_ptr(), byte_count(into), 1 - seq.communicator.rank)


def _send(seq: CallSequence, pointer: int, count: int, peer: int) -> None:
    seq.call(count, seq.communicator.send, pointer, count, _BYTE, peer)


def _receive(seq: CallSequence, pointer: int, count: int, peer: int) -> None:
    seq.call(count, seq.communicator.recv, pointer, count, _BYTE, peer)


def _parts(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the tensors with their parts of a concatenation of their bytes."""
    return list(zip(tensors, torch.split(flat, [byte_count(tensor) for tensor in tensors]), strict=True))
