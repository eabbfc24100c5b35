"""What NCCL can reduce, and how each operation is made of its calls.

NCCL computes with the types of :data:`~collectives.backends.nccl.libnccl.DATA_TYPES`. Beyond those, a
complex number is two real ones for SUM, AVG and PREMUL_SUM, and a bool is a byte of 0 or 1, of which the
maximum is the logical "or" and the minimum the logical "and".

It takes pointers to dense memory only, so that other tensors are copied into dense temporaries and back, on
the same stream. It has no gather, scatter or all-to-all, and no parts of different sizes: those are sends and
receives, or broadcasts and reductions with a root for each part, in one group of calls (NCCL User's Guide,
"Group Calls" and "Point-to-point communication"). What only moves goes as bytes, so that every data type can.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from collectives.backends._shared.tensor_memory import as_bytes, byte_count, byte_splits
from collectives.backends.nccl.device import CudaDevice, Event, Stream
from collectives.backends.nccl.libnccl import DATA_TYPES, REDUCTIONS, Communicator, NcclDataType, NcclRedOp
from collectives.core.arguments.staging import is_dense
from collectives.core.arguments.validation import Group, fail
from collectives.core.capabilities import OPERATIONS, Capabilities
from collectives.core.operations import Call
from collectives.core.types import ReduceOp
from collectives.errors import UnsupportedOperationError

FLOAT8_VERSION = 22400
"""The first version of NCCL that computes with 8-bit floats."""

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_PARTS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_BUILT_IN = frozenset(op.name for op in REDUCTIONS)
_FACTORED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_OF_BOOLS = {
    "SUM": NcclRedOp.MAX, "MAX": NcclRedOp.MAX, "BOR": NcclRedOp.MAX,
    "PRODUCT": NcclRedOp.MIN, "MIN": NcclRedOp.MIN, "BAND": NcclRedOp.MIN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of tensors of one data type, in NCCL's terms.

    Attributes:
        dtype: code of the type that NCCL computes with.
        width: elements of that type in one element of the tensor.
        op: code of the reduction; with a ``factor`` one has to be made.
        factor: what PREMUL_SUM multiplies by.
    """

    dtype: NcclDataType
    width: int
    op: NcclRedOp
    factor: float | None = None


_WITHOUT_FACTOR = {
    (dtype, op.name): Reduction(DATA_TYPES[_PARTS.get(dtype, dtype)], 2 if dtype in _PARTS else 1, code)
    for dtype in (*DATA_TYPES, *_PARTS)
    for op, code in REDUCTIONS.items()
} | {(torch.bool, name): Reduction(NcclDataType.UINT8, 1, code) for name, code in _OF_BOOLS.items()}


def reduction_of(dtype: torch.dtype, op: ReduceOp) -> Reduction:
    """Returns a reduction that the capabilities offer."""
    if op.factor is None:
        return _WITHOUT_FACTOR[dtype, op.name]
    return replace(_WITHOUT_FACTOR[dtype, "SUM"], factor=op.factor)


def capabilities_on(device: str, float8: bool) -> Capabilities:
    """Returns what a group can do.

    Args:
        device: type of the tensors' device.
        float8: whether NCCL and the device compute with 8-bit floats.
    """
    table = {dtype: _BUILT_IN for dtype in DATA_TYPES if float8 or dtype not in _FLOAT8}
    table |= {dtype: _BUILT_IN | {"PREMUL_SUM"} for dtype in _FACTORED}
    table |= {dtype: frozenset({"SUM", "AVG", "PREMUL_SUM"}) for dtype in _PARTS}
    table[torch.bool] = frozenset(_OF_BOOLS)
    return Capabilities(
        devices=frozenset({device}),
        reductions=table,
        operations=frozenset(OPERATIONS) - {"recv_anysource"},
        tags=False,
    )


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

    __slots__ = ("_device", "after", "before", "calls", "communicator", "kept", "made_ops", "stream")

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
        return tensor if is_dense(tensor) else self._stand_in(tensor, True, False)

    def target(self, tensor: torch.Tensor, reads: bool = False) -> torch.Tensor:
        """Returns a dense tensor to be written: this one, or one that is copied into it afterwards.

        Args:
            tensor: the output.
            reads: whether its values are read, too.
        """
        self.kept.append(tensor)
        return tensor if is_dense(tensor) else self._stand_in(tensor, reads, True)

    def targets(self, tensors: Sequence[torch.Tensor], reads: bool = False) -> list[torch.Tensor]:
        """Returns the :meth:`target` of each of several tensors."""
        self.kept.extend(tensors)
        targets = []
        for tensor in tensors:  # a comprehension would be one more frame
            targets.append(tensor if is_dense(tensor) else self._stand_in(tensor, reads, True))  # noqa: PERF401
        return targets

    def _stand_in(self, tensor: torch.Tensor, reads: bool, writes: bool) -> torch.Tensor:
        made = self.temporary(tensor.numel(), tensor.dtype).view(tensor.shape)
        if reads:
            self.before.append((made, tensor.detach()))
        if writes:
            self.after.append((tensor.detach(), made))
        return made

    def temporary(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns a flat tensor that lives until the stream has passed the operations."""
        made = self._device.empty(self.stream, count, dtype)
        self.kept.append(made)
        return made

    def _add_call(self, count: int, function: Callable[..., None], *arguments: int) -> None:
        """Adds a call of NCCL; none where there are no elements, which is so on all ranks.

        Args:
            count: number of elements.
            function: method of the communicator.
            *arguments: its arguments but the stream, which is the last.
        """
        if count:
            self.calls.append(partial(function, *arguments, self.stream))

    def _code_of(self, reduction: Reduction) -> int:
        """Returns NCCL's code of a reduction; one with a factor is made, and good for these calls."""
        if reduction.factor is None:
            return reduction.op
        made = self.communicator.premul_sum(reduction.factor, reduction.dtype)
        self.made_ops.append(made)
        return made

    def _add_reduction(
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
            op = self._code_of(reduction)
            self.calls.append(partial(function, given, into, count, reduction.dtype, op, *root, self.stream))

    # ---- collectives, by their handlers ------------------------------------------------------------------

    def _all_reduce(self, call: Call) -> None:
        """Reduces tensors over all ranks, in place, each in its own type."""
        function, calls, stream = self.communicator.all_reduce, self.calls, self.stream
        reductions: dict[torch.dtype, tuple[Reduction, int]] = {}
        for own in self.targets(call.outputs, reads=True):
            count, dtype = own.numel(), own.dtype
            if not count:
                continue
            if dtype not in reductions:
                made = reduction_of(dtype, call.op)
                reductions[dtype] = made, made.op if made.factor is None else self._code_of(made)
            reduction, code = reductions[dtype]
            pointer = own.data_ptr()
            calls.append(
                partial(function, pointer, pointer, count * reduction.width, reduction.dtype, code, stream)
            )

    def _reduce(self, call: Call) -> None:
        """Reduces a tensor to the root, in place there; other ranks' are only read."""
        tensor = call.output
        own = (
            self.target(tensor, reads=True) if call.writes_on(self.communicator.rank) else self.source(tensor)
        )
        reduction, pointer = reduction_of(tensor.dtype, call.op), own.data_ptr()
        self._add_reduction(self.communicator.reduce, pointer, pointer, own.numel(), reduction, call.root)

    def _broadcast(self, call: Call) -> None:
        """Copies the root's tensor to all ranks."""
        tensor = call.output
        own = self.target(tensor) if call.writes_on(self.communicator.rank) else self.source(tensor)
        self._broadcast_bytes(own.data_ptr(), own.data_ptr(), byte_count(own), call.root)

    def _broadcast_bytes(self, given: int, into: int, count: int, root: int) -> None:
        self._add_call(count, self.communicator.broadcast, given, into, count, _BYTE, root)

    def _all_gather(self, call: Call) -> None:
        """Gathers every rank's tensor into a list: through one flat tensor, or part by part."""
        outputs = call.outputs
        given = self.source(call.input).data_ptr()
        if len({output.numel() for output in outputs}) > 1:
            for root, output in enumerate(outputs):
                into = self.target(output).data_ptr()
                from_ = given if root == self.communicator.rank else into
                self._broadcast_bytes(from_, into, byte_count(output), root)
            return
        count = byte_count(call.input)
        flat = self.temporary(count * len(outputs))
        self.kept.extend(outputs)
        self._add_call(count, self.communicator.all_gather, given, flat.data_ptr(), count, _BYTE)
        self.after.extend((output, part) for part, output in _parts(flat, outputs))

    def _all_gather_into_tensor(self, call: Call) -> None:
        """Gathers every rank's tensor into one."""
        given, into = self.source(call.input).data_ptr(), self.target(call.output).data_ptr()
        count = byte_count(call.input)
        self._add_call(count, self.communicator.all_gather, given, into, count, _BYTE)

    def _reduce_scatter(self, call: Call) -> None:
        """Reduces a list and keeps an entry: through one flat tensor, or entry by entry."""
        inputs, reduction = call.inputs, reduction_of(call.output.dtype, call.op)
        into = self.target(call.output).data_ptr()
        if len({part.numel() for part in inputs}) > 1:
            for root, part in enumerate(inputs):
                given = self.source(part).data_ptr()
                target = into if root == self.communicator.rank else given
                self._add_reduction(self.communicator.reduce, given, target, part.numel(), reduction, root)
            return
        flat = self.temporary(sum(map(byte_count, inputs)))
        self.kept.extend(inputs)
        self.before.extend(_parts(flat, inputs))
        self._add_reduction(
            self.communicator.reduce_scatter, flat.data_ptr(), into, call.output.numel(), reduction
        )

    def _reduce_scatter_tensor(self, call: Call) -> None:
        """Reduces a tensor and keeps a part."""
        given, into = self.source(call.input).data_ptr(), self.target(call.output).data_ptr()
        reduction = reduction_of(call.output.dtype, call.op)
        self._add_reduction(self.communicator.reduce_scatter, given, into, call.output.numel(), reduction)

    def _gather(self, call: Call) -> None:
        """Gathers every rank's tensor on the root, which copies its own."""
        root = call.root
        if not call.outputs:
            self._send_to(root, self.source(call.input))
            return
        for rank, output in enumerate(call.outputs):
            if rank != root:
                self._receive_from(rank, self.target(output))
        self.kept.extend((call.outputs[root], call.input))
        self.after.append(_assigned(call.outputs[root], call.input))

    def _scatter(self, call: Call) -> None:
        """Gives each rank a tensor of the root's, which copies its own."""
        root = call.root
        if not call.inputs:
            self._receive_from(root, self.target(call.output))
            return
        for rank, part in enumerate(call.inputs):
            if rank != root:
                self._send_to(rank, self.source(part))
        self.kept.extend((call.inputs[root], call.output))
        self.after.append(_assigned(call.output, call.inputs[root]))

    def _all_to_all(self, call: Call) -> None:
        """Exchanges lists of tensors, with itself too."""
        for rank, (output, part) in enumerate(zip(call.outputs, call.inputs, strict=True)):
            self._send_to(rank, self.source(part))
            self._receive_from(rank, self.target(output))

    def _all_to_all_single(self, call: Call) -> None:
        """Exchanges parts of tensors; splits count elements."""
        given, into = self.source(call.input).data_ptr(), self.target(call.output).data_ptr()
        sizes = zip(
            byte_splits(call.output, call.output_splits or ()),
            byte_splits(call.input, call.input_splits or ()),
            strict=True,
        )
        for rank, (received, sent) in enumerate(sizes):
            self._send_bytes(given, sent, rank)
            self._receive_bytes(into, received, rank)
            given += sent
            into += received

    def _barrier(self, call: Call) -> None:  # noqa: ARG002 - there is nothing to tell
        """Waits for all ranks."""
        token = self.temporary(1).data_ptr()
        self._add_call(1, self.communicator.all_reduce, token, token, 1, _BYTE, NcclRedOp.MAX)

    _all_reduce_coalesced = _all_reduce

    # ---- messages ----------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor) -> None:
        """Sends a tensor within a pair; an empty one as a byte, so that it, too, arrives when it was sent."""
        self._send_to(
            1 - self.communicator.rank, self.source(tensor) if tensor.numel() else self.temporary(1)
        )

    def receive(self, tensor: torch.Tensor) -> None:
        """Receives a tensor within a pair."""
        into = self.target(tensor) if tensor.numel() else self.temporary(1)
        self._receive_from(1 - self.communicator.rank, into)

    def _send_to(self, peer: int, tensor: torch.Tensor) -> None:
        self._send_bytes(tensor.data_ptr(), byte_count(tensor), peer)

    def _receive_from(self, peer: int, tensor: torch.Tensor) -> None:
        self._receive_bytes(tensor.data_ptr(), byte_count(tensor), peer)

    def _send_bytes(self, pointer: int, count: int, peer: int) -> None:
        self._add_call(count, self.communicator.send, pointer, count, _BYTE, peer)

    def _receive_bytes(self, pointer: int, count: int, peer: int) -> None:
        self._add_call(count, self.communicator.recv, pointer, count, _BYTE, peer)


def _views(flat: torch.Tensor, tensor: torch.Tensor) -> _Copy:
    """Returns bytes and a tensor as views of the same elements, to copy from the one to the other."""
    if is_dense(tensor):
        return flat, as_bytes(tensor)
    return flat.view(tensor.dtype).view(tensor.shape), tensor.detach()


def _parts(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[_Copy]:
    """Returns the :func:`_views` of tensors and of their parts of a concatenation of their bytes."""
    return list(map(_views, torch.split(flat, [byte_count(tensor) for tensor in tensors]), tensors))


def _assigned(output: torch.Tensor, given: torch.Tensor) -> _Copy:
    """Returns the copy of a tensor into one of as many elements."""
    if is_dense(given):
        return _views(as_bytes(given), output)[::-1]
    return output.detach(), given.detach().reshape(output.shape)


# ---- messages of a rank to itself ----------------------------------------------------------------------


class Loopback:
    """One rank's messages to itself, in order.

    NCCL lets a send to the own rank wait for its receive on the same stream, for ever where that is a later
    call. Here such a message is a copy of the tensor, which the receive copies on; both run on the current
    stream.
    """

    def __init__(self) -> None:
        self._messages: deque[tuple[torch.Tensor, Event]] = deque()
        self._lock = threading.Lock()

    def issue(
        self,
        group: Group,
        device: CudaDevice,
        stream: Stream,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
    ) -> None:
        """Puts messages that start together on the current stream; those sent are there for those received.

        Raises:
            UnsupportedOperationError: more are received than were sent; nothing is issued.
            ValueError: a message has another size or data type than the tensor to receive it; likewise.
        """
        with self._lock:
            messages = [message for message, _ in self._messages] + list(sent)
            if len(messages) < len(received):
                why = "a message of this rank to itself must be sent before it is received"
                fail(group, "recv", why, UnsupportedOperationError)
            for message, tensor in zip(messages, received, strict=False):
                if (message.numel(), message.dtype) != (tensor.numel(), tensor.dtype):
                    fail(
                        group,
                        "recv",
                        f"the message of this rank to itself is {message.dtype}[{message.numel()}], but the "
                        f"tensor to receive it {tensor.dtype}[{tensor.numel()}]",
                    )
            for tensor in sent:
                copy = device.empty(stream, tensor.numel(), tensor.dtype).view(tensor.shape)
                device.run(stream, partial(copy.copy_, tensor.detach()))
                self._messages.append((copy, device.record(stream)))
            taken = [self._messages.popleft() for _ in received]
        for tensor, (copy, event) in zip(received, taken, strict=True):
            event.wait(stream)
            device.run(stream, partial(tensor.detach().copy_, copy.view(tensor.shape)))
            device.share(stream, copy)
            device.drop([copy])

    def clear(self) -> None:
        """Drops all messages."""
        with self._lock:
            self._messages.clear()
