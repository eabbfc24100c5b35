"""What each operation does on its stream.

Words. An operation's *steps* are copies into dense temporaries, then calls of NCCL, which start together,
then copies out of temporaries; all on one stream. A tensor is *dense* when its memory is its values in
order. NCCL takes pointers to dense memory only.

NCCL has no gather, scatter or all-to-all, and no parts of different sizes: those are sends and receives, or
broadcasts and reductions with a root for each part, in one group of calls (NCCL User's Guide, "Group Calls"
and "Point-to-point communication"). What only moves goes as bytes, so that every data type can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from collectives.backends.nccl.device import Device, Stream
from collectives.backends.nccl.library.codes import NcclDataType, NcclRedOp
from collectives.backends.nccl.library.interface import Communicator
from collectives.backends.nccl.reductions import Reduction
from collectives.core.arguments.staging import is_dense
from collectives.core.dtypes import element_bytes, elements_per_byte, native_count

__all__ = [
    "Steps",
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "receive",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "send",
]

_BYTE = NcclDataType.UINT8


class Steps:
    """The steps of one operation.

    Args:
        device: the device.
        stream: where they run.
        communicator: what NCCL's calls go to.

    Attributes:
        communicator: the communicator.
        before: copies into temporaries.
        calls: calls of NCCL.
        after: copies out of temporaries.
        kept: tensors that must live until the stream has passed the steps.
    """

    def __init__(self, device: Device, stream: Stream, communicator: Communicator) -> None:
        self.communicator = communicator
        self.before: list[Callable[[], object]] = []
        self.calls: list[Callable[[], object]] = []
        self.after: list[Callable[[], object]] = []
        self.kept: list[torch.Tensor] = []
        self._device = device
        self._stream = stream
        self._made_ops: list[int] = []

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a dense tensor to be read: this one, or a copy."""
        self.kept.append(tensor)
        if is_dense(tensor):
            return tensor
        stand_in = self.temporary(tensor.numel(), tensor.dtype).view(tensor.shape)
        self.before.append(partial(stand_in.copy_, tensor.detach()))
        return stand_in

    def target(self, tensor: torch.Tensor, reads: bool = False) -> torch.Tensor:
        """Returns a dense tensor to be written: this one, or one that is copied into it afterwards.

        Args:
            tensor: the output.
            reads: whether its values are read, too.
        """
        self.kept.append(tensor)
        if is_dense(tensor):
            return tensor
        stand_in = self.temporary(tensor.numel(), tensor.dtype).view(tensor.shape)
        if reads:
            self.before.append(partial(stand_in.copy_, tensor.detach()))
        self.after.append(partial(tensor.detach().copy_, stand_in))
        return stand_in

    def temporary(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns a flat tensor that lives until the stream has passed the steps."""
        made = self._device.empty(self._stream, count, dtype)
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
            self.calls.append(partial(function, *arguments, self._device.handle(self._stream)))

    def op(self, how: Reduction) -> int:
        """Returns the code of a reduction, good until :meth:`clean`."""
        if how.factor is None:
            return how.op
        made = self.communicator.premul_sum(how.factor, how.dtype)
        self._made_ops.append(made)
        return made

    def clean(self) -> None:
        """Gives back what the calls needed; after they were started."""
        for op in self._made_ops:
            self.communicator.destroy_op(op)


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the size of a dense tensor in bytes; quantized types may have several elements in one."""
    if tensor.is_quantized:
        return native_count(tensor) * element_bytes(tensor.dtype)
    return tensor.numel() * tensor.element_size()


def _copy(output: torch.Tensor, flat: torch.Tensor) -> None:
    """Copies bytes into a tensor."""
    if is_dense(output):
        _as_bytes(output).copy_(flat)
    else:
        output.detach().copy_(flat.view(output.dtype).view(output.shape))


def _pack(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a tensor into bytes."""
    if is_dense(tensor):
        flat.copy_(_as_bytes(tensor))
    else:
        flat.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _assign(output: torch.Tensor, given: torch.Tensor) -> None:
    """Copies a tensor into one of as many elements."""
    if is_dense(given):
        _copy(output, _as_bytes(given))
    else:
        output.detach().copy_(given.detach().reshape(output.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a dense tensor, whatever strides one of a single element has."""
    if tensor.is_quantized:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        offset = tensor.storage_offset() * tensor.element_size()
        return flat.set_(tensor.untyped_storage(), offset, (_bytes(tensor),), (1,))
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def all_reduce(steps: Steps, tensor: torch.Tensor, how: Reduction) -> None:
    """Reduces a tensor over all ranks, in place."""
    own = steps.target(tensor, reads=True)
    pointer, count = own.data_ptr(), own.numel() * how.width
    steps.call(count, steps.communicator.all_reduce, pointer, pointer, count, how.dtype, steps.op(how))


def reduce(steps: Steps, tensor: torch.Tensor, how: Reduction, root: int) -> None:
    """Reduces a tensor to the root, in place there; other ranks' are only read."""
    is_root = steps.communicator.rank == root
    own = steps.target(tensor, reads=True) if is_root else steps.source(tensor)
    _reduce_to(steps, own.data_ptr(), own.data_ptr(), own.numel() * how.width, how, root)


def _reduce_to(steps: Steps, given: int, into: int, count: int, how: Reduction, root: int) -> None:
    steps.call(count, steps.communicator.reduce, given, into, count, how.dtype, steps.op(how), root)


def broadcast(steps: Steps, tensor: torch.Tensor, root: int) -> None:
    """Copies the root's tensor to all ranks."""
    is_root = steps.communicator.rank == root
    own = steps.source(tensor) if is_root else steps.target(tensor)
    _broadcast_from(steps, own.data_ptr(), own.data_ptr(), _bytes(own), root)


def _broadcast_from(steps: Steps, given: int, into: int, count: int, root: int) -> None:
    steps.call(count, steps.communicator.broadcast, given, into, count, _BYTE, root)


def all_gather(steps: Steps, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """Gathers every rank's tensor into a list: through one flat tensor, or part by part."""
    given = steps.source(tensor).data_ptr()
    if len({output.numel() for output in outputs}) > 1:
        for root, output in enumerate(outputs):
            into = steps.target(output).data_ptr()
            from_ = given if root == steps.communicator.rank else into
            _broadcast_from(steps, from_, into, _bytes(output), root)
        return
    count = _bytes(tensor)
    flat = steps.temporary(count * len(outputs))
    steps.kept.extend(outputs)
    steps.call(count, steps.communicator.all_gather, given, flat.data_ptr(), count, _BYTE)
    steps.after.extend(partial(_copy, output, part) for output, part in _parts(outputs, flat))


def all_gather_single(steps: Steps, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Gathers every rank's tensor into one."""
    given, into = steps.source(tensor).data_ptr(), steps.target(output).data_ptr()
    count = _bytes(tensor)
    steps.call(count, steps.communicator.all_gather, given, into, count, _BYTE)


def reduce_scatter(
    steps: Steps, output: torch.Tensor, inputs: Sequence[torch.Tensor], how: Reduction
) -> None:
    """Reduces a list and keeps an entry: through one flat tensor, or entry by entry."""
    into = steps.target(output).data_ptr()
    if len({part.numel() for part in inputs}) > 1:
        for root, part in enumerate(inputs):
            given = steps.source(part).data_ptr()
            target = into if root == steps.communicator.rank else given
            _reduce_to(steps, given, target, part.numel() * how.width, how, root)
        return
    flat = steps.temporary(sum(map(_bytes, inputs)))
    steps.kept.extend(inputs)
    steps.before.extend(partial(_pack, part, given) for given, part in _parts(inputs, flat))
    _reduce_scatter_flat(steps, flat.data_ptr(), into, output.numel() * how.width, how)


def reduce_scatter_single(steps: Steps, output: torch.Tensor, tensor: torch.Tensor, how: Reduction) -> None:
    """Reduces a tensor and keeps a part."""
    given, into = steps.source(tensor).data_ptr(), steps.target(output).data_ptr()
    _reduce_scatter_flat(steps, given, into, output.numel() * how.width, how)


def _reduce_scatter_flat(steps: Steps, given: int, into: int, count: int, how: Reduction) -> None:
    steps.call(count, steps.communicator.reduce_scatter, given, into, count, how.dtype, steps.op(how))


def gather(steps: Steps, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
    """Gathers every rank's tensor on the root, which copies its own."""
    if outputs is None:
        _send(steps, steps.source(tensor).data_ptr(), _bytes(tensor), root)
        return
    for rank, output in enumerate(outputs):
        if rank != root:
            _receive(steps, steps.target(output).data_ptr(), _bytes(output), rank)
    steps.kept.extend((outputs[root], tensor))
    steps.after.append(partial(_assign, outputs[root], tensor))


def scatter(steps: Steps, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
    """Gives each rank a tensor of the root's, which copies its own."""
    if inputs is None:
        _receive(steps, steps.target(output).data_ptr(), _bytes(output), root)
        return
    for rank, part in enumerate(inputs):
        if rank != root:
            _send(steps, steps.source(part).data_ptr(), _bytes(part), rank)
    steps.kept.extend((inputs[root], output))
    steps.after.append(partial(_assign, output, inputs[root]))


def all_to_all(steps: Steps, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Exchanges lists of tensors, with itself too."""
    for rank, (output, part) in enumerate(zip(outputs, inputs, strict=True)):
        _send(steps, steps.source(part).data_ptr(), _bytes(part), rank)
        _receive(steps, steps.target(output).data_ptr(), _bytes(output), rank)


def all_to_all_single(
    steps: Steps,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> None:
    """Exchanges parts of tensors; splits count elements."""
    width, shared = tensor.element_size(), elements_per_byte(tensor.dtype)
    given, into = steps.source(tensor).data_ptr(), steps.target(output).data_ptr()
    for rank, splits in enumerate(zip(output_splits, input_splits, strict=True)):
        received, sent = (split * width // shared for split in splits)
        _send(steps, given, sent, rank)
        _receive(steps, into, received, rank)
        given += sent
        into += received


def barrier(steps: Steps) -> None:
    """Waits for all ranks."""
    token = steps.temporary(1).data_ptr()
    steps.call(1, steps.communicator.all_reduce, token, token, 1, _BYTE, NcclRedOp.MAX)


def send(steps: Steps, tensor: torch.Tensor, peer: int) -> None:
    """Sends a tensor; an empty one as a byte, so that it, too, arrives when it was sent."""
    given = steps.source(tensor) if tensor.numel() else steps.temporary(1)
    _send(steps, given.data_ptr(), _bytes(given), peer)


def receive(steps: Steps, tensor: torch.Tensor, peer: int) -> None:
    """Receives a tensor."""
    into = steps.target(tensor) if tensor.numel() else steps.temporary(1)
    _receive(steps, into.data_ptr(), _bytes(into), peer)


def _send(steps: Steps, pointer: int, count: int, peer: int) -> None:
    steps.call(count, steps.communicator.send, pointer, count, _BYTE, peer)


def _receive(steps: Steps, pointer: int, count: int, peer: int) -> None:
    steps.call(count, steps.communicator.recv, pointer, count, _BYTE, peer)


def _parts(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the tensors with their parts of a concatenation of their bytes."""
    return list(zip(tensors, torch.split(flat, [_bytes(tensor) for tensor in tensors]), strict=True))
