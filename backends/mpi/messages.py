"""Messages of an MPI group: memory and tags as MPI takes them, and collectives made of messages.

In these collectives each rank exchanges parts with every other one directly. Messages are tagged with the
number of their collective, so that operations in flight do not mix.

A reduction has two stages, after R. Rabenseifner, "Optimization of collective reduction operations" (ICCS
2004), with direct exchanges instead of recursive ones: every rank collects its part from all others and
reduces it, then hands the result on. Sources are combined in rank order by the package's own kernels, which
round once, so that the bits depend on nothing but the values. A reduction is cut into chunks, two of which
are under way at a time, so that the kernels find in the cache what has just arrived.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

import collectives._native as _native
from collectives.backends._shared.arithmetic import kernel_factor
from collectives.backends._shared.operation import Operation
from collectives.backends._shared.tensor_memory import Part
from collectives.backends.mpi.work import Steps
from collectives.core.native_dtypes import NATIVE_CODES, element_bytes
from collectives.core.types import ReduceOp
from collectives.errors import DistBackendError

__all__ = [
    "CHUNK_BYTES",
    "Arithmetic",
    "Buffers",
    "MessageExchange",
    "Tags",
    "arithmetic_of",
    "check_length",
    "cut",
]

_MOST = 2**31 - 1
"""The largest number of elements that every MPI library takes; those before MPI 4 count in C's int."""

_BLOCK_BYTES = 2**30


class Buffers:
    """Makes buffers of bytes for one MPI library.

    Args:
        mpi: the module ``mpi4py.MPI``.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._of_address = mpi.buffer.fromaddress
        self._byte = mpi.BYTE

    def __call__(self, address: int, nbytes: int) -> list[Any]:
        """Returns memory as a message; whoever asks keeps it alive."""
        memory = self._of_address(address, nbytes)
        return [memory, nbytes, self._byte] if nbytes <= _MOST else [memory, 1, self._large(nbytes)]

    def parts(self, address: int, nbytes: int, ranks: int) -> list[Any]:
        """Returns memory that holds a part of ``nbytes`` bytes for each of so many ranks."""
        memory = self._of_address(address, nbytes * ranks)
        if nbytes * ranks <= _MOST:
            return [memory, nbytes, self._byte]
        return [memory, 1, self._large(nbytes)]

    @functools.lru_cache(maxsize=64)  # noqa: B019 - one object for each MPI library, that is, one
    def _large(self, nbytes: int) -> Any:
        """Returns a data type of which one element is the whole; never freed, because operations may last."""
        blocks, rest = divmod(nbytes, _BLOCK_BYTES)
        block = self._byte.Create_contiguous(_BLOCK_BYTES)
        whole = block.Create_contiguous(blocks)
        made = self._mpi.Datatype.Create_struct(
            [1, rest], [0, blocks * _BLOCK_BYTES], [whole, self._byte]
        ).Commit()
        whole.Free()
        block.Free()
        return made


def check_length(where: str, operation: Operation, got: int, nbytes: int) -> None:
    """Raises a DistBackendError where a message is not as long as the tensor that received it."""
    if got != nbytes:
        raise DistBackendError(
            f"{where} {operation}: the message has {got} bytes, but the tensor that receives it {nbytes}",
            **operation.about,
        )


class Tags:
    """The tags of a group's messages: any number below 2^31, whatever the library's largest tag.

    Tags in the lower half of the library's range stand for themselves. For every other one the group's store
    keeps a number of the upper half, given out in the order in which such tags are first used.

    Attributes:
        own: tags below this one stand for themselves.

    Args:
        store: the group's store.
        largest: the library's largest tag (``MPI_TAG_UB``).
    """

    def __init__(self, store: Any, largest: int) -> None:
        self._store = store
        self.own = largest + 1 if largest >= 2**31 - 1 else largest // 2
        self._known: dict[int, int] = {}

    def of(self, tag: int) -> int:
        """Returns MPI's tag for a user's; asks the store where a large one is used for the first time."""
        if tag < self.own:
            return tag
        found = self._known.get(tag)
        if found is None:
            key = f"tag/{tag}"
            if self._store.add(f"{key}/users", 1) == 1:
                self._store.set(key, str(self.own + self._store.add("tags", 1)))
            found = self._known[tag] = int(self._store.get(key))
        return found


CHUNK_BYTES = 2 << 20
"""What all parts of a chunk take together."""

_WINDOW = 2
"""Chunks under way at a time."""

_EXCHANGE, _PUBLISH, _STAGES = 0, 1, 2

_abandoned: list[torch.Tensor] = []
"""Memory into which MPI may still write, though nobody waits for it."""


class Arithmetic(NamedTuple):
    """What the kernels are told.

    Attributes:
        dtype: code of the data type.
        op: code of the reduction.
        factor: divisor or multiplier.
        item: bytes of an element.
    """

    dtype: int
    op: int
    factor: float
    item: int


def arithmetic_of(dtype: torch.dtype, op: ReduceOp, ranks: int) -> Arithmetic:
    """Returns what the kernels are told of a reduction of so many ranks' tensors."""
    return Arithmetic(NATIVE_CODES[dtype], op.code, kernel_factor(op, ranks), element_bytes(dtype))


def cut(whole: Part, item: int, ranks: int) -> list[Part]:
    """Returns a part for each rank, of whole elements; the first are longer by one where it must be."""
    count, rest = divmod(whole.nbytes // item, ranks)
    parts, address = [], whole.address
    for rank in range(ranks):
        nbytes = (count + (rank < rest)) * item
        parts.append(Part(address, nbytes))
        address += nbytes
    return parts


class MessageExchange:
    """Messages of a group's own between its ranks.

    Args:
        communicator: MPI's, used for nothing else that has one of its tags.
        buffers: makes messages of memory.
        largest_tag: the library's largest tag.
        exchanges: gives the number of the next exchange, which is the same on all ranks.
    """

    def __init__(
        self, communicator: Any, buffers: Buffers, largest_tag: int, exchanges: Iterator[int]
    ) -> None:
        self._isend = communicator.Isend
        self._irecv = communicator.Irecv
        self._buffers = buffers
        self._rank: int = communicator.Get_rank()
        self._size: int = communicator.Get_size()
        self._numbers = largest_tag // _STAGES
        self._exchanges = exchanges
        self._scratch: list[torch.Tensor] = []

    def _first_tag(self) -> int:
        return next(self._exchanges) % self._numbers * _STAGES

    def move(self, sent: Sequence[Part | None], received: Sequence[Part | None]) -> Steps:
        """Sends a part to each rank and receives one from each.

        Args:
            sent: for each rank, what it gets; ``None`` or no bytes for nothing.
            received: for each rank, where to put what it sends; the own part is copied.
        """
        mine, place = sent[self._rank], received[self._rank]
        if mine is not None and place is not None and mine.address != place.address:
            _native.copy(place.address, mine.address, mine.nbytes)
        yield self._exchange(self._first_tag() + _EXCHANGE, sent, received)

    def _exchange(self, tag: int, sent: Sequence[Part | None], received: Sequence[Part | None]) -> list[Any]:
        """Returns the requests of messages with all other ranks, which begin with the next one of each."""
        me, size = self._rank, self._size
        requests = []
        for step in range(1, size):
            source = (me - step) % size
            place = received[source]
            if place is not None and place.nbytes:
                requests.append(self._irecv(self._buffers(*place), source, tag))
        for step in range(1, size):
            peer = (me + step) % size
            part = sent[peer]
            if part is not None and part.nbytes:
                requests.append(self._isend(self._buffers(*part), peer, tag))
        return requests

    def reduce(
        self,
        inputs: Sequence[Part],
        target: int,
        arithmetic: Arithmetic,
        *,
        outputs: Sequence[Part] = (),
        root: int | None = None,
    ) -> Steps:
        """Reduces every rank's parts: rank r gets part r, and hands it on where there are ``outputs``.

        Args:
            inputs: this rank's contributions to all parts.
            target: where this rank's part goes; may be its own input.
            arithmetic: what the kernels are told.
            outputs: where the parts go, on the ranks that get them all; may be the inputs.
            root: the rank that gets them; ``None`` for all.
        """
        me, size = self._rank, self._size
        own = inputs[me]
        per = max(1, CHUNK_BYTES // (size * arithmetic.item)) * arithmetic.item
        chunks = -(-max(part.nbytes for part in inputs) // per)
        room = min(per, own.nbytes)
        scratch = self._take_scratch(_WINDOW * (size - 1) * room)
        begin_of_scratch = scratch.data_ptr()
        tag = self._first_tag()
        published = bool(outputs) or root is not None

        def place_of(chunk: int, source: int) -> int:
            slot = chunk % _WINDOW * (size - 1) + (source if source < me else source - 1)
            return begin_of_scratch + slot * room

        def piece(part: Part, chunk: int) -> Part:
            begin = chunk * per
            return Part(part.address + begin, max(0, min(per, part.nbytes - begin)))

        def exchange(chunk: int) -> list[Any]:
            mine = piece(own, chunk).nbytes
            received = [None if r == me else Part(place_of(chunk, r), mine) for r in range(size)]
            sent = [piece(part, chunk) for part in inputs]
            return self._exchange(tag + _EXCHANGE, sent, received)

        def combine(chunk: int) -> Part:
            mine = piece(own, chunk)
            result = Part(target + chunk * per, mine.nbytes)
            if mine.nbytes:
                sources = [mine.address if r == me else place_of(chunk, r) for r in range(size)]
                _native.reduce(
                    result.address,
                    sources,
                    mine.nbytes // arithmetic.item,
                    arithmetic.dtype,
                    arithmetic.op,
                    arithmetic.factor,
                )
            return result

        def publish(chunk: int, result: Part) -> list[Any]:
            gets_all = root is None or root == me
            received = [piece(part, chunk) for part in outputs] if gets_all else [None] * size
            sent = [result if root is None or r == root else None for r in range(size)]
            return self._exchange(tag + _PUBLISH, sent, received)

        try:
            exchanges = [exchange(chunk) for chunk in range(min(_WINDOW, chunks))]
            publications: list[Any] = []
            for chunk in range(chunks):
                yield exchanges[chunk]
                result = combine(chunk)
                exchanges[chunk] = []
                if published:
                    publications += publish(chunk, result)
                if chunk + _WINDOW < chunks:
                    exchanges.append(exchange(chunk + _WINDOW))
            if publications:
                yield publications
        except BaseException:  # it failed, or is let go of unfinished
            _abandoned.append(scratch)
            raise
        self._scratch.append(scratch)

    def _take_scratch(self, nbytes: int) -> torch.Tensor:
        """Returns memory for an operation, that of an earlier one where that is large enough."""
        for i, old in enumerate(self._scratch):
            if old.numel() >= nbytes:
                return self._scratch.pop(i)
        self._scratch.clear()
        return torch.empty(nbytes, dtype=torch.uint8)
