"""Broadcast of many tensors at once, such as buffers: small ones in one flat message, large ones as they are.

Autograd must see that a tensor was written where that changes what a graph has saved, and nowhere else: a
backward pass over several forwards would fail for values that are still right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

import torch
from torch import nn

from collectives import BroadcastOptions, ProcessGroup, Work
from collectives.core.arguments.staging import repeats_elements
from collectives.ddp.module.arguments import MIB

_SMALL_BYTES = MIB
"""Tensors of fewer bytes than this are copied to a flat message."""

_MESSAGE_BYTES = 16 * MIB
"""A flat message is closed when it holds this many bytes."""

_ALIGNMENT = 16
"""Tensors begin at multiples of so many bytes within a message; no data type has wider elements."""


_FORM = attrgetter("dtype", "shape", "device")


class _FlatBroadcast:
    """One message, used again and again, that carries tensors of one device from one rank to all.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._forms: list[object] = []

    def _lay_out(self, tensors: Sequence[torch.Tensor]) -> None:
        self._forms = list(map(_FORM, tensors))
        offsets = []
        end = 0
        for tensor in tensors:
            offsets.append(end)
            size = tensor.numel() * tensor.element_size()
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        with torch.inference_mode(False):  # a later forward outside of it writes there, too
            self._message = torch.zeros(end, dtype=torch.uint8, device=tensors[0].device)
            self._places = [
                self._message[offset : offset + tensor.numel() * tensor.element_size()]
                .view(tensor.dtype)
                .view(tensor.shape)
                for offset, tensor in zip(offsets, tensors, strict=True)
            ]

    def start(self, tensors: Sequence[torch.Tensor], root: int, *, blocking: bool = False) -> None:
        """Sends the root's tensors; called by all ranks. :meth:`finish` must follow.

        Args:
            tensors: on the root, the tensors to send; elsewhere, others of their shapes and data types, which
                may be other ones each time.
            root: rank that sends.
            blocking: whether the caller waits at once, which lets the group run the broadcast on the caller's
                thread.
        """
        if list(map(_FORM, tensors)) != self._forms:
            self._lay_out(tensors)
        if self._group.rank() == root:
            with torch.no_grad():
                torch._foreach_copy_(self._places, list(tensors))
        options = BroadcastOptions(asyncOp=not blocking, rootRank=root)
        self._sent = self._group.broadcast([self._message], options), tensors, root

    def finish(self, *, only_changes: bool = False) -> None:
        """Blocks until the message is here and writes it to the tensors; the root's stay as they are.

        Args:
            only_changes: whether tensors are left alone that hold the root's values already.
        """
        work, tensors, root = self._sent
        del self._sent
        work.wait()
        if self._group.rank() == root:
            return
        if only_changes:
            write_changes(tensors, self._places)
        else:
            with torch.no_grad():
                torch._foreach_copy_(list(tensors), self._places)


class CoalescedBroadcast:
    """A broadcast of many tensors from one rank, again and again; small ones share flat messages.

    Called by all ranks: first :meth:`start`, then :meth:`finish`.

    Args:
        group: the ranks.
        tensors: tensors of any data types on any devices of the group; shapes and data types as on the root.
            They are read and written in place each time.
        root: rank whose values all ranks get.
    """

    def __init__(self, group: ProcessGroup, tensors: Sequence[torch.Tensor], root: int) -> None:
        self._group = group
        self._root = root
        self._large, small = _messages_of(tensors)
        self._small = [(_FlatBroadcast(group), together) for together in small]
        self._works: list[Work] = []

    def start(self) -> None:
        """Sends the root's tensors without waiting."""
        self._works = [
            self._group.broadcast([tensor.detach()], BroadcastOptions(rootRank=self._root))
            for tensor in self._large
        ]
        for message, tensors in self._small:
            message.start(tensors, self._root)

    def finish(self) -> None:
        """Blocks until the tensors hold the root's values."""
        for message, _ in self._small:
            message.finish()
        for work in self._works:
            work.wait()
        self._works = []
        if self._large and self._group.rank() != self._root:
            torch.autograd.graph.increment_version(self._large)


def _messages_of(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Returns the tensors that are messages as they are, and those that share each of the others."""
    large: list[torch.Tensor] = []
    small: list[list[torch.Tensor]] = []
    filling: dict[torch.device, tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size >= _SMALL_BYTES and tensor.is_contiguous():
            large.append(tensor)
        elif size:
            held, count = filling.pop(tensor.device, ([], 0))
            held.append(tensor)
            if count + size >= _MESSAGE_BYTES:
                small.append(held)
            else:
                filling[tensor.device] = (held, count + size)
    return large, small + [held for held, _ in filling.values()]


def broadcast_coalesced(group: ProcessGroup, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Copies the root's tensors to all ranks, in place, once; called by all of them, blocks.

    Autograd does not see those that hold the root's values already.

    Args:
        group: the ranks.
        tensors: as for :class:`CoalescedBroadcast`.
        root: rank whose values all ranks get.
    """
    large, small = _messages_of([tensor.detach() for tensor in tensors])
    for together in [[tensor] for tensor in large] + small:  # one by one: the messages are memory, too
        message = _FlatBroadcast(group)
        message.start(together, root, blocking=True)
        message.finish(only_changes=True)


@torch.no_grad()
def write_changes(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Writes values to tensors, but for those that hold them already, bit by bit.

    Waits for a device.

    Args:
        tensors: where to.
        values: tensors of the same shapes and data types.
    """
    changed = [
        (tensor, value)
        for tensor, value in zip(tensors, values, strict=True)
        if not torch.equal(_bits(tensor), _bits(value))
    ]
    if changed:
        torch._foreach_copy_([tensor for tensor, _ in changed], [value for _, value in changed])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as integers, of which NaN equals itself and zeros of both signs differ."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


class BufferSync:
    """Sends one rank's buffers to all, all in one message for each device; true where there are any.

    Buffers are looked up by name each time, so that a module may assign new tensors to them, of other shapes
    and data types, too, on all ranks alike.

    Args:
        module: the module.
        group: the ranks.
        ignored: names of buffers that are left alone.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, ignored: Collection[str]) -> None:
        places: dict[torch.device, list[tuple[str, nn.Module, str]]] = {}
        seen: set[int] = set()
        for prefix, owner in module.named_modules():
            for key, buffer in owner._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is None or name in ignored or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                places.setdefault(buffer.device, []).append((name, owner, key))
        self._messages = [(_FlatBroadcast(group), there) for there in places.values()]

    def __bool__(self) -> bool:
        return bool(self._messages)

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers by name."""
        return {
            name: buffer
            for _, places in self._messages
            for name, owner, key in places
            if (buffer := owner._buffers[key]) is not None
        }

    def __call__(self, root: int = 0) -> None:
        """Sends the buffers; called by all ranks. Blocks.

        Autograd sees nothing of it, as with torch: the backward pass of an earlier forward may still come.
        Where the buffers were equal, as all that training leaves alone, it finds the same values; the
        statistics of batch normalisation, which differ, it does not read.

        Args:
            root: rank that sends its own.
        """
        for message, places in self._messages:
            buffers = [_unseen(owner, key) for _, owner, key in places]
            message.start(buffers, root, blocking=len(self._messages) == 1)
        for message, _ in self._messages:
            message.finish()


def refuse_overlaps(tensors: Mapping[str, torch.Tensor], model: str) -> None:
    """Checks that each element has memory of its own, so that another rank's values can be written there.

    Args:
        tensors: parameters and buffers by name.
        model: the model in words.

    Raises:
        ValueError: elements share their memory, as after ``expand``.
    """
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and repeats_elements(tensor):
            raise ValueError(
                f"{name} of {model} has the shape {list(tensor.shape)} and the strides "
                f"{list(tensor.stride())}: elements share their memory, so that rank 0's values cannot be "
                "written there; register tensor.clone() instead of what expand() returned"
            )


def _unseen(owner: nn.Module, key: str) -> torch.Tensor:
    """Returns the memory of a buffer as a tensor whose changes autograd does not see."""
    buffer = owner._buffers[key]
    if buffer is None:
        raise RuntimeError(
            f"buffer {key} of {type(owner).__name__} was set to None after the module was wrapped"
        )
    return buffer.data
