"""What ranks run for a row, and how their ends are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from collectives.bench.acceptance.context import Context
from collectives.bench.acceptance.processes import RankEnd
from collectives.bench.acceptance.report import CheckFailedError

__all__ = ["Case", "Judge", "answers_of", "exits_in_time"]

_EXIT_WITHIN_S: Final = 30.0

Judge = Callable[[Sequence[RankEnd]], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """What is run for a row.

    Attributes:
        title: what happens, in words.
        body: what each rank runs.
        judge: returns figures of how the ranks ended, or raises ``CheckFailedError``.
        leaves: whether the last rank may never end by itself.
    """

    title: str
    body: Callable[[Context], None]
    judge: Judge
    leaves: bool = False


def answers_of(ends: Sequence[RankEnd], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the answers of ranks that must have answered and exited with status 0, in time.

    Args:
        ends: how all ranks ended.
        ranks: those that are meant.

    Raises:
        CheckFailedError: one has not.
    """
    answers = []
    for rank in ranks:
        end = ends[rank]
        if end.status != 0 or end.answer is None:
            how = "had to be killed" if end.status is None else f"ended with status {end.status}"
            raise CheckFailedError(f"rank {rank} {how}; it said: {end.output.strip() or 'nothing'}")
        exits_in_time(rank, end)
        answers.append(dict(end.answer.values))
    return answers


def exits_in_time(rank: int, end: RankEnd) -> None:
    """Checks how long a rank took to exit.

    Raises:
        CheckFailedError: too long.
    """
    if end.exit_seconds > _EXIT_WITHIN_S:
        raise CheckFailedError(f"rank {rank} took {end.exit_seconds:.1f} s to exit")
