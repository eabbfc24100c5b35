"""All-reduces of small tensors: messages that are made once, and started again for every call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from collectives import _native
from collectives.backends.arithmetic import REDUCTIONS
from collectives.backends.mpi.buffers import Buffers
from collectives.backends.mpi.engine import Engine
from collectives.backends.mpi.runtime import Library
from collectives.backends.mpi.work import MPIWork
from collectives.backends.operation import Operation
from collectives.dtypes import NATIVE_CODES
from collectives.types import ReduceOp

__all__ = ["Slots", "SmallReductions"]

_LARGEST_BYTES = 1024
_LEAST_BYTES = 8
_MOST_RANKS = 16
"""Up to here every rank sends its tensor to each other one; beyond, MPI's own all-gather does."""

_SPINS = 400
"""Tests in a row."""

_SPINS_IN_A_CROWD = 10

_PATIENT_SECONDS = 0.002
"""How long it goes on testing, the core given away in between, before the engine takes over."""

for _type in (torch.Tensor, torch.nn.Parameter):
    _native.register_tensor_type(_type)

_ITEM_BYTES = {
    (NATIVE_CODES[dtype], op.code): _native.dtype_size(NATIVE_CODES[dtype])
    for dtype, names in REDUCTIONS.items()
    for op in (
        ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX,
        ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR,
    )
    if op.name in names and dtype in NATIVE_CODES
}  # fmt: skip
"""Bytes of an element, by the codes of data type and reduction, for reductions that have no factor."""


class Slots:
    """Memory for a small tensor of every rank, and the messages that fill it.

    Attributes:
        own: address of the place for this rank's tensor, which is sent to all others.
        sources: addresses of all ranks' places, in rank order.
        requests: MPI's persistent requests, inactive unless an all-reduce is under way.
        nbytes: length of a place.
    """

    __slots__ = ("_memory", "nbytes", "own", "requests", "sources")

    def __init__(
        self, communicator: Any, buffers: Buffers, rank: int, size: int, nbytes: int, tag: int
    ) -> None:
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes * size, dtype=torch.uint8)
        begin = self._memory.data_ptr()
        self.sources = [begin + other * nbytes for other in range(size)]
        self.own = self.sources[rank]
        # Each begins with the next rank, so that not all send to the same one first.
        behind, ahead = ([(rank + way * step) % size for step in range(1, size)] for way in (-1, 1))
        self.requests = [
            communicator.Recv_init(buffers(self.sources[peer], nbytes), peer, tag) for peer in behind
        ]
        self.requests += [communicator.Send_init(buffers(self.own, nbytes), peer, tag) for peer in ahead]


class SmallReductions:
    """All-reduces of tensors of up to 1 KiB in groups of up to 16 ranks.

    Every rank sends its tensor to all others, under one tag, and reduces what it gets. Ranks issue them in
    the same order, and messages of one tag between two ranks stay in order, so that they meet as they should
    whichever way each rank waits for its own.

    Args:
        library: the MPI library.
        engine: the engine, for what takes long.
        communicator: MPI's.
        buffers: makes messages of memory.
        rank: this process's rank.
        size: number of ranks.
        tag: used for nothing else on the communicator.
        describe: returns an operation of a given number on a tensor, for messages and its time limit.
    """

    def __init__(
        self,
        library: Library,
        engine: Engine,
        communicator: Any,
        buffers: Buffers,
        rank: int,
        size: int,
        tag: int,
        describe: Callable[[int, torch.Tensor], Operation],
    ) -> None:
        self._engine = engine
        self._make: Callable[[int], Slots] = lambda nbytes: Slots(
            communicator, buffers, rank, size, nbytes, tag
        )
        self._describe = describe
        self._view = _native.plain_view
        self._divisor = float(size)
        self._error = library.mpi.Exception
        self._startall = library.mpi.Prequest.Startall
        self._testall = library.mpi.Request.Testall
        self._spins = _SPINS_IN_A_CROWD if library.crowded else _SPINS
        self._largest = _LARGEST_BYTES if size <= _MOST_RANKS else 0
        self._largest_at_once = self._largest if library.concurrent else 0
        self._all: list[Slots] = []  # so that none goes while MPI may write into it
        self._free: dict[int, list[Slots]] = {}
        nbytes = _LEAST_BYTES
        while nbytes <= self._largest:
            self._free[nbytes] = []
            nbytes *= 2
        self._free_of = [
            self._free[max(_LEAST_BYTES, 1 << max(0, nbytes - 1).bit_length())]
            for nbytes in range(self._largest + 1)
        ]

    # ---- slots ---------------------------------------------------------------------------------------------

    def serves(self, nbytes: int) -> bool:
        """Returns whether tensors of so many bytes are reduced here; the same on all ranks."""
        return 0 < nbytes <= self._largest

    def take(self, nbytes: int) -> Slots:
        """Returns slots for tensors of so many bytes, to be used for one operation."""
        try:
            return self._free_of[nbytes].pop()
        except IndexError:
            made = self._make(max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length()))
            self._all.append(made)
            return made

    def give_back(self, slots: Slots) -> None:
        """Takes slots back whose operation is done."""
        self._free[slots.nbytes].append(slots)

    def start(self, slots: Slots) -> list[Any]:
        """Starts the messages of slots; returns their requests."""
        self._startall(slots.requests)
        return slots.requests

    def close(self) -> None:
        """Frees the messages of all slots that were given back; nothing may be issued afterwards."""
        for slots in self._free.values():
            while slots:
                for request in slots.pop().requests:
                    request.Free()

    # ---- the shortest way ----------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op_code: int, numbers: Iterator[int]) -> bool:
        """Reduces a small dense tensor without a Work; ``False``, with nothing done, where it is not one.

        Args:
            tensor: whatever the user gave.
            op_code: code of the reduction.
            numbers: gives the number of the next operation.
        """
        view = self._view(tensor)
        if view is None:
            return False
        address, count, code = view
        nbytes = count * _ITEM_BYTES.get((code, op_code), 0)
        if not 0 < nbytes <= self._largest_at_once or self._engine.cause is not None or self._engine.ended:
            return False
        number, slots = next(numbers), self.take(nbytes)
        _native.copy(slots.own, address, nbytes)
        requests, testall = slots.requests, self._testall
        try:
            self._startall(requests)
            for _ in range(self._spins):
                if testall(requests):
                    done = True
                    break
            else:
                done = _done_soon(testall, requests)
        except self._error as error:
            raise self._engine.failed(self._describe(number, tensor), error) from error
        except BaseException:  # a signal's, for one: the messages are under way
            self._engine.launch(self._work(number, tensor, slots, lambda: self.give_back(slots)), True)
            raise
        if not done:
            self._engine.launch(self._work(number, tensor, slots), False)
        _native.reduce(address, slots.sources, count, code, op_code, self._divisor)
        self._free_of[nbytes].append(slots)
        return True

    def _work(
        self, number: int, tensor: torch.Tensor, slots: Slots, after: Callable[[], None] | None = None
    ) -> MPIWork:
        return MPIWork(
            self._engine, self._describe(number, tensor), slots.requests, after=after, keep=(slots, tensor)
        )


def _done_soon(testall: Callable[..., bool], requests: list[Any]) -> bool:
    """Tests for a while, and lets others have the core in between; returns whether all are done."""
    until = time.monotonic() + _PATIENT_SECONDS
    while time.monotonic() < until:
        os.sched_yield()
        if testall(requests):
            return True
    return False
