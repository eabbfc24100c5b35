"""Keeps a Python store alive while only torch's C++ code holds it.

torch's binding keeps the C++ half of an object whose class Python derives from a C++ class, and lets the
Python half go with Python's last reference to it (https://github.com/pybind/pybind11/issues/1333); from then
on every call of a C++ holder ends in an internal assertion. ``init_process_group(store=TCPStore(...))`` is
such a case: torch wraps the store in C++ and drops it.

The C++ half counts its holders. So the finalizer of a store asks for that count: if others than the Python
half hold it, the store is put aside, and let go when they have let it go. Where the counter lies is not
assumed but found out, once, by adding and dropping holders; where it cannot be found, stores live as long as
Python says.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Mapping
from typing import Protocol

from torch.distributed.distributed_c10d import PrefixStore as TorchPrefixStore
from torch.distributed.distributed_c10d import Store as TorchStore

_aside: dict[int, Releasable] = {}
_WORD = ctypes.sizeof(ctypes.c_void_p)
_COUNTER_OFFSETS = range(_WORD, 3 * _WORD, 4)
"""Where the counter may lie in the C++ half: behind the table of virtual functions."""


class Releasable(Protocol):
    """What can be kept alive."""

    def _release(self) -> None:
        """Gives back what it holds."""


def keep_if_held(store: Releasable) -> bool:
    """For the finalizer of a store: keeps it if C++ code holds it, and tells whether it does.

    It is released when C++ code has let it go, since a finalizer runs only once.
    """
    if not _held_by_cpp(store):
        return False
    if not _aside:
        gc.callbacks.append(_after_collection)
    _aside[id(store)] = store
    return True


def sweep() -> None:
    """Lets go of what C++ code has let go; called when stores come and go, and when garbage is collected."""
    for key, references in _references_to(_aside).items():
        store = _aside.get(key)  # a collection in between may have swept, too
        # Python code may have got the store back from a C++ holder.
        if store is None or references > _LEAST_REFERENCES or _held_by_cpp(store):
            continue
        if _aside.pop(key, None) is not None:
            store._release()
    if not _aside and _after_collection in gc.callbacks:
        gc.callbacks.remove(_after_collection)


def _references_to(table: Mapping[int, object]) -> dict[int, int]:
    """Counts the references to each value of a table, those of the counting among them."""
    return {key: sys.getrefcount(value) for key, value in list(table.items())}


# Interpreters differ in how many references the counting makes.
_LEAST_REFERENCES = _references_to({0: object()})[0]


def _after_collection(phase: str, info: Mapping[str, int]) -> None:  # noqa: ARG001 - as gc calls it
    if phase == "stop":
        sweep()


def _held_by_cpp(store: object) -> bool:
    """Tells whether anybody but the Python object holds the C++ half."""
    offset = _counter_offset()
    address = None if offset is None else _cpp_address(store)
    return address is not None and offset is not None and _read(address + offset) > 1


@functools.cache
def _counter_offset() -> int | None:
    """Finds where in the C++ half the number of its holders is kept, in 32 bits; ``None`` if nowhere."""
    if sys.implementation.name != "cpython":
        return None
    probe = _Probe()
    address = _cpp_address(probe)
    if address is None:
        return None
    places = [address + offset for offset in _COUNTER_OFFSETS]
    seen = [[_read(place) for place in places]]
    holders = []
    for _ in range(2):
        holders.append(TorchPrefixStore("", probe))
        seen.append([_read(place) for place in places])
    holders.clear()
    seen.append([_read(place) for place in places])
    for offset, counts in zip(_COUNTER_OFFSETS, zip(*seen, strict=True), strict=True):
        if counts == (1, 2, 3, 1):
            return offset
    return None


class _Probe(TorchStore):
    """A store written in Python, as all of ours."""


def _cpp_address(store: object) -> int | None:
    """Returns the address of the C++ half; the Python object has it as pointer, then as owning pointer."""
    if object.__basicsize__ + 2 * _WORD > TorchStore.__basicsize__:
        return None
    pointer, owner = (_read_word(id(store) + object.__basicsize__ + i * _WORD) for i in range(2))
    return pointer if pointer and pointer == owner and pointer % _WORD == 0 else None


def _read(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def _read_word(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0
