"""What torch's operations read and write, for the double, which finds accesses that nothing orders."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

_MOST_PIECES = 4096
"""Of a tensor that does not fill its range; one with more counts as if it did."""

MAKES_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operations that give memory out and leave it as it is."""

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(ctypes.__file__).parents[1]))
_OWN = str(Path(__file__).parent)

_on_host: dict[int, StorageWeakRef] = {}
"""Memory of the host that streams may use, as pinned memory, by address."""


class Range(ctypes.Structure):
    """Bytes that an operation accesses."""

    _fields_ = (("begin", ctypes.c_size_t), ("end", ctypes.c_size_t), ("writes", ctypes.c_bool))


@cache
def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, _OWN, "<"))


def caller() -> str:
    """Returns which line, outside the libraries and the double, is being carried out."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the range of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def keep_on_host(tensor: torch.Tensor) -> None:
    """Notes that a tensor is in memory of the host."""
    storage = tensor.untyped_storage()
    _on_host[storage.data_ptr()] = StorageWeakRef(storage)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is in memory of the host."""
    address = tensor.untyped_storage().data_ptr()
    if (known := _on_host.get(address)) is not None and known.expired():
        del _on_host[address]
        return False
    return known is not None


def tensors_in(values: object) -> list[torch.Tensor]:
    """Returns the tensors with memory among values and collections of them."""
    return [
        one
        for one in tree_leaves(values)
        if isinstance(one, torch.Tensor) and one.layout is torch.strided and one.device.type == "cpu"
    ]


def of_tensor(tensor: torch.Tensor, writes: bool) -> Iterator[Range]:
    """Yields the ranges that a tensor's elements lie in."""
    if tensor.numel() == 0 or (begin := tensor.data_ptr()) == 0:
        return
    width = tensor.element_size()
    outer: list[tuple[int, int]] = []
    piece = width
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if not outer and stride * width == piece:
            piece *= size
        else:
            outer.append((stride * width, size))
    pieces = 1
    for _, size in outer:
        pieces *= size
    if pieces > _MOST_PIECES:
        piece += sum(stride * (size - 1) for stride, size in outer)
        outer = []
    for places in itertools.product(*(range(0, stride * size, stride) for stride, size in outer)):
        start = begin + sum(places)
        yield Range(start, start + piece, writes)


def of_call(func: Any, args: Any, kwargs: Any) -> list[Range]:
    """Returns what an operation reads and writes of its arguments."""
    about = {one.name: one.is_write for one in func._schema.arguments}
    named = {**dict(zip(about, args, strict=False)), **kwargs}
    return [
        piece
        for name, given in named.items()
        for tensor in tensors_in(given)
        for piece in of_tensor(tensor, about[name])
    ]


def new_memory(func: Any, args: Any, kwargs: Any, results: object) -> list[torch.Tensor]:
    """Returns the results of an operation that are in memory of none of its arguments."""
    given = {memory_of(tensor)[0] for tensor in tensors_in((args, kwargs))}
    return [tensor for tensor in tensors_in(results) if memory_of(tensor)[0] not in given]


def of_new(func: Any, made: list[torch.Tensor]) -> list[Range]:
    """Returns what an operation writes of the memory that it was given."""
    if func.overloadpacket.__name__ in MAKES_EMPTY:
        return []
    return [piece for tensor in made for piece in of_tensor(tensor, True)]
