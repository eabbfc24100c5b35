"""Memory of the double as a caching allocator of a device has it: given out again in the order of a stream.

Memory belongs to the stream that was current when it was made. Once nobody has it, that stream's next
operation may get it, whatever other streams still do with it, except those that the allocator was told of.
So the double takes memory that is given back for written to by who gets it next, and finds the operations
that are not ordered before.
"""

from __future__ import annotations

import ctypes
import sys
import weakref

import torch

from nccl_double import accesses, do

_POISON = 0xA5
"""Every byte of memory that was given back."""

_known: dict[int, tuple[weakref.finalize[..., torch.UntypedStorage], list[int]]] = {}
"""Of memory given out, by address: what is called at its end, and the streams that use it, its own first."""


def forget(tensor: torch.Tensor) -> None:
    """Notes that a tensor's memory has been given out anew."""
    do("forget_accesses", *accesses.memory_of(tensor))


def give_out(tensor: torch.Tensor, stream: int) -> None:
    """Notes that a tensor's memory has been given out for a stream."""
    forget(tensor)
    begin, end = accesses.memory_of(tensor)
    if begin != end:
        streams = [stream]
        finalize = weakref.finalize(tensor.untyped_storage(), _end, begin, end, streams)
        finalize.atexit = False
        _known[begin] = finalize, streams


def share(tensor: torch.Tensor, stream: int) -> None:
    """Lets a tensor's memory be given out again only behind a stream, too."""
    known = _known.get(accesses.memory_of(tensor)[0])
    if known is not None:
        known[1].append(stream)


def _end(begin: int, end: int, streams: list[int]) -> None:
    _known.pop(begin, None)
    if sys.is_finalizing():
        return
    what = f"the next owner of memory given back at {accesses.caller()}"
    do("give_back", (ctypes.c_ssize_t * len(streams))(*streams), len(streams), what.encode(), begin, end)


def give_back(tensors: list[torch.Tensor]) -> None:
    """Gives back what nobody else has, although streams that are late have yet to use it."""
    for place in range(len(tensors)):
        if _is_last(tensors, place):
            known = _known.get(accesses.memory_of(tensors[place])[0])
            if known is not None:
                known[0]()


def poison(tensors: list[torch.Tensor]) -> None:
    """Empties a list, and overwrites what nobody else has, as who gets it next may do."""
    while tensors:
        if _is_last(tensors, -1):
            tensors[-1].untyped_storage().fill_(_POISON)
        tensors.pop()


_ALONE = [object()]
_REFERENCES = sys.getrefcount(_ALONE[0])
"""How many references this Python counts to an element that only its list has."""


def _is_last(tensors: list[torch.Tensor], place: int) -> bool:
    """Returns whether a list has the only reference to a tensor, and nothing else its memory."""
    storage = tensors[place].untyped_storage()
    held_by_these = 2  # the tensor and the object for its storage
    return (
        sys.getrefcount(tensors[place]) <= _REFERENCES
        and torch._C._storage_Use_Count(storage._cdata) <= held_by_these
    )
