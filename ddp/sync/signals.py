"""Signals: what each rank tells all others at the end of a pass, in numbers that are averaged over the ranks.

Words used here. A *signal* is a number that is zero on a rank that has nothing to say. Only whether the
average is zero is looked at, which any floating type, any reduction and any number of ranks leaves exact. The
signals follow each other in one flat tensor, the *tail*, which rides at the end of the last bucket where it
can, so that they cost no message of their own.

What ranks must have in common is told by one number of several: each rank raises the one that names its
value, and where two of them are up, the ranks differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from collectives import ProcessGroup, Work
from collectives.ddp.reducer.averaging import Averager

__all__ = ["Heard", "Position", "SignalExchange", "Signals"]

_TROUBLE = 0
_WISH = 1
_FIRST_GROUP = 2
_MODULI = (4, 5, 7)
"""A number is told by what remains of it: two that differ by less than the product differ in one of these."""

_GROUPS = (*_MODULI, *_MODULI, 2)
"""Number of signals for each part of a :class:`Position`."""

_HEADER = _FIRST_GROUP + sum(_GROUPS)


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
class Heard:
    """What the signals of all ranks say.

    Attributes:
        trouble: whether a rank is in trouble.
        out_of_step: whether the ranks stand at different positions.
        wish: whether a rank wishes the buckets to be laid out again.
        unused: indices of the parameters that no rank gave a gradient, where that was told.
    """

    trouble: bool = False
    out_of_step: bool = False
    wish: bool = False
    unused: frozenset[int] = field(default_factory=frozenset)


class Signals:
    """The signals of one model, and how they lie in the tail.

    Attributes:
        size: number of elements of the tail.

    Args:
        counted: number of parameters whose use is told; zero where all are used.
    """

    def __init__(self, counted: int) -> None:
        self.size = _HEADER + counted
        self._counted = counted

    def fill(
        self,
        tail: torch.Tensor,
        *,
        trouble: bool,
        wish: bool,
        position: Position | None,
        used: Sequence[int] | None,
    ) -> None:
        """Writes this rank's signals.

        Args:
            tail: where to; floating, flat.
            trouble: whether something went wrong on this rank.
            wish: whether it wishes the buckets to be laid out again.
            position: where it stands; ``None`` where it is in step with any.
            used: for each parameter 1 where it took part on this rank, else 0; ``None`` where all did.
        """
        header = [0.0] * _HEADER
        header[_TROUBLE] = float(trouble)
        header[_WISH] = float(wish)
        for place in () if position is None else position.raised():
            header[place] = 1.0
        if used is not None and self._counted:
            tail.copy_(torch.tensor([*header, *used], dtype=torch.float32))
        else:
            tail[:_HEADER].copy_(torch.tensor(header))
            tail[_HEADER:].fill_(1)

    def read(self, tail: torch.Tensor) -> Heard:
        """Returns what the signals of all ranks say; waits for the device that they are on."""
        values = tail.tolist()
        used = values[_HEADER:]
        out_of_step = False
        place = _FIRST_GROUP
        for width in _GROUPS:
            out_of_step |= sum(value != 0 for value in values[place : place + width]) > 1
            place += width
        return Heard(
            trouble=values[_TROUBLE] != 0,
            out_of_step=out_of_step,
            wish=values[_WISH] != 0,
            unused=frozenset(index for index, value in enumerate(used) if value == 0)
            if 0 in used
            else frozenset(),
        )

    def alone(self, used: Collection[int]) -> Heard:
        """Returns what a rank hears that listens to itself only."""
        return Heard(unused=frozenset(index for index, value in enumerate(used) if not value))


class SignalExchange:
    """The tail as a message of its own, for passes whose buckets cannot carry it.

    Args:
        averager: averages over the ranks.
        signals: what is told.
        device: device of tensors that the group takes.
    """

    def __init__(self, averager: Averager, signals: Signals, device: torch.device) -> None:
        self._averager = averager
        self.tail = torch.zeros(signals.size, dtype=torch.float32, device=device)
        self._work: Work | None = None

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        return self._averager.group

    def start(self) -> None:
        """Issues the reduction of :attr:`tail`; called by all ranks after those of all buckets."""
        self._work = self._averager.start([self.tail])

    def wait(self) -> None:
        """Blocks until the signals of all ranks are in :attr:`tail`."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
