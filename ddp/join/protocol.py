"""The join protocol: every rank tells all others what it is about to communicate, or that it has joined.

Each rank adds its *code* to its own place of a sum: zero where it has joined, a number for what it
communicates where it is active, and a negative one where it failed. So everyone knows who does what.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, Work
from collectives.ddp.errors import JoinError, UnevenInputsError

__all__ = ["Announcement", "JoinProtocol", "Phase"]

_SUM = AllreduceOptions(reduceOp=ReduceOp.SUM)

_JOINED = 0
_FAILED = -1


class Phase(enum.IntEnum):
    """What a joinable communicates."""

    MAIN = 0
    """All that belongs to an iteration; of a model that announces its backward passes, only the forward."""
    BACKWARD = 1
    """A backward pass."""


@dataclass(frozen=True)
class Announcement:
    """What the active ranks are about to communicate.

    Attributes:
        place: place of the joinable.
        phase: which of its communications.
    """

    place: int
    phase: Phase

    def code(self) -> int:
        """Returns the number that stands for it."""
        return 1 + self.place * len(Phase) + self.phase

    @classmethod
    def of(cls, code: int) -> Announcement:
        """Returns what a number stands for."""
        place, phase = divmod(code - 1, len(Phase))
        return cls(place, Phase(phase))


class JoinProtocol:
    """The announcements of one context.

    Args:
        group: the ranks.
        device: device of tensors that the group takes.
        kinds: what the joinables are, for messages.
        throws: whether it is an error that a rank has joined while another is active.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, kinds: Sequence[str], *, throws: bool
    ) -> None:
        self._group = group
        self._device = device
        self._kinds = list(kinds)
        self._throws = throws
        self._closed = False

    def close(self) -> None:
        """Ends the context: later calls do nothing."""
        self._closed = True

    def announce_active(self, place: int, phase: Phase) -> None:
        """Tells that this rank is active; blocks until all ranks have announced.

        Args:
            place: place of the joinable that is about to communicate.
            phase: which of its communications.

        Raises:
            UnevenInputsError: a rank has joined and must not.
            JoinError: a rank failed, or is about to communicate something else.
        """
        if not self._closed:
            self._read(self._take(Announcement(place, phase).code()))

    def announce_joined(self) -> Announcement | None:
        """Tells that this rank has joined; returns what the others do, ``None`` where all have joined.

        Raises:
            UnevenInputsError: a rank is active and must not be.
            JoinError: a rank failed, or active ranks are about to communicate different things.
        """
        return self._read(self._take(_JOINED))

    def announce_failure(self) -> None:
        """Tells that this rank failed; does not wait for the others."""
        self._start(_FAILED)

    def _start(self, code: int) -> tuple[torch.Tensor, Work]:
        codes = [0] * self._group.size()
        codes[self._group.rank()] = code
        row = torch.tensor(codes, dtype=torch.int32, device=self._device)
        return row, self._group.allreduce([row], _SUM)

    def _take(self, code: int) -> list[int]:
        row, work = self._start(code)
        work.wait()
        codes: list[int] = self._group.to_host(row).tolist()
        return codes

    def _read(self, codes: Sequence[int]) -> Announcement | None:
        failed = [rank for rank, code in enumerate(codes) if code == _FAILED]
        if failed:
            raise JoinError(f"{self._here()} {_in_words(failed)} left it by an exception", failed)
        joined = [rank for rank, code in enumerate(codes) if code == _JOINED]
        if len(joined) == len(codes):
            return None
        if joined and self._throws:
            mine = self._group.rank() in joined
            words = "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
            found = "" if mine else words
            who = _in_words(joined).capitalize()
            raise UnevenInputsError(
                f"{self._here()} {found}{who} exhausted all inputs, while others have some, and "
                "throw_on_early_termination is set",
                joined,
            )
        by_code: dict[int, list[int]] = {}
        for rank, code in enumerate(codes):
            if code != _JOINED:
                by_code.setdefault(code, []).append(rank)
        if len(by_code) > 1:
            lines = [
                f"{_in_words(ranks)}: {self._about(Announcement.of(code))}" for code, ranks in by_code.items()
            ]
            raise JoinError(
                f"{self._here()} ranks are about to communicate different things: {'; '.join(lines)}. Run "
                "forward, backward and step alike on all ranks that have inputs",
                [rank for ranks in by_code.values() for rank in ranks],
            )
        return Announcement.of(next(iter(by_code)))

    def _here(self) -> str:
        return f"[rank {self._group.rank()}] Join over {self._group.describe()}:"

    def _about(self, active: Announcement) -> str:
        kind = self._kinds[active.place] if active.place < len(self._kinds) else f"joinable {active.place}"
        return f"{kind}, backward" if active.phase is Phase.BACKWARD else kind


def _in_words(ranks: Sequence[int]) -> str:
    """Returns some ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
