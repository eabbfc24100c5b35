"""What happens in the rounds of a soak, all of it drawn from the seed and the number of the round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conformance.random_programs import COUNTS, Program

BACKENDS = ("host", "round_robin")
COUNTS_OF_ROUNDS = (*COUNTS, 20_011)
PLACEMENTS = ("aa", "aaa", "aaaa", "ab", "abc", "aab", "aabb", "abba", "abcd")
"""A letter for the machine of each rank."""

KINDS = {
    "none": "nothing, but for delays",
    "pause": "the victim stops for a moment and goes on, which is no error",
    "kill": "the victim is killed",
    "abort": "the victim aborts the group",
    "leave": "the victim shuts the group down",
    "late": "the victim does not come before the time limit of the group",
    "stop": "the victim is stopped beyond the time limit of the group",
    "die": "the victim is killed while the group takes other members, at the end",
    "mismatch": "the victim issues another operation than the others",
}
GLOO_KINDS = ("none", "pause", "kill")
"""Gloo compares nothing, and tells of a time limit and of an abort no rank that could be checked."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        kind: one of :data:`KINDS`.
        group: the group that it concerns, as the program counts them; a death concerns all of the victim's.
        victim: a member of the group, as the world counts them.
        step: the step of the program before which it begins.
        delay: seconds from there, for a death, an abort or a pause in the middle of the following steps.
        length: seconds that a pause lasts.
    """

    kind: str
    group: int
    victim: int
    step: int
    delay: float
    length: float


class Round:
    """One round: a program on new groups, and a fault.

    Args:
        seed: of the soak.
        number: of the round.
        backends: those it draws from.
        kinds: faults it draws from.
        steps: operations of the program.
    """

    def __init__(
        self,
        seed: int,
        number: int,
        backends: Sequence[str] = BACKENDS,
        kinds: Sequence[str] = tuple(KINDS),
        steps: int = 60,
    ) -> None:
        self._arguments = (seed, number, backends, kinds, steps)
        dice = random.Random(f"{seed} {number}")
        self.backend, self.placement = dice.choice(backends), dice.choice(PLACEMENTS)
        self.size = len(self.placement)
        self.program = Program(f"{seed} {number}", self.size, steps, COUNTS_OF_ROUNDS)
        group = dice.randrange(len(self.program.members))
        kinds = [kind for kind in kinds if self.backend != "gloo" or kind in GLOO_KINDS]
        delay = dice.choice([0.0, dice.uniform(0, 0.002), dice.uniform(0, 0.1)])
        victim, length = dice.choice(self.program.members[group]), dice.uniform(0.05, 1.0)
        self.fault = Fault(dice.choice(kinds), group, victim, dice.randrange(steps), delay, length)

    def __reduce__(self) -> tuple[type[Round], tuple[Any, ...]]:
        return Round, self._arguments

    @property
    def concerned(self) -> list[int]:
        """The groups that the fault breaks."""
        if self.fault.kind in {"none", "pause", "die", "mismatch"}:
            return []
        if self.fault.kind == "kill":
            return [n for n, ranks in enumerate(self.program.members) if self.fault.victim in ranks]
        return [self.fault.group]

    def __str__(self) -> str:
        seed, number, *_ = self._arguments
        what = f"round {number} of seed {seed}: {self.backend} on {self.placement!r}, {self.fault}"
        return f"{what}, groups {self.program.members}"

    def listing(self) -> str:
        """Returns the whole program."""
        return "\n".join(map(str, [self, *self.program.steps]))
