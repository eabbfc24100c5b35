"""Signals: what each rank tells all others at the end of a pass, in numbers that are averaged over the ranks.

A signal is zero on a rank that has nothing to report. Only whether the average is zero is looked at, which
any floating type, any reduction and any number of ranks leaves exact. The signals lie in the *tail* of the
last bucket where they can, so that they cost no message of their own.

A value that the ranks must have in common has several signals, one for each value: each rank raises its own,
and where two of them are up, the ranks differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Position", "ReducedSignals", "Signals"]

_RELAYOUT = 0
_GOES_ON = 1
"""Raised by a rank whose host does not wait for the end of its passes."""

_FIRST_GROUP = 2
_MODULI = (4, 5, 7)
"""A number is signalled by its remainders: two that differ by less than the product differ in one."""

_GROUPS = (*_MODULI, *_MODULI, 2)
"""Number of signals for each part of a :class:`Position`."""

_FIRST_ERROR = _FIRST_GROUP + sum(_GROUPS)


@dataclass(frozen=True)
class Position:
    """Where a rank stands in its program when it averages; ranks in step have equal ones.

    Attributes:
        forwards: forwards in training mode since the synchronised pass before this one.
        unsynced: passes under ``no_sync`` since then.
        repeated: whether the pass belongs to forwards that all had a synchronised pass already.
    """

    forwards: int = 0
    unsynced: int = 0
    repeated: bool = False

    def raised(self) -> Iterable[int]:
        """Yields the places of the signals that stand for this position."""
        values = (*[self.forwards] * len(_MODULI), *[self.unsynced] * len(_MODULI), self.repeated)
        place = _FIRST_GROUP
        for width, value in zip(_GROUPS, values, strict=True):
            yield place + int(value) % width
            place += width

    def __str__(self) -> str:
        again = (
            "is once more one of a forward that had one" if self.repeated else "is the first of its forward"
        )
        return (
            f"ran {self.forwards} forwards and {self.unsynced} backward passes under no_sync since the "
            f"synchronised backward pass before, and this one {again}"
        )


@dataclass
class ReducedSignals:
    """What the ranks signalled.

    Attributes:
        errors: where something went wrong: the ranks, or just 0 where they share one signal for it.
        out_of_step: whether the ranks stand at different positions.
        relayout: whether a rank requests another layout of the buckets.
        all_wait: whether the hosts of all ranks wait for the end of each pass.
        unused: indices of the parameters that no rank gave a gradient, where that is reported.
    """

    errors: Sequence[int] = ()
    out_of_step: bool = False
    relayout: bool = False
    all_wait: bool = False
    unused: frozenset[int] = field(default_factory=frozenset)


class Signals:
    """The signals of one model, and how they lie in the tail.

    Attributes:
        size: number of elements of the tail.

    Args:
        counted: number of parameters whose use is reported; zero where all are used.
        ranks: number of signals for errors: one for each rank, or one that they share.
        rank: the one that this rank raises.
    """

    def __init__(self, counted: int, ranks: int = 1, rank: int = 0) -> None:
        self._first_used = _FIRST_ERROR + ranks
        self.size = self._first_used + counted
        self._counted = counted
        self._error = _FIRST_ERROR + rank
        self._written: list[float] | None = None
        self._on_device = torch.empty(0)

    def write(
        self,
        tail: torch.Tensor,
        *,
        error: bool,
        relayout: bool,
        waits: bool,
        position: Position | None,
        used: Sequence[int] | None,
        captured: bool = False,
    ) -> None:
        """Writes this rank's signals; waits for a device only to tell of other unused parameters than before.

        Args:
            tail: where to; floating, flat.
            error: whether something went wrong on this rank.
            relayout: whether it requests another layout of the buckets.
            waits: whether its host waits for the end of each pass.
            position: where it stands; ``None`` where it is in step with any.
            used: for each parameter 1 where it took part on this rank, else 0; ``None`` where all did.
            captured: whether this becomes part of a CUDA graph, where no parameters may be unused.
        """
        header = [0.0] * self._first_used
        header[self._error] = float(error)
        header[_RELAYOUT] = float(relayout)
        header[_GOES_ON] = float(not waits)
        for place in () if position is None else position.raised():
            header[place] = 1.0
        if self._counted:
            header += [1.0] * self._counted if used is None else map(float, used)
        from_host = tail.device.type == "cpu" or (self._counted > 0 and used is not None)
        if captured:  # a graph must not read memory that is given back when other signals are kept
            self._raise(tail, header)
            return
        kept = self._on_device
        if header == self._written and (kept.device, kept.dtype) == (tail.device, tail.dtype):
            tail.copy_(kept)
            return
        if from_host:
            tail.copy_(torch.tensor(header, dtype=torch.float32))
        else:
            self._raise(tail, header)
        self._on_device = tail.clone()  # passes mostly signal what they did before
        self._written = header

    def _raise(self, tail: torch.Tensor, header: Sequence[float]) -> None:
        """Writes signals of a rank that uses all parameters, without a copy from the host."""
        tail.zero_()
        for place in range(self._first_used):
            if header[place]:
                tail[place].fill_(1.0)
        if self._counted:
            tail[self._first_used :].fill_(1.0)

    def read(self, tail: torch.Tensor) -> ReducedSignals:
        """Returns what the ranks signalled.

        Args:
            tail: the average of all ranks' signals, on the CPU.
        """
        values = tail.tolist()
        used = values[self._first_used :]
        out_of_step = False
        place = _FIRST_GROUP
        for width in _GROUPS:
            out_of_step |= sum(value != 0 for value in values[place : place + width]) > 1
            place += width
        errors = values[_FIRST_ERROR : self._first_used]
        return ReducedSignals(
            errors=[rank for rank, value in enumerate(errors) if value != 0],
            out_of_step=out_of_step,
            relayout=values[_RELAYOUT] != 0,
            all_wait=values[_GOES_ON] == 0,
            unused=frozenset(index for index, value in enumerate(used) if value == 0)
            if 0 in used
            else frozenset(),
        )

    def local(self, used: Collection[int]) -> ReducedSignals:
        """Returns the signals of this rank alone."""
        return ReducedSignals(unused=frozenset(index for index, value in enumerate(used) if not value))
