"""All-reduces made of the messages and broadcasts of a group, to compare with the all-reduce that it has.

A group's own all-reduce is one call, and its backend is free to carry it out in the best way that it knows.
These are the ways that anybody can write down with the other operations of a group on CPU tensors (PyTorch
Distributed, VLDB 2020, section 2.3: naive, by a ring, by a tree; section 3.3: a gather and local reductions).

Ranks exchange partial reductions ("partials") in the accumulator's type, which is wider than the tensors' for
floats of 16 bits or less and for averages of integers (``native/kernels/kernels.hpp``); only the last step
rounds. S are the bytes of a tensor, P those of a partial, n is the number of ranks.

========  =======================================  =======================================================
name      what a rank sends and receives           in which order the ranks' elements are combined
========  =======================================  =======================================================
naive     n broadcasts; receives (n - 1) S         rank order, as on ``host``
gather    messages; sends, receives (n - 1) S      rank order, as on ``host``
ring      (n - 1)/n (P + S), in 2 (n - 1) steps    in part c of n parts: c + 1, c + 2, ..., and rank c last
tree      P to the parent, S to each of up to      neighbours, pairs of neighbours, and so on: for 6 ranks
          log2 n children, in 2 log2 n steps       ((0 1) (2 3)) (4 5)
========  =======================================  =======================================================

No order depends on time, and that of ring alone on an element's place in the tensor. What is combined exactly
(integers, MIN and MAX but for the sign of a zero) is the same in any order. All ranks end with the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

import collectives._native as _native
from collectives.backends._shared.arithmetic import REDUCTIONS, kernel_factor
from collectives.core.arguments import validation as check
from collectives.core.arguments.staging import dense_outputs
from collectives.core.native_dtypes import NATIVE_CODES
from collectives.core.process_group import ProcessGroup
from collectives.core.types import BroadcastOptions, ReduceOp
from collectives.core.work import Work
from collectives.errors import UnsupportedOperationError

__all__ = ["ALGORITHMS", "all_reduce", "why_not"]

_TAG: Final = 2**31 - 3
"""Of all messages of an algorithm: those between two ranks arrive in order, so one tag is enough."""

_INT64_MIN: Final = torch.iinfo(torch.int64).min


class _Reduction:
    """The arithmetic of one all-reduce, on dense CPU memory; tensors here are flat and made of bytes.

    Args:
        dtype: the elements' type.
        op: how elements are combined.
        ranks: number of ranks.
    """

    def __init__(self, dtype: torch.dtype, op: ReduceOp, ranks: int) -> None:
        self._code = NATIVE_CODES[dtype]
        self._op = op.code
        self._factor = kernel_factor(op, ranks)
        self.element = _native.dtype_size(self._code)
        self.width = _native.accumulator_bytes(self._code, op.code)
        scaled = op.name in {"AVG", "PREMUL_SUM"}
        # where an element is its own partial, it need not be copied to become one
        self._plain = self.width == self.element and not scaled
        # partials are combined as elements of another type; those of 64-bit averages have 128 bits
        self._joins = ReduceOp.SUM.code if scaled else op.code
        self._joined: int | None = self._code
        if self.width > self.element:
            wide = {4: torch.float32, 8: torch.complex64 if dtype.is_complex else torch.float64}.get(
                self.width
            )
            self._joined = None if wide is None else NATIVE_CODES[wide]

    def in_one(self, result: torch.Tensor, addends: list[torch.Tensor]) -> None:
        """Reduces the elements of all ranks into ``result``, which may be one of them."""
        sources = [addend.data_ptr() for addend in addends]
        count = result.numel() // self.element
        _native.reduce(result.data_ptr(), sources, count, self._code, self._op, self._factor)

    def begin(self, elements: torch.Tensor) -> torch.Tensor:
        """Returns the partial of one rank's elements; it may be ``elements``."""
        if self._plain:
            return elements
        count = elements.numel() // self.element
        partial = torch.empty(count * self.width, dtype=torch.uint8)
        _native.accumulate(
            partial.data_ptr(), [elements.data_ptr()], count, self._code, self._op, self._factor
        )
        return partial

    def join(self, result: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """Combines two partials in this order into ``result``, which may be one of them."""
        if self._joined is None:
            _add_128_bits(result, first, second)
            return
        count = result.numel() // self.width
        pointers = [first.data_ptr(), second.data_ptr()]
        _native.reduce(result.data_ptr(), pointers, count, self._joined, self._joins, 1.0)

    def finish(self, result: torch.Tensor, *partials: torch.Tensor) -> None:
        """Combines partials in their order, and rounds to the elements of ``result``."""
        count = result.numel() // self.element
        pointers = [partial.data_ptr() for partial in partials]
        _native.combine(result.data_ptr(), pointers, count, self._code, self._op, self._factor)


def _add_128_bits(result: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Adds the exact sums of 64-bit integers, each a lower and an upper word."""
    a, b = (partial.view(torch.int64).view(-1, 2) for partial in (first, second))
    lower = a[:, 0] + b[:, 0]
    carry = (lower ^ _INT64_MIN) < (b[:, 0] ^ _INT64_MIN)  # as numbers without a sign
    upper = a[:, 1] + b[:, 1] + carry
    result.view(torch.int64).view(-1, 2).copy_(torch.stack([lower, upper], 1))


def _send(group: ProcessGroup, message: torch.Tensor, to: int) -> list[Work]:
    """Starts to send; a message without bytes is not sent."""
    return [group.send(message, to, _TAG)] if message.numel() else []


def _receive(group: ProcessGroup, message: torch.Tensor, source: int) -> list[Work]:
    return [group.recv(message, source, _TAG)] if message.numel() else []


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()


def _naive(group: ProcessGroup, mine: torch.Tensor, reduction: _Reduction) -> None:
    addends = [mine if rank == group.rank() else torch.empty_like(mine) for rank in range(group.size())]
    _wait(
        [
            group.broadcast([addend], BroadcastOptions(rootRank=rank, asyncOp=True))
            for rank, addend in enumerate(addends)
        ]
    )
    reduction.in_one(mine, addends)


def _gather(group: ProcessGroup, mine: torch.Tensor, reduction: _Reduction) -> None:
    me, size = group.rank(), group.size()
    addends = [mine if rank == me else torch.empty_like(mine) for rank in range(size)]
    works: list[Work] = []
    for distance in range(1, size):  # each rank begins with another one, so that none is everybody's first
        source, to = (me - distance) % size, (me + distance) % size
        works += _receive(group, addends[source], source)
        works += _send(group, mine, to)
    _wait(works)
    reduction.in_one(mine, addends)


def _ring(group: ProcessGroup, mine: torch.Tensor, reduction: _Reduction) -> None:
    me, size, element = group.rank(), group.size(), reduction.element
    count = mine.numel() // element
    begins = [element * (count * part // size) for part in range(size + 1)]
    parts = [mine[begin:end] for begin, end in itertools.pairwise(begins)]
    before, after = (me - 1) % size, (me + 1) % size
    if size == 1:
        reduction.finish(mine, reduction.begin(mine))
        return
    # Partials go around once, each begun by the rank after its last one, ...
    outgoing = reduction.begin(parts[before])
    for step in range(size - 1):
        part = parts[(me - 2 - step) % size]
        incoming = torch.empty(part.numel() // element * reduction.width, dtype=torch.uint8)
        _wait(_receive(group, incoming, before) + _send(group, outgoing, after))
        own = reduction.begin(part)
        if step == size - 2:
            reduction.finish(part, incoming, own)
        else:
            reduction.join(incoming, incoming, own)
            outgoing = incoming
    # ... and then the results, once more.
    for step in range(size - 1):
        outgoing, incoming = parts[(me - step) % size], parts[(me - step - 1) % size]
        _wait(_receive(group, incoming, before) + _send(group, outgoing, after))


def _tree(group: ProcessGroup, mine: torch.Tensor, reduction: _Reduction) -> None:
    me, size = group.rank(), group.size()
    partial = reduction.begin(mine)
    children: list[int] = []
    distance = 1
    while distance < size and not me & distance:  # binomial: a child is 1, 2, 4, ... ranks away
        if me + distance < size:
            children.append(me + distance)
            incoming = torch.empty_like(partial)
            _wait(_receive(group, incoming, me + distance))
            reduction.join(partial, partial, incoming)
        distance *= 2
    if me:
        _wait(_send(group, partial, me - distance))
        _wait(_receive(group, mine, me - distance))
    else:
        reduction.finish(mine, partial)
    _wait([work for child in reversed(children) for work in _send(group, mine, child)])


_Run = Callable[[ProcessGroup, torch.Tensor, _Reduction], None]

ALGORITHMS: Final[Mapping[str, _Run]] = MappingProxyType(
    {"naive": _naive, "gather": _gather, "ring": _ring, "tree": _tree}
)
"""The algorithms by name, to be given to :func:`all_reduce`."""


def why_not(group: ProcessGroup, dtype: torch.dtype, op: ReduceOp, device: str = "cpu") -> str | None:
    """Returns why no algorithm reduces such tensors over a group, ``None`` where all of them do.

    Args:
        group: the group; nothing is sent.
        dtype: the tensors' data type.
        op: how elements are combined.
        device: the tensors' device type.
    """
    if device != "cpu":
        return f"reduces tensors on the CPU, not on {device}"
    if op.name not in REDUCTIONS.get(dtype, ()):
        return f"{op.name} of {dtype} is not defined"
    for operation in ("broadcast", "send", "recv"):
        reason = group.capabilities.why_not(operation, device=device, dtype=torch.uint8)
        if reason is not None:
            return reason
    return None


def all_reduce(
    tensor: torch.Tensor, algorithm: str, group: ProcessGroup, op: ReduceOp = ReduceOp.SUM
) -> None:
    """Reduces a tensor over all ranks of a group, in place, by messages and broadcasts.

    Called by all ranks, in the same order as their other operations of the group; blocks until this rank's
    result is there. Nothing is compared between ranks beyond the lengths of messages, and each message has
    the group's time limit. A tensor without elements is left alone.

    Args:
        tensor: tensor on the CPU of the same shape and data type on every rank; it need not be dense.
        algorithm: a key of :data:`ALGORITHMS`.
        group: any group that moves CPU tensors.
        op: any reduction that is defined for the data type.

    Raises:
        ValueError: there is no such algorithm, or the tensor repeats elements.
        UnsupportedOperationError: the device, the data type or the reduction is not taken; nothing was sent.
    """
    run = ALGORITHMS.get(algorithm)
    if run is None:
        check.fail(
            group, "all_reduce", f"no algorithm is named {algorithm!r}; there are {', '.join(ALGORITHMS)}"
        )
    check.check_tensor(group, "all_reduce", tensor)
    if tensor.layout is not torch.strided:
        reason: str | None = f"tensors of layout {tensor.layout} are not taken; densify it first"
    else:
        reason = why_not(group, tensor.dtype, op, tensor.device.type)
    if reason is not None:
        check.fail(group, "all_reduce", f"{algorithm}: {reason}", UnsupportedOperationError)
    check.check_outputs(group, "all_reduce", [tensor])
    if not tensor.numel():
        return
    staged = dense_outputs([tensor])
    # not view(-1), which leaves the stride of a dimension of one element as it is
    mine = staged.stand_ins[0].as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    run(group, mine, _Reduction(tensor.dtype, op, group.size()))
    staged.write_back()
